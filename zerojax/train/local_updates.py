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
from zerojax.comm.coalesced import exchange_together, gather_together
from zerojax.comm.in_order import on_mesh
from zerojax.comm.reduction import GradientReduction, Values
from zerojax.errors import ConfigurationError
from zerojax.sharding.mesh import LOCAL, NODE, OWNED
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.sharding.wire_format import Seed
from zerojax.train import per_device
from zerojax.train.batch import Batch, batch_specs
from zerojax.train.blocks import Blocks, flat_blocks, stored_blocks
from zerojax.train.fields import Shards, shard_specs, specs_of
from zerojax.train.local_state import MAX_METRICS, Fragments, LocalState, abstract_local
from zerojax.train.pass_weights import pass_weights
from zerojax.train.per_device import Sums
from zerojax.train.spec import TrainSpec
from zerojax.train.update import Trained, updated
from zerojax.weights.gather import cross_nodes, crosses_nodes, decode, encode
from zerojax.weights.weight import Weight, Weights

_TOLD = ("grad_norm", "skipped", "skipped_in_row", "spike", "loss_limit")
"""What a node reports of an update, besides the sums of its loss."""


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


class _Sent(NamedTuple):
    """What of a step is under way between nodes.

    Attributes:
        learnt: encoded, of the fragment that this step sends.
        changes: encoded, of the fragment before it; empty if its change was sent at once.
    """

    learnt: Values
    changes: Values


class FragmentExchange:
    """The exchange of one fragment of every parameter, on one device, inside ``shard_map``."""

    def __init__(self, spec: TrainSpec, step: Int32[Array, ""], seed: Seed) -> None:
        self._zero = spec.zero
        self._leaves = spec.leaves
        self._seed = seed
        self._fragments = [Fragments.of(spec, leaf) for leaf in spec.leaves]
        self._reduction = GradientReduction(
            spec.strategy, tuple(fragments.layout for fragments in self._fragments), spec.world
        )
        self._nodes = spec.world.nodes
        self._step = step

    def _index(self, steps_ago: int) -> Int32[Array, ""]:
        """The fragment that was sent so many steps ago."""
        return (self._step - steps_ago) % self._zero.every

    @property
    def _changes_later(self) -> bool:
        """Whether the outer weights' change is sent in the step after that of what was learnt."""
        return self._zero.outer_delay >= 2

    def send(self, outer: Outer, own: Blocks) -> tuple[Outer, _Sent]:
        """Send what a node has learnt of a fragment; returns the residuals of that, too."""
        index = self._index(0)
        learnt = tuple(
            known - mine
            for known, mine in zip(self._take(outer.known, index), self._take(own, index), strict=True)
        )
        if self._nodes == 1:
            sent = learnt
        else:
            residual = self._take(outer.residual, index) if outer.residual else None
            with jax.named_scope("reduce_node"):
                rows, kept = self._reduction.encode_for_owners(learnt, self._seed, residual)
                sent = tuple(exchange_together(rows, NODE, own_stream=True))
            if kept is not None:
                outer = outer._replace(residual=self._put(outer.residual, index, kept, (LOCAL,)))
        changes = self._send_changes(outer, self._index(1)) if self._changes_later else ()
        return outer, _Sent(sent, changes)

    def receive(self, outer: Outer, sent: _Sent) -> Outer:
        """Update the outer weights by what has arrived, and what nodes know of them."""
        index = self._index(0)
        changed = outer
        with jax.named_scope("outer_update"):
            sums = sent.learnt if self._nodes == 1 else self._reduction.sum_at_owners(sent.learnt)
            mean = tuple(
                fragments.without_padding(x / self._nodes, index, OWNED)
                for fragments, x in zip(self._fragments, sums, strict=True)
            )
            changed = self._outer_update(outer, index, mean)
        if self._changes_later:
            return self._known_after(changed, outer, self._index(1), sent.changes)
        return self._known_after(changed, changed, index, self._send_changes(changed, index))

    def take_up(self, outer: Outer, own: Blocks) -> Blocks:
        """A node's own weights, moved towards the outer weights that it has known for ``outer_delay``."""
        ago = max(0, self._zero.outer_delay - 1)
        index, mixing = self._index(ago), self._zero.outer_mixing
        pairs = zip(self._take(own, index), self._take(outer.known, index), strict=True)
        # Before the first has come back there is nothing to take up.
        mixed = tuple(
            jnp.where(self._step >= ago, mixing * mine + (1 - mixing) * known, mine) for mine, known in pairs
        )
        return self._put(own, index, mixed)

    def _outer_update(self, outer: Outer, index: Int32[Array, ""], mean: Values) -> Outer:
        """SGD with Nesterov momentum, as PyTorch and optax define it."""
        rate, decay = self._zero.outer_learning_rate, self._zero.outer_momentum
        direction, momentum = mean, outer.momentum
        if decay:
            fresh = tuple(decay * m + g for m, g in zip(self._take(momentum, index), mean, strict=True))
            direction = tuple(g + decay * m for g, m in zip(mean, fresh, strict=True))
            momentum = self._put(momentum, index, fresh)
        params = tuple(x - rate * g for x, g in zip(self._take(outer.params, index), direction, strict=True))
        return outer._replace(params=self._put(outer.params, index, params), momentum=momentum)

    def _send_changes(self, outer: Outer, index: Int32[Array, ""]) -> Values:
        weights, known = self._weights(outer, index), self._take(outer.known, index)
        payloads = encode(weights, known)
        return cross_nodes(payloads, delta=True, own_stream=True) if crosses_nodes(weights) else payloads

    def _known_after(self, changed: Outer, sent: Outer, index: Int32[Array, ""], changes: Values) -> Outer:
        """With what nodes know after ``changes``, which come of ``sent``."""
        arrived = decode(self._weights(sent, index), changes, self._take(sent.known, index))
        return changed._replace(known=self._put(changed.known, index, tuple(w.values for w in arrived)))

    def _weights(self, outer: Outer, index: Int32[Array, ""]) -> Weights:
        pairs = zip(self._take(outer.params, index), self._fragments, strict=True)
        return tuple(Weight(x, fragments.layout, "primary") for x, fragments in pairs)

    def _take(self, blocks: Blocks, index: Int32[Array, ""]) -> Values:
        return tuple(fragments.take(blocks[fragments.leaf.path], index) for fragments in self._fragments)

    def _put(
        self, blocks: Blocks, index: Int32[Array, ""], values: Values, owners: tuple[str, ...] = ()
    ) -> Blocks:
        put: dict[Path, Array] = {}
        for fragments, x in zip(self._fragments, values, strict=True):
            path = fragments.leaf.path
            x = fragments.without_padding(x, index, owners) if owners else x
            put[path] = fragments.put(blocks[path], index, x)
        return put


