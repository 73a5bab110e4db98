"""Local updates: each node trains its own weights, and one fragment of them crosses the nodes in each step.

In DiLoCo (Douillard et al., 2023) each node trains a replica of the model. From time to time it sends its
outer gradient, the outer weights less its own, and an outer optimizer updates the outer weights by the mean.
Streaming DiLoCo (Douillard et al., 2025) sends one fragment of the weights at a time, while the next steps
are computed. Here each step sends 1/``every`` of all elements (``zerojax.sharding.fragments``) over two hops:

1. Each node sends every owner of a part of the fragment its outer gradient: the outer weights as the nodes
   know them, less its own. The owner takes the mean, and a step of SGD with Nesterov momentum.
2. The owner sends all nodes the change: the outer weights less the known weights, as delta does
   (``zerojax.weights``). So all nodes know the same weights, and rounding errors become part of the next
   change.

Then each node mixes the known outer weights into its own (Streaming DiLoCo, equation 3).

With ``outer_delay`` 0 both hops follow the optimizer's update, and the step waits for the network. Otherwise
hops begin with the step, and their results are read after its passes, so that the network has as much time as
the passes take. With 2 or more, the second hop is taken one step after the first, together with the first hop
of the next fragment.

All of these weights may be in host memory. Passes then read encoded weights (``host_update``), and the parts
of a fragment come to the device before the passes and go back after them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float32, PyTree

from zerojax.comm.in_order import on_mesh, one_at_a_time
from zerojax.errors import ConfigurationError
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import NODE
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.sharding.wire_format import Seed
from zerojax.train.batch import Batch
from zerojax.train.blocks import Blocks
from zerojax.train.exchange import REPLICATED, Exchange, Metrics, Passed, updated
from zerojax.train.fields import (
    MAX_METRICS,
    REPORT_COLUMNS,
    REPORTED,
    LocalState,
    Shards,
    Trained,
    field_specs,
)
from zerojax.train.fragment_hops import FragmentHops, Outer, Pieces, Sent
from zerojax.train.model_pass import Sums
from zerojax.train.pass_weights import ByPath
from zerojax.train.spec import TrainSpec

if TYPE_CHECKING:
    from zerojax.train.state import TrainState

_BY_NODE = PartitionSpec(NODE)


class _Exchanged(NamedTuple):
    """The arrays of an exchange after the passes or at the end of a step.

    They are of one device, global, or PartitionSpecs.

    Attributes:
        own: each node's own weights, nested by path, from which the exchange read its fragments.
        encoded: at the end, the own weights as passes read them, if the own weights are in host memory.
        outer: stored. After the passes, they have changed only if the exchange ran beside these.
        reports: the reports of all nodes from the exchange; a node's own report before it.
    """

    own: PyTree[Any]
    encoded: ByPath
    outer: Outer
    reports: Any


class _Started(NamedTuple):
    """An exchange on one device. ``pieces`` and ``sent`` are None unless it runs beside the passes."""

    device: FragmentHops
    own: Blocks
    outer: Outer
    report: Float32[Array, "1 columns"]
    pieces: Pieces | None
    sent: Sent | None


class FragmentExchange(Exchange):
    """Each node trains its own weights, and one fragment of them crosses the nodes.

    The metrics cover all nodes. "loss" and aux are means over their tokens, "grad_norm" is the root mean
    square, and "loss_limit" the mean. "skipped", "skipped_in_row" and "spike" are the largest of all nodes.
    With an ``outer_delay`` they belong to the step before.
    """

    @property
    def _beside_passes(self) -> bool:
        return self.spec.zero.outer_delay > 0

    def reads(self, state: "TrainState") -> tuple[tuple[Shards, Any], tuple[Shards, Any], Passed]:
        """See ``Exchange``: the passes read the nodes' own weights."""
        places, local = field_specs(self.spec), state.local
        assert local is not None
        shards = Shards.of(vars(state) | {"params": local.weights, "residual": {}})
        weights, outer = places["local"].weights, Outer.of(places)
        own = Shards.of(places | {"params": weights, "residual": {}, "current_replicas": False})
        exchanged = _Exchanged(weights, {}, outer, REPLICATED if self._beside_passes else _BY_NODE)
        results = Passed(weights, _BY_NODE, {}, places["model_state"], {}, {}, exchanged)
        return (shards, (Outer.of(vars(state)), local.report)), (own, (outer, _BY_NODE)), results

    def start(self, shards: Shards, own: Any, batch: Batch) -> tuple[Shards, Any, Batch]:
        """See ``Exchange``: reads the fragments and sends them, if they have the passes to hide behind."""
        spec, (outer, report) = self.spec, own
        if spec.streams:
            # Or XLA would not know that an array is in host memory which it reshapes as it came.
            shards, outer = lax.optimization_barrier((shards, outer))
        device, weights = FragmentHops(spec, shards.step, shards.step_seed), from_tree(shards.params)
        pieces, sent = None, None
        if self._beside_passes:
            outer, weights, pieces = device.read(outer, weights)
            if spec.streams:
                # Or XLA would fetch the pieces beside the passes, and send them when these have ended.
                pieces, batch = lax.optimization_barrier((pieces, batch))
            sent = device.send(pieces, report[0])
        # Only a sum over masters (``zerojax.weight_sum``) reads those in host memory.
        within = dataclasses.replace(
            shards, params=_of_node(to_device(shards.params)), encoded=_of_node(shards.encoded)
        )
        return within, _Started(device, weights, outer, report, pieces, sent), batch

    def arrive(
        self, started: _Started, gradients: Blocks, sums: Sums
    ) -> tuple[PyTree[Array], Sums, _Exchanged]:
        """See ``Exchange``. Gradients and sums have an axis of nodes, because each node has its own."""
        device, own, outer, reports, pieces, sent = started
        if sent is not None and pieces is not None:
            sums, sent = _after_passes(sums, gradients, sent)
            pieces, reports = device.receive(pieces, sent)
            outer = device.write(outer, pieces)
        grads, sums, _ = super().arrive(started, gradients, sums)
        grads, sums = jax.tree.map(lambda x: x[None], (grads, sums))
        return grads, sums, _Exchanged(to_tree(own), {}, outer, reports)

    def update(self, state: "TrainState", passed: Passed) -> tuple[Trained, Bool[Array, ""], Metrics]:
        """See ``Exchange``: each node updates its own weights."""
        assert state.local is not None
        update = jax.vmap(functools.partial(updated, self.spec.training), spmd_axis_name=NODE)
        skipped_in_row = state.local.skipped_in_row
        own = passed.exchanged.own
        before = Trained(own, state.opt_state, state.encoded, state.losses, skipped_in_row)
        return update(before, passed.gradients, passed.sums, passed.replicas, passed.updated)

    def finish(
        self, state: "TrainState", passed: Passed, after: Trained, taken: Bool[Array, ""], figures: Metrics
    ) -> tuple[dict[str, Any], Metrics]:
        """See ``Exchange``: mixes the outer weights into the nodes' own.

        Raises:
            ConfigurationError: the loss function's aux has more than ``MAX_METRICS`` scalars.
        """
        del taken
        spec, names = self.spec, sorted(passed.sums.aux)
        if len(names) > MAX_METRICS:
            raise ConfigurationError(
                f"the loss function's aux has {len(names)} scalars, and local updates (ZeroConfig.every) "
                f"have room for {MAX_METRICS}: leave some out."
            )
        report = _report(passed.sums, figures, names)
        places, reports = field_specs(spec), _BY_NODE if self._beside_passes else REPLICATED
        own = places["local"].weights, places["encoded"], Outer.of(places)
        run = on_mesh(
            self._finish_on_device,
            spec.mesh,
            in_specs=(REPLICATED, REPLICATED, *own, _BY_NODE),
            out_specs=_Exchanged(*own, reports),
        )
        step, seed = state.step, Shards.of(vars(state)).step_seed
        done = run(step, seed, after.params, after.encoded, passed.exchanged.outer, report)
        params, momentum, known, residual = map(to_tree, done.outer)
        metrics = _metrics(spec, passed.exchanged.reports if self._beside_passes else done.reports, names)
        return {
            "skipped_in_row": metrics["skipped_in_row"],
            "params": params,
            "opt_state": after.opt_state,
            "encoded": done.encoded,
            "model_state": jax.tree.map(_unless_broken, passed.model_state, state.model_state),
            "residual": residual,
            "losses": after.losses,
            "local": LocalState(done.own, known, momentum, after.skipped_in_row, report),
        }, metrics

    def _finish_on_device(
        self,
        step: Array,
        seed: Seed,
        own: PyTree[Array],
        encoded: ByPath,
        outer: Outer,
        report: Float32[Array, "1 columns"],
    ) -> _Exchanged:
        device = FragmentHops(self.spec, step, seed)
        # Without the barrier XLA repeats the update where a fragment is read, and keeps all that it reads.
        outer, mine, encoded = lax.optimization_barrier((outer, from_tree(own), encoded))
        reports = report
        if not self._beside_passes:
            outer, mine, pieces = device.read(outer, mine)
            sent = device.send(pieces, report[0])
            pieces, reports = device.receive(pieces, sent)
            outer = device.write(outer, pieces)
        mine, values = device.mix_in(outer, mine, {path: w.values for path, w in encoded.items()})
        encoded = {path: w.replace(values[path]) for path, w in encoded.items()}
        return _Exchanged(to_tree(mine), encoded, outer, reports)


