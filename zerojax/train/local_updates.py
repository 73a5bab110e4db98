"""A step of local updates: every node updates weights of its own, and one fragment crosses the nodes.

DiLoCo (Douillard et al., 2023) trains a replica of the model on each node, and updates outer weights by what
the replicas have learnt since they last met. Streaming DiLoCo (Douillard et al., 2025) sends a fragment at a
time, while the next steps are computed. Here a step sends 1/``every`` of all elements, over two hops:

1. Each node sends each owner of a fragment what it has learnt: the outer weights as it knows them, less its
   own weights. The owner averages, and takes one step of SGD with Nesterov momentum on the outer weights.
2. The owner sends every node the change of the outer weights, as delta does (``zerojax.weights.gather``): so
   all nodes know the same, and what rounding loses is part of the next change.

A node then moves its own fragment towards the outer weights (Streaming DiLoCo, equation 3). With
``outer_delay`` 0 all of that follows the update, and a step waits for the network. Else both hops begin with
the step, and their results are read after its passes: the network has as much time as they take.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32, Int32, PyTree

from zerojax.adapters import ModelState
from zerojax.comm.coalesced import exchange_together
from zerojax.comm.in_order import on_mesh
from zerojax.comm.reduction import GradientReduction, Values
from zerojax.errors import ConfigurationError
from zerojax.sharding.mesh import LOCAL, NODE, OWNED
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.sharding.wire_format import Seed
from zerojax.train import per_device
from zerojax.train.batch import Batch, batch_specs
from zerojax.train.blocks import Blocks, flat_blocks, stored_blocks
from zerojax.train.fields import Shards, abstract_fields, shard_specs, specs_of
from zerojax.train.local_state import (
    MAX_METRICS,
    REPORT_COLUMNS,
    REPORTED,
    Fragments,
    LocalState,
    abstract_local,
)
from zerojax.train.pass_weights import pass_weights
from zerojax.train.per_device import Sums
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState
from zerojax.train.update import Trained, updated
from zerojax.weights.gather import cross_nodes, decode, encode
from zerojax.weights.weight import Weight, Weights

_EVERYONE, _BY_NODE = PartitionSpec(), PartitionSpec(NODE)


class Outer(NamedTuple):
    """The outer weights and what belongs to them, by path.

    Attributes:
        params: of an owner.
        momentum: of an owner; empty without one.
        known: of a node.
        residual: of a node, with error feedback: what encoding has lost so far; else empty.
    """

    params: Blocks
    momentum: Blocks
    known: Blocks
    residual: Blocks


class _Pieces(NamedTuple):
    """What a step's exchange reads: of each parameter the fragment that is sent, and the one sent before it.

    Attributes:
        learnt: of the node: the outer weights as it knows them, less its own.
        residual: of the node, with error feedback.
        params, momentum: of the owner.
        known: of the node, of the fragment whose change it is told.
        changed: of the owner, of the same fragment, if its change is sent in a step of its own; else empty.
    """

    learnt: Values
    residual: Values
    params: Values
    momentum: Values
    known: Values
    changed: Values


class _Sent(NamedTuple):
    """What has crossed the nodes.

    Attributes:
        learnt: encoded, of the fragment that this step sends.
        changes: encoded, of the fragment before it; empty if its change was sent at once.
        residual: what encoding has lost; empty without error feedback.
        reports: of all nodes.
    """

    learnt: Values
    changes: Values
    residual: Values
    reports: Float32[Array, "nodes columns"]


class FragmentExchange:
    """The exchange of one fragment of every parameter, on one device, inside ``shard_map``."""

    def __init__(self, spec: TrainSpec, step: Int32[Array, ""], seed: Seed) -> None:
        self._zero, self._step, self._seed = spec.zero, step, seed
        self._fragments = [Fragments.of(spec, leaf) for leaf in spec.leaves]
        self._layouts = tuple(fragments.layout for fragments in self._fragments)
        self._reduction = GradientReduction(spec.strategy, self._layouts, spec.world)
        self._nodes = spec.world.nodes
        # Whether a change of the outer weights is sent in the step after that of what was learnt.
        self._changes_later = spec.zero.outer_delay >= 2

    def read(self, outer: Outer, own: Blocks) -> tuple[Outer, _Pieces]:
        """The pieces that the exchange needs, and the outer weights to ``write`` its results to."""
        now, told = self._index(0), self._index(1 if self._changes_later else 0)
        pairs = zip(self._take(outer.known, now), self._take(own, now), strict=True)
        pieces = _Pieces(
            learnt=tuple(known - mine for known, mine in pairs),
            residual=self._take(outer.residual, now),
            params=self._take(outer.params, now),
            momentum=self._take(outer.momentum, now),
            known=self._take(outer.known, told),
            changed=self._take(outer.params, told) if self._changes_later else (),
        )
        # Pieces are read before anything is written, or XLA would copy whole weights to write to.
        return lax.optimization_barrier((outer, pieces))

    def send(self, pieces: _Pieces, report: Float32[Array, " columns"]) -> _Sent:
        """Send what the node has learnt, the change of the fragment before, and what it reports."""
        changes = self._encoded(pieces.changed, pieces.known) if self._changes_later else ()
        if self._nodes == 1:
            return _Sent(pieces.learnt, changes, pieces.residual, report[None])
        with jax.named_scope("exchange_fragment"):
            rows, lost = self._reduction.encode_for_owners(pieces.learnt, self._seed, pieces.residual or None)
            # One collective: XLA runs no two at once on the stream that is for those between nodes. What is
            # for all nodes is in the row of each, which is as many bytes as gathering it.
            for_all = [jnp.broadcast_to(x, (self._nodes, x.size)) for x in (*changes, report)]
            arrived = exchange_together([*rows, *for_all], NODE, own_stream=True)
        learnt, changes = arrived[: len(rows)], arrived[len(rows) : -1]
        return _Sent(tuple(learnt), tuple(x.reshape(-1) for x in changes), lost or (), arrived[-1])

    def receive(self, pieces: _Pieces, sent: _Sent) -> _Pieces:
        """The pieces after the outer update: SGD with Nesterov momentum, as PyTorch and optax define it."""
        rate, decay = self._zero.outer_learning_rate, self._zero.outer_momentum
        with jax.named_scope("outer_update"):
            sums = sent.learnt if self._nodes == 1 else self._reduction.sum_at_owners(sent.learnt)
            mean = self._without_padding(tuple(x / self._nodes for x in sums), OWNED)
            direction, momentum = mean, pieces.momentum
            if decay:
                momentum = tuple(decay * m + g for m, g in zip(momentum, mean, strict=True))
                direction = tuple(g + decay * m for g, m in zip(mean, momentum, strict=True))
            params = tuple(x - rate * g for x, g in zip(pieces.params, direction, strict=True))
        changed, changes = pieces.changed, sent.changes
        if not self._changes_later:
            changed, changes = params, self._encoded(params, pieces.known)
            if self._nodes > 1:
                changes = cross_nodes(changes, delta=True, own_stream=True)
        known = tuple(w.values for w in decode(self._weights(changed), changes, pieces.known))
        residual = self._without_padding(sent.residual, (LOCAL,))
        return pieces._replace(params=params, momentum=momentum, known=known, residual=residual)

    def write(self, outer: Outer, pieces: _Pieces) -> Outer:
        """The outer weights with what ``receive`` has made of the pieces."""
        now, told = self._index(0), self._index(1 if self._changes_later else 0)
        return Outer(
            params=self._put(outer.params, now, pieces.params),
            momentum=self._put(outer.momentum, now, pieces.momentum),
            known=self._put(outer.known, told, pieces.known),
            residual=self._put(outer.residual, now, pieces.residual),
        )

    def take_up(self, outer: Outer, own: Blocks) -> Blocks:
        """A node's own weights, moved towards the outer weights that it has known for ``outer_delay``."""
        ago = max(0, self._zero.outer_delay - 1)
        index, mixing = self._index(ago), self._zero.outer_mixing
        pairs = zip(self._take(own, index), self._take(outer.known, index), strict=True)
        # Before the first has come back there is nothing to take up.
        mixed = tuple(
            jnp.where(self._step >= ago, mixing * mine + (1 - mixing) * known, mine) for mine, known in pairs
        )
        own, mixed = lax.optimization_barrier((own, mixed))  # as in ``read``
        return self._put(own, index, mixed)

    def _index(self, steps_ago: int) -> Int32[Array, ""]:
        """The fragment that was sent so many steps ago."""
        return (self._step - steps_ago) % self._zero.every

    def _encoded(self, params: Values, known: Values) -> Values:
        return encode(self._weights(params), known)

    def _weights(self, params: Values) -> Weights:
        return tuple(Weight(x, layout, "primary") for x, layout in zip(params, self._layouts, strict=True))

    def _without_padding(self, pieces: Values, axes: tuple[str, ...]) -> Values:
        index = self._index(0)
        each = zip(self._fragments, pieces, strict=False)
        return tuple(fragments.without_padding(x, index, axes) for fragments, x in each)

    def _take(self, blocks: Blocks, index: Int32[Array, ""]) -> Values:
        """A fragment of every parameter; nothing of no blocks."""
        if not blocks:
            return ()
        return tuple(fragments.take(blocks[fragments.leaf.path], index) for fragments in self._fragments)

    def _put(self, blocks: Blocks, index: Int32[Array, ""], pieces: Values) -> Blocks:
        """Undo ``_take``."""
        each = zip(self._fragments, pieces, strict=False)
        return {
            fragments.leaf.path: fragments.put(blocks[fragments.leaf.path], index, x) for fragments, x in each
        }