class _Passed(NamedTuple):
    """What the passes of a step lead to, by node along the first axis where nodes differ.

    Attributes:
        gradients: mean gradients of each node, stored like its weights.
        sums: of each node's batch.
        model_state: of the model, the mean over all.
        outer: stored.
        report: of the step before, of all nodes.
    """

    gradients: PyTree[Array]
    sums: Sums
    model_state: ModelState
    outer: Outer
    report: Float32[Array, "nodes columns"]


def train_locally(
    spec: TrainSpec, shards: Shards, local: LocalState, trained: Trained, batch: Batch
) -> tuple[Trained, LocalState, PyTree, PyTree, ModelState, dict[str, Array]]:
    """Take a step of local updates.

    Args:
        spec: the train spec, with ``ZeroConfig.every``.
        shards: the state's fields that passes read; the outer weights are its ``params``.
        local: the state's arrays of local updates.
        trained: the optimizer's fields, by node along the first axis; the weights are those of ``local``.
        batch: the global batch.

    Returns:
        The same fields after the step: of the optimizer, of local updates, the outer weights, the residuals,
        the model's state; and the metrics of the step before, which NaN stands for at first: nodes report
        with the exchange of the next step, so that none waits for another.
    """
    zero, node = spec.zero, spec.in_node
    outer = Outer(
        from_tree(shards.params),
        from_tree(local.momentum),
        from_tree(local.known),
        from_tree(shards.residual),
    )
    places = abstract_local(spec)
    fields = shard_specs(spec, ())
    outer_specs = Outer(
        *map(from_tree, (fields.params, specs_of(places.momentum), specs_of(places.known), fields.residual))
    )
    own_specs, by_node = specs_of(places.weights), PartitionSpec(NODE)
    names: list[str] = []

    def passes(shards: Shards, own: PyTree[Array], outer: Outer, report: Array, batch: Batch) -> _Passed:
        seed = shards.step_seed
        exchange = FragmentExchange(spec, shards.step, seed)
        flat, sent = _flat(spec, outer), None
        told = _gathered(report) if spec.world.nodes > 1 else report
        if zero.outer_delay:
            flat, sent = exchange.send(flat, _flat_own(spec, own))
        within = shards._replace(params=jax.tree.map(lambda x: x[0], own), copies={}, residual={})
        grads, (sums, model_state, _) = per_device.accumulate(
            node,
            lambda updating: pass_weights(node, within, current=False, updating=updating),
            shards.model_state,
            batch,
            seed,
        )
        grads, _ = per_device.to_owners(node, grads, {}, seed)
        if sent is not None:
            # What arrives is read after the passes, so that they never wait for it.
            sent, told, grads = lax.optimization_barrier((sent, told, grads))
            flat = exchange.receive(flat, sent)
        grads = stored_blocks({path: grad / sums.tokens for path, grad in grads.items()}, node.leaves)
        names[:] = sorted(sums.aux)
        grads, sums = jax.tree.map(lambda x: x[None], (to_tree(grads), sums))
        return _Passed(grads, sums, model_state, _stored(spec, flat, outer), told)

    specs = (fields, own_specs, outer_specs, by_node, batch_specs(spec, batch))
    wanted = _Passed(own_specs, Sums(by_node, by_node, by_node), fields.model_state, outer_specs, _EVERYONE)
    run = on_mesh(passes, spec.mesh, in_specs=specs, out_specs=wanted)
    passed = run(shards, local.weights, outer, local.report, batch)
    if len(names) > MAX_METRICS:
        raise ConfigurationError(
            f"the loss function's aux has {len(names)} scalars, and local updates (ZeroConfig.every) have room "
            f"for {MAX_METRICS}: leave some out."
        )

    def update(before: Trained, grads: PyTree[Array], sums: Sums) -> tuple[Trained, dict[str, Array]]:
        after, _, metrics = updated(node, before, grads, sums.loss / sums.tokens)
        return after, metrics

    after, metrics = jax.vmap(update, spmd_axis_name=NODE)(trained, passed.gradients, passed.sums)

    def finish(step: Array, seed: Array, own: PyTree[Array], outer: Outer) -> tuple[PyTree[Array], Outer]:
        exchange = FragmentExchange(spec, step, seed)
        flat, mine = _flat(spec, outer), _flat_own(spec, own)
        if not zero.outer_delay:
            flat, sent = exchange.send(flat, mine)
            flat = exchange.receive(flat, sent)
            outer = _stored(spec, flat, outer)
        mixed = exchange.take_up(flat, mine)
        own_blocks = from_tree(own)
        return to_tree({path: x.reshape(own_blocks[path].shape) for path, x in mixed.items()}), outer

    run = on_mesh(
        finish,
        spec.mesh,
        in_specs=(_EVERYONE, _EVERYONE, own_specs, outer_specs),
        out_specs=(own_specs, outer_specs),
    )
    own, outer = run(shards.step, shards.step_seed, after.params, passed.outer)
    told = {name: metrics.get(name, jnp.zeros(spec.world.nodes)) for name in _TOLD}
    columns = [
        passed.sums.loss,
        passed.sums.tokens,
        *told.values(),
        *(passed.sums.aux[name] for name in names),
    ]
    report = jnp.stack([x.astype(jnp.float32) for x in columns], axis=1)
    report = jnp.pad(report, ((0, 0), (0, local.report.shape[1] - report.shape[1])))
    following = LocalState(own, to_tree(outer.known), to_tree(outer.momentum), after.skipped_in_row, report)
    params, residual = to_tree(outer.params), to_tree(outer.residual)
    seen = _metrics(spec, passed.report, names)
    return after, following, params, residual, passed.model_state, seen