def scalars_of(metrics: Metrics) -> tuple[str, ...]:
    """The names of aux among the metrics of a step, in the order of a report's columns."""
    return tuple(sorted(metrics.keys() - {"loss", *REPORTED}))


def reported(spec: TrainSpec, local: LocalState, names: tuple[str, ...]) -> Metrics:
    """The metrics of a state's last step, from the reports of all nodes; waits for them.

    ``names`` are the result of ``scalars_of``, or empty if they are not known.
    """
    gather = on_mesh(
        lambda report: lax.all_gather(report, NODE, tiled=True),
        spec.mesh,
        in_specs=_BY_NODE,
        out_specs=REPLICATED,
    )

    def make() -> jax.stages.Wrapped:
        return jax.jit(lambda report: _metrics(spec, gather(report), names))

    return one_at_a_time(spec.mesh, spec.once(f"report of {names}", make)(local.report))


def _after_passes(own: Sums, grads: Blocks, sent: Sent) -> tuple[Sums, Sent]:
    """Returns its arguments unchanged, but makes the exchange wait for the passes to finish.

    XLA can then overlap the whole exchange with the passes. The barrier depends on one element of each
    gradient, which in a stack belongs to the first layer, the last to finish. A barrier on whole gradients
    would copy them. XLA's scheduler, which works backwards from the end, sees one small kernel beside the
    collective. If the barrier depended on the loop itself, on a split of its result, or on a sum over
    devices, XLA would schedule the collective after the loop.
    """
    values, tree = jax.tree.flatten(own)
    ends = [grad.reshape(-1)[0] for grad in grads.values()]
    ends_after = jnp.stack([x.astype(jnp.float32) for x in (*values, *ends)])
    sent, ends_after = lax.optimization_barrier((sent, ends_after))
    return jax.tree.unflatten(tree, list(ends_after[: len(values)])), sent