class _Passed(NamedTuple):
    """What the passes of a step lead to, by node along the first axis where nodes differ.

    Attributes:
        gradients: mean gradients of each node, stored like its weights.
        sums: of each node's batch.
        model_state: of the model, the mean over all.
        outer: stored.
        reports: of all nodes, of the step before; of none, if nothing was exchanged.
    """

    gradients: PyTree[Array]
    sums: Sums
    model_state: ModelState
    outer: Outer
    reports: Float32[Array, "nodes columns"]


class _Finished(NamedTuple):
    """What a step ends with: each node's own weights, stored; and as in ``_Passed``."""

    own: PyTree[Array]
    outer: Outer
    reports: Float32[Array, "nodes columns"]


def train_locally(state: TrainState, local: LocalState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """Take a step of local updates.

    Args:
        state: with ``ZeroConfig.every``.
        local: its arrays of local updates.
        batch: the global batch.

    Returns:
        The next state, and the metrics: with ``outer_delay`` those of the step before, and NaN at first.
        Nodes report with the next exchange, so that none waits for another.

    Raises:
        ConfigurationError: the loss function's aux has more than ``MAX_METRICS`` scalars.
    """
    spec = state.spec
    zero, node = spec.zero, spec.in_node
    outer = Outer(*map(from_tree, (state.params, local.momentum, local.known, state.residual)))
    places = specs_of(abstract_local(spec))
    stored = specs_of({name: abstract_fields(spec)[name] for name in ("params", "residual")})
    outer_specs = Outer(
        *map(from_tree, (stored["params"], places.momentum, places.known, stored["residual"]))
    )
    fields = shard_specs(node, ())._replace(params=places.weights)
    names: list[str] = []

    def passes(shards: Shards, outer: Outer, report: Float32[Array, "1 columns"], batch: Batch) -> _Passed:
        exchange = FragmentExchange(spec, shards.step, shards.step_seed)
        flat, sent, pieces, reports = _flat(spec, outer), None, None, report
        if zero.outer_delay:
            flat, pieces = exchange.read(flat, _flat_own(spec, shards.params))
            sent = exchange.send(pieces, report[0])
        within = shards._replace(params=jax.tree.map(lambda x: x[0], shards.params))
        grads, (sums, model_state, _) = per_device.accumulate(
            node,
            lambda updating: pass_weights(node, within, current=False, updating=updating),
            shards.model_state,
            batch,
            shards.step_seed,
        )
        grads, _ = per_device.to_owners(node, grads, {}, shards.step_seed)
        if sent is not None and pieces is not None:
            # What arrives is read after the passes, so that they never wait for it.
            sent, grads = lax.optimization_barrier((sent, grads))
            flat, reports = exchange.write(flat, exchange.receive(pieces, sent)), sent.reports
        grads = stored_blocks({path: grad / sums.tokens for path, grad in grads.items()}, node.leaves)
        names[:] = sorted(sums.aux)
        grads, sums = jax.tree.map(lambda x: x[None], (to_tree(grads), sums))
        return _Passed(grads, sums, model_state, _stored(flat, outer), reports)

    def update(before: Trained, grads: PyTree[Array], sums: Sums) -> tuple[Trained, dict[str, Array]]:
        after, _, metrics = updated(node, before, grads, sums.loss / sums.tokens)
        return after, metrics

    def finish(
        step: Array, seed: Seed, own: PyTree[Array], outer: Outer, report: Float32[Array, "1 columns"]
    ) -> _Finished:
        exchange = FragmentExchange(spec, step, seed)
        # Without the barrier XLA repeats the update where a fragment is read, and keeps all that it reads.
        flat, mine = lax.optimization_barrier((_flat(spec, outer), _flat_own(spec, own)))
        reports = report
        if not zero.outer_delay:
            flat, pieces = exchange.read(flat, mine)
            sent = exchange.send(pieces, report[0])
            flat, reports = exchange.write(flat, exchange.receive(pieces, sent)), sent.reports
        blocks = from_tree(own)
        mixed = {path: x.reshape(blocks[path].shape) for path, x in exchange.take_up(flat, mine).items()}
        return _Finished(to_tree(mixed), _stored(flat, outer), reports)

    reports = _EVERYONE if zero.outer_delay else _BY_NODE
    run = on_mesh(
        passes,
        spec.mesh,
        in_specs=(fields, outer_specs, _BY_NODE, batch_specs(spec, batch)),
        out_specs=_Passed._make([places.weights, _BY_NODE, fields.model_state, outer_specs, reports]),
    )
    shards = state.shards._replace(params=local.weights)
    passed = run(shards, outer, local.report, batch)
    if len(names) > MAX_METRICS:
        raise ConfigurationError(
            f"the loss function's aux has {len(names)} scalars, and local updates (ZeroConfig.every) have "
            f"room for {MAX_METRICS}: leave some out."
        )
    after, metrics = jax.vmap(update, spmd_axis_name=NODE)(state.trained, passed.gradients, passed.sums)
    report = _report(passed.sums, metrics, names)
    reports = _BY_NODE if zero.outer_delay else _EVERYONE
    run = on_mesh(
        finish,
        spec.mesh,
        in_specs=(_EVERYONE, _EVERYONE, places.weights, outer_specs, _BY_NODE),
        out_specs=_Finished._make([places.weights, outer_specs, reports]),
    )
    done = run(shards.step, shards.step_seed, after.params, passed.outer, report)
    params, momentum, known, residual = map(to_tree, done.outer)
    told = _metrics(spec, passed.reports if zero.outer_delay else done.reports, names)
    following = state.replace(
        step=state.step + 1,
        skipped_in_row=told["skipped_in_row"],
        params=params,
        opt_state=after.opt_state,
        model_state=passed.model_state,
        residual=residual,
        losses=after.losses,
        local=LocalState(done.own, known, momentum, after.skipped_in_row, report),
    )
    return following, told


def _report(sums: Sums, metrics: dict[str, Array], names: list[str]) -> Float32[Array, "nodes columns"]:
    """What each node has to tell of a step, as ``_metrics`` reads it."""
    told = [metrics.get(name, jnp.zeros(sums.loss.shape)) for name in REPORTED]
    columns = [sums.loss, sums.tokens, *told, *(sums.aux[name] for name in names)]
    report = jnp.stack([x.astype(jnp.float32) for x in columns], axis=1)
    return jnp.pad(report, ((0, 0), (0, REPORT_COLUMNS - report.shape[1])))


def _metrics(spec: TrainSpec, report: Float32[Array, "nodes columns"], names: list[str]) -> dict[str, Array]:
    """The metrics of a step from what all nodes report of it."""
    loss, tokens, *rest = report.T
    told: dict[str, Array] = dict(zip(REPORTED, rest, strict=False))
    aux = {name: column.sum() for name, column in zip(names, rest[len(REPORTED) :], strict=False)}
    metrics, _ = per_device.means(Sums(loss.sum(), tokens.sum(), aux))
    metrics["grad_norm"] = jnp.sqrt(jnp.mean(jnp.square(told["grad_norm"])))
    for name in ("skipped", "skipped_in_row", "spike"):
        metrics[name] = jnp.max(told[name]).astype(jnp.int32)
    if spec.spikes is None:
        del metrics["spike"]
        return metrics
    return metrics | {"loss_limit": jnp.mean(told["loss_limit"])}


def _flat(spec: TrainSpec, outer: Outer) -> Outer:
    """This device's blocks, flat but for the layers of a stack."""
    return Outer(*(flat_blocks(blocks, spec.leaves) if blocks else {} for blocks in outer))


def _flat_own(spec: TrainSpec, own: PyTree[Array]) -> Blocks:
    return flat_blocks(from_tree(own), spec.leaves)


def _stored(flat: Outer, like: Outer) -> Outer:
    """Undo ``_flat``."""
    return Outer(
        *(
            {path: x.reshape(before[path].shape) for path, x in blocks.items()}
            for blocks, before in zip(flat, like, strict=True)
        )
    )