_EVERYONE = PartitionSpec()


def _metrics(spec: TrainSpec, report: Float32[Array, "nodes columns"], names: list[str]) -> dict[str, Array]:
    """The metrics of a step from what all nodes report of it."""
    loss, tokens, *rest = report.T
    told = dict(zip(_TOLD, rest, strict=False))
    aux = {name: column.sum() for name, column in zip(names, rest[len(_TOLD) :], strict=False)}
    metrics, _ = per_device.means(Sums(loss.sum(), tokens.sum(), aux))
    metrics["grad_norm"] = jnp.sqrt(jnp.mean(jnp.square(told["grad_norm"])))
    integers = ["skipped", "skipped_in_row"] + (["spike"] if spec.spikes else [])
    metrics |= {name: jnp.max(told[name]).astype(jnp.int32) for name in integers}
    return metrics | ({"loss_limit": jnp.mean(told["loss_limit"])} if spec.spikes else {})


@jax.named_scope("metrics")
def _gathered(report: Float32[Array, "1 columns"]) -> Float32[Array, "nodes columns"]:
    (rows,) = gather_together([report.reshape(-1)], NODE, own_stream=True)
    return rows


def _flat(spec: TrainSpec, outer: Outer) -> Outer:
    """This device's blocks, flat but for the layers of a stack."""
    return Outer(*(flat_blocks(blocks, spec.leaves) if blocks else {} for blocks in outer))


def _flat_own(spec: TrainSpec, own: PyTree[Array]) -> Blocks:
    return flat_blocks(from_tree(own), spec.leaves)


def _stored(spec: TrainSpec, flat: Outer, like: Outer) -> Outer:
    """Undo ``_flat``."""
    return Outer(
        *(
            {path: x.reshape(before[path].shape) for path, x in blocks.items()}
            for blocks, before in zip(flat, like, strict=True)
        )
    )