def _unless_broken(after: Array, before: Array) -> Array:
    """State that all nodes share, such as batch statistics; unchanged if a node's state is not finite."""
    if not jnp.issubdtype(after.dtype, jnp.inexact):
        return after
    return jnp.where(jnp.isfinite(after).all(), after, before)


def _report(sums: Sums, metrics: dict[str, Array], names: list[str]) -> Float32[Array, "nodes columns"]:
    """Each node's report of a step: the columns that ``_metrics`` reads, and zeros."""
    own = [metrics.get(name, jnp.zeros(sums.loss.shape)) for name in REPORTED]
    columns = [sums.loss, sums.tokens, *own, *(sums.aux[name] for name in names)]
    report = jnp.stack([x.astype(jnp.float32) for x in columns], axis=1)
    return jnp.pad(report, ((0, 0), (0, REPORT_COLUMNS - report.shape[1])))


def _metrics(spec: TrainSpec, report: Float32[Array, "nodes columns"], names: Sequence[str]) -> Metrics:
    """The metrics of a step from all nodes' reports: see ``FragmentExchange``."""
    loss, tokens, *rest = report.T
    by_name: dict[str, Array] = dict(zip(REPORTED, rest, strict=False))
    aux = {name: column.sum() for name, column in zip(names, rest[len(REPORTED) :], strict=False)}
    metrics = Sums(loss.sum(), tokens.sum(), aux).means()
    metrics["grad_norm"] = jnp.sqrt(jnp.mean(jnp.square(by_name["grad_norm"])))
    for name in ("skipped", "skipped_in_row", "spike"):
        metrics[name] = jnp.max(by_name[name]).astype(jnp.int32)
    if spec.spikes is None:
        del metrics["spike"]
        return metrics
    return metrics | {"loss_limit": jnp.mean(by_name["loss_limit"])}


def _of_node[T: PyTree[Array]](own: T) -> T:
    """A node's own arrays without the axis of nodes, which has extent 1 on a device.

    XLA copies an array whole from host memory only if it has not been reshaped, so arrays that are no stack
    are copied first.
    """

    def one(x: Array) -> Array:
        return (x if x.ndim > 2 else to_device(x)).reshape(x.shape[1:])

    return jax.tree.map(one, own)
