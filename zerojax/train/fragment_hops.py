"""The way of fragments between nodes in local updates, on one device (``zerojax.sharding.fragments``).

``zerojax.train.local_updates`` has the algorithm.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from zerojax.comm.coalesced import Arrived, exchange_together
from zerojax.comm.reduction import GradientReduction
from zerojax.sharding.layout import Values
from zerojax.sharding.mesh import LOCAL, NODE, OWNED
from zerojax.sharding.param_tree import from_tree
from zerojax.sharding.wire_format import Seed
from zerojax.train.blocks import Blocks
from zerojax.train.spec import TrainSpec
from zerojax.weights import Weight, Weights, cross_nodes, decode, encode


class Outer(NamedTuple):
    """The outer weights and the arrays that go with them, by path.

    Attributes:
        params: the outer weights, at their owners.
        momentum: of the outer optimizer, at the owners; empty without momentum.
        known: the outer weights as the nodes know them, in every node.
        residual: with error feedback, the past errors of encoding a node's outer gradients; else empty.
    """

    params: Blocks
    momentum: Blocks
    known: Blocks
    residual: Blocks

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "Outer":
        """Take them from the fields of a state."""
        local = fields["local"]
        return Outer(*map(from_tree, (fields["params"], local.momentum, local.known, fields["residual"])))


class Pieces(NamedTuple):
    """One device's part of the fragments that a step exchanges: an array for each parameter.

    Two fragments take part: the current one, whose outer gradients are sent, and the one whose change is
    sent. They are the same fragment, except with an ``outer_delay`` of 2 or more. The change then belongs to
    the fragment of the step before.

    Attributes:
        outer_grads: of the current fragment in this node.
        residual: of the current fragment in this node; empty without error feedback.
        params, momentum: of the current fragment, as its owner; momentum is empty without it.
        known: of the fragment whose change is sent, in this node.
        changed: the outer weights of that fragment, as its owner; empty if it is the current one.
    """

    outer_grads: Values
    residual: Values
    params: Values
    momentum: Values
    known: Values
    changed: Values


class Sent(NamedTuple):
    """Payloads on their way, or arrived from the other nodes.

    Attributes:
        arrived: encoded outer gradients of the current fragment from every node; with one node, not encoded.
            Encoded changes from every owner, unless they can only be sent after the outer update. The reports
            of every node.
        residual: the errors of encoding the outer gradients; empty without error feedback.
    """

    arrived: Arrived
    residual: Values


class FragmentHops:
    """The exchange of one fragment of each parameter, on one device, inside ``shard_map``."""

    def __init__(self, spec: TrainSpec, step: Int32[Array, ""], seed: Seed) -> None:
        self._zero, self._step, self._seed = spec.zero, step, seed
        self._fragments = spec.fragments
        self._layouts = tuple(fragments.layout for fragments in self._fragments)
        self._reduction = GradientReduction(spec.strategy, self._layouts, spec.world)
        self._nodes = spec.world.nodes
        # Whether a fragment's change is sent one step after its outer gradients.
        self._changes_later = spec.zero.outer_delay >= 2
        self._current = self._index(0)
        self._changing = self._index(1 if self._changes_later else 0)

    def read(self, outer: Outer, own: Blocks) -> tuple[Outer, Blocks, Pieces]:
        """Read the pieces that the exchange needs.

        Args:
            outer: this device's blocks, stored.
            own: this node's own weights, stored.

        Returns:
            ``outer``, to which ``write`` writes the results; ``own``, for the update; and the pieces.
        """
        now, changing = self._current, self._changing
        pairs = zip(self._take(outer.known, now), self._take(own, now), strict=True)
        pieces = Pieces(
            outer_grads=tuple(known - mine for known, mine in pairs),
            residual=self._take(outer.residual, now),
            params=self._take(outer.params, now),
            momentum=self._take(outer.momentum, now),
            known=self._take(outer.known, changing),
            changed=self._take(outer.params, changing) if self._changes_later else (),
        )
        # All pieces are read before anything is written: otherwise XLA copies whole weights to write to.
        return lax.optimization_barrier((outer, own, pieces))

    def send(self, pieces: Pieces, report: Float32[Array, " columns"]) -> Sent:
        """Send outer gradients, the changes that are known by now, and the node's report of its last step."""
        changes = encode(self._weights(pieces.changed, pieces.known)) if self._changes_later else ()
        if self._nodes == 1:
            own = dict(enumerate((*pieces.outer_grads, *changes, report[None])))
            return Sent(Arrived(own, (), ()), pieces.residual)
        with jax.named_scope("exchange_fragment"):
            rows, lost = self._reduction.encode_for_owners(
                pieces.outer_grads, self._seed, pieces.residual or None
            )
            # One collective, because XLA runs only one at a time on the stream of the hops between nodes.
            # Values for all nodes are repeated in each row, which is as many bytes as an all-gather sends.
            for_all = [jnp.broadcast_to(x, (self._nodes, x.size)) for x in (*changes, report)]
            return Sent(exchange_together([*rows, *for_all], NODE, separate_stream=True), lost or ())

    def receive(self, pieces: Pieces, sent: Sent) -> tuple[Pieces, Float32[Array, "nodes columns"]]:
        """Update the pieces from the arrived payloads; returns them, and the reports.

        The outer optimizer is SGD with Nesterov momentum, as PyTorch and optax define it. Changes that
        ``send`` could not send yet are sent here.
        """
        *arrived, reports = sent.arrived.split()
        grads = tuple(arrived[: len(self._fragments)])
        rate, decay = self._zero.outer_learning_rate, self._zero.outer_momentum
        with jax.named_scope("outer_update"):
            sums = grads if self._nodes == 1 else self._reduction.sum_at_owners(grads)
            mean = self._without_padding(tuple(x / self._nodes for x in sums), OWNED)
            direction, momentum = mean, pieces.momentum
            if decay:
                momentum = tuple(decay * m + g for m, g in zip(momentum, mean, strict=True))
                direction = tuple(g + decay * m for g, m in zip(mean, momentum, strict=True))
            params = tuple(x - rate * g for x, g in zip(pieces.params, direction, strict=True))
        weights = self._weights(pieces.changed if self._changes_later else params, pieces.known)
        changes = tuple(x.reshape(-1) for x in arrived[len(self._fragments) :])
        if not self._changes_later:
            changes = encode(weights)
            if self._nodes > 1:
                changes = cross_nodes(weights, changes, separate_stream=True)
        known = tuple(w.values for w in decode(weights, changes))
        residual = self._without_padding(sent.residual, (LOCAL,))
        return pieces._replace(params=params, momentum=momentum, known=known, residual=residual), reports

    def write(self, outer: Outer, pieces: Pieces) -> Outer:
        """Write the pieces from ``receive`` to the places from which ``read`` took them."""
        now = self._current
        return Outer(
            params=self._put(outer.params, now, pieces.params),
            momentum=self._put(outer.momentum, now, pieces.momentum),
            known=self._put(outer.known, self._changing, pieces.known),
            residual=self._put(outer.residual, now, pieces.residual),
        )

    def mix_in(self, outer: Outer, own: Blocks, encoded: Blocks) -> tuple[Blocks, Blocks]:
        """Mix the outer weights into the fragment that has arrived last.

        Args:
            outer: this device's blocks, stored.
            own: this node's own weights, stored.
            encoded: the own weights in the dtype in which passes read them, or none.

        Returns:
            ``own`` and ``encoded`` with the mixture.
        """
        ago = max(0, self._zero.outer_delay - 1)
        index, mixing = self._index(ago), self._zero.outer_mixing
        pairs = zip(self._take(own, index), self._take(outer.known, index), strict=True)
        # In the first steps no fragment has arrived yet.
        mixed = tuple(
            jnp.where(self._step >= ago, mixing * mine + (1 - mixing) * known, mine) for mine, known in pairs
        )
        own, mixed = lax.optimization_barrier((own, mixed))  # read before it is written, as in ``read``
        sent = zip(self._fragments, mixed, strict=True) if encoded else ()
        rounded = tuple(x.astype(encoded[fragments.leaf.path].dtype) for fragments, x in sent)
        return self._put(own, index, mixed), self._put(encoded, index, rounded)

    def _index(self, steps_ago: int) -> Int32[Array, ""]:
        """The fragment that was the current one ``steps_ago`` steps ago."""
        return (self._step - steps_ago) % self._zero.every

    def _weights(self, params: Values, known: Values) -> Weights:
        """Outer weights as their owners send them: by their differences from the known ones."""
        each = zip(params, self._layouts, known, strict=True)
        return tuple(Weight(x, layout, "primary", replica=own) for x, layout, own in each)

    def _without_padding(self, pieces: Values, axes: tuple[str, ...]) -> Values:
        """The current fragment with zeros in the padding; empty for no pieces."""
        each = zip(self._fragments, pieces, strict=False)
        return tuple(fragments.without_padding(x, self._current, axes) for fragments, x in each)

    def _take(self, blocks: Blocks, index: Int32[Array, ""]) -> Values:
        """A fragment of each parameter; empty for no blocks."""
        if not blocks:
            return ()
        return tuple(fragments.take(blocks[fragments.leaf.path], index) for fragments in self._fragments)

    def _put(self, blocks: Blocks, index: Int32[Array, ""], pieces: Values) -> Blocks:
        """Undo ``_take``."""
        each = zip(self._fragments, pieces, strict=False)  # of nothing for no blocks
        return {
            fragments.leaf.path: fragments.put(blocks[fragments.leaf.path], index, x) for fragments, x in each
        }
