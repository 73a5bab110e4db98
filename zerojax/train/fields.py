"""The arrays of a train state: their shapes, dtypes and shardings."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, PyTree, UInt32

from zerojax.adapters.adapter import ModelState
from zerojax.comm.in_order import on_mesh
from zerojax.optim.moments import by_moment
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.sharding.param_tree import Path, to_tree
from zerojax.sharding.wire_format import Seed, mix
from zerojax.train.spec import TrainSpec
from zerojax.train.spikes import Losses
from zerojax.weights import Weight

MAX_METRICS = 64
"""The most scalars that a loss function's aux may have. A state is created before they can be counted."""
REPORTED = ("grad_norm", "skipped", "skipped_in_row", "spike", "loss_limit")
"""The metrics of a node's update in its report, besides sums over its tokens."""
REPORT_COLUMNS = 2 + len(REPORTED) + MAX_METRICS
"""The fp32 numbers in a node's report: the sums of its loss and tokens come first."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shards:
    """The fields of a state that a pass reads; see ``TrainState``.

    Inside ``shard_map`` they are one device's parts of the arrays; outside, the global arrays or their
    PartitionSpecs.
    """

    step: Int32[Array, ""]
    seed: UInt32[Array, ""]
    params: PyTree[Array]
    encoded: dict[Path, Weight]
    model_state: ModelState
    replicas: dict[Path, Weight]
    residual: PyTree[Array]
    frozen: PyTree[Weight]
    current_replicas: bool = field(metadata={"static": True})

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Shards":
        """Take these fields from the fields of a state."""
        return Shards(**{one.name: values[one.name] for one in dataclasses.fields(Shards)})

    @functools.cached_property
    def step_seed(self) -> Seed:
        """The seed of this step's random bits."""
        return mix(self.seed, self.step)


class Trained(NamedTuple):
    """The fields of a state that an update changes, with local updates for one node; see ``TrainState``."""

    params: PyTree[Array]
    opt_state: PyTree[Array]
    encoded: dict[Path, Weight]
    losses: Losses
    skipped_in_row: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalState:
    """The arrays of local updates (``zerojax.train.local_updates``). Trees are nested by path.

    A state has the weights three times. The outer weights are ``TrainState.params``, spread over all devices.
    Each node trains its own weights. The known weights are in every node: they lag behind the outer
    weights by changes that are still to be sent, and by rounding errors.

    Attributes:
        weights: each node's own weights, fp32 ``[nodes, *stored_shape]``, spread over the node's devices.
        known: the outer weights as the nodes know them, fp32 ``stored_shape``, the same in every node.
        momentum: of the outer weights, fp32, stored like them; empty if ``ZeroConfig.outer_momentum`` is 0.
        skipped_in_row: ``TrainState.skipped_in_row`` of each node.
        report: a row for each node, with the sums and metrics of its last step.
    """

    weights: PyTree
    known: PyTree
    momentum: PyTree
    skipped_in_row: Int32[Array, " nodes"]
    report: Float32[Array, "nodes columns"]


def abstract_fields(spec: TrainSpec) -> dict[str, Any]:
    """Every field of a state except ``spec``, as ShapeDtypeStructs; computed once for each spec."""
    return dict(spec.once("fields", lambda: _abstract_fields(spec)))


def _abstract_fields(spec: TrainSpec) -> dict[str, Any]:
    def like(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: spec.abstract(x.shape, x.dtype), tree)

    def by_leaf(make: Callable[[ParamLayout], jax.ShapeDtypeStruct], wanted: bool = True) -> PyTree:
        return to_tree(spec.by_path(make)) if wanted else {}

    zero, frozen, scalar = spec.zero, spec.strategy.frozen, jax.ShapeDtypeStruct((), jnp.int32)
    params = by_leaf(lambda leaf: spec.abstract_master(leaf.stored_shape, spec.param_spec(leaf)))
    nodes = (spec.world.nodes,) if spec.local_updates else ()
    opt_state = _abstract_opt_state(
        spec, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params), nodes
    )
    places = by_moment(
        spec.leaves,
        opt_state,
        lambda leaf, _: spec.held(by_node(leaf) if nodes else spec.param_spec(leaf), "moments"),
        lambda _: spec.sharding(PartitionSpec(NODE) if nodes else PartitionSpec()),
        lambda leaf: (*nodes, *leaf.stored_shape),
    )
    return {
        "step": like(scalar),
        "skipped_in_row": like(scalar),
        "seed": spec.abstract((), jnp.uint32),
        "params": params,
        "opt_state": jax.tree.map(
            lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), opt_state, places
        ),
        "encoded": abstract_encoded(spec),
        "model_state": like(spec.adapter.abstract_model_state),
        "replicas": abstract_replicas(spec) if zero.weights_delta else {},
        "residual": by_leaf(spec.abstract_residual, zero.error_feedback and spec.tx is not None),
        "losses": abstract_losses(spec),
        "frozen": to_tree({leaf.path: spec.stored(leaf, frozen, "frozen") for leaf in spec.frozen}),
        "base": {"fingerprint": spec.abstract((), jnp.uint32)} if spec.frozen else {},
        "local": abstract_local(spec) if spec.local_updates else None,
    }


def _abstract_opt_state(spec: TrainSpec, params: PyTree, nodes: tuple[int, ...]) -> PyTree:
    """The shapes of ``spec.first_opt_state``; JAX traces ``init`` once for all specs that agree in shapes."""
    if spec.tx is None:
        return spec.first_opt_state(params)
    of_all = jax.eval_shape(spec.tx.init, params)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*nodes, *x.shape), x.dtype), of_all)


def abstract_losses(spec: TrainSpec) -> PyTree:
    """The field ``losses`` of a state: with local updates, a row for each node; empty without a SpikeRule."""
    if spec.spikes is None:
        return {}
    nodes = (spec.world.nodes,) if spec.local_updates else ()
    where = PartitionSpec(NODE) if nodes else PartitionSpec()
    one = jax.eval_shape(spec.spikes.start)
    return jax.tree.map(lambda x: spec.abstract((*nodes, *x.shape), x.dtype, where), one)


def abstract_local(spec: TrainSpec) -> LocalState:
    """The arrays of local updates as ShapeDtypeStructs with shardings."""

    def tree(where: Callable[[ParamLayout], PartitionSpec], *nodes: int) -> PyTree:
        return to_tree(
            spec.by_path(lambda leaf: spec.abstract_master((*nodes, *leaf.stored_shape), where(leaf)))
        )

    nodes = spec.world.nodes
    arrays: dict[str, PyTree] = {
        "weights": tree(by_node, nodes),
        "known": tree(lambda leaf: leaf.spec((LOCAL,))),
        "momentum": tree(spec.param_spec) if spec.zero.outer_momentum else {},
        "skipped_in_row": spec.abstract((nodes,), jnp.int32, PartitionSpec(NODE)),
        "report": spec.abstract((nodes, REPORT_COLUMNS), jnp.float32, PartitionSpec(NODE)),
    }
    return LocalState(**arrays)


def by_node(leaf: ParamLayout) -> PartitionSpec:
    """The sharding of ``[nodes, *stored_shape]``: a row for each node, spread over its devices."""
    return PartitionSpec(NODE, *leaf.spec((LOCAL,)))


def first_local(spec: TrainSpec, params: PyTree) -> LocalState:
    """The arrays of local updates before the first step: all nodes begin with ``params``. For ``jit``."""
    nodes, wanted = spec.world.nodes, abstract_local(spec)

    def placed(x: Array, like: jax.ShapeDtypeStruct) -> Array:
        assert isinstance(like.sharding, NamedSharding)
        whole = jnp.broadcast_to(to_device(x), like.shape)
        return lax.with_sharding_constraint(whole, spec.sharding(like.sharding.spec))

    return LocalState(
        weights=jax.tree.map(placed, params, wanted.weights),
        known=jax.tree.map(placed, params, wanted.known),
        momentum=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), wanted.momentum),
        skipped_in_row=jnp.zeros(nodes, jnp.int32),
        report=jnp.zeros(wanted.report.shape, jnp.float32),
    )


def abstract_encoded(spec: TrainSpec) -> dict[Path, Weight]:
    """The trained weights as their owners send them next; empty if passes read master weights.

    With local updates they are each node's own, along the first axis.
    """
    if not spec.in_host("masters"):
        return {}
    if not spec.local_updates:
        return spec.by_path(lambda leaf: spec.stored(leaf, "primary", "encoded"))

    def of_each(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(x.sharding, NamedSharding)
        where = x.sharding.update(spec=PartitionSpec(NODE, *x.sharding.spec))
        return jax.ShapeDtypeStruct((spec.world.nodes, *x.shape), x.dtype, sharding=where)

    return jax.tree.map(of_each, abstract_encoded(spec.training))


def abstract_replicas(spec: TrainSpec, *, frozen: bool = False) -> dict[Path, Weight]:
    """Replicas in every node, of the trained weights that nodes lack and, with ``frozen``, of frozen ones."""
    spread = spec.frozen if frozen and spec.strategy.frozen == "primary" else ()
    lacking = (leaf for leaf in (*spec.leaves, *spread) if not leaf.in_every_node)
    return {leaf.path: spec.stored(leaf, "secondary") for leaf in lacking}


def field_specs(spec: TrainSpec) -> dict[str, Any]:
    """The PartitionSpecs of the fields of a state; computed once for each spec."""
    return dict(spec.once("field specs", lambda: specs_of(abstract_fields(spec))))


def shard_specs(spec: TrainSpec, shards: Shards) -> Shards:
    """The PartitionSpecs of the arrays in ``shards``."""
    places = field_specs(spec)
    replicas = {
        path: places["replicas"].get(path) or specs_of(spec.stored(copy.layout, "secondary"))
        for path, copy in shards.replicas.items()
    }
    return Shards.of(places | {"replicas": replicas, "current_replicas": shards.current_replicas})


def on_devices[*Others, T](
    spec: TrainSpec,
    run: Callable[[Shards, *Others], T],
    shards: Shards,
    *others: *Others,
    in_specs: Sequence[PyTree[PartitionSpec]] = (),
    out_specs: PyTree[PartitionSpec],
) -> T:
    """Run a function on each device's part of a state, and of the ``others``, which have the ``in_specs``."""
    own = shard_specs(spec, shards)
    return on_mesh(run, spec.mesh, in_specs=(own, *in_specs), out_specs=out_specs)(shards, *others)


def specs_of(tree: PyTree) -> PyTree:
    """The PartitionSpec of each leaf of a tree of ShapeDtypeStructs."""
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def shardings_of(tree: PyTree) -> PyTree:
    """The sharding of each leaf of a tree of arrays or of ShapeDtypeStructs."""
    return jax.tree.map(lambda x: x.sharding, tree)


@jax.jit
def copied(x: Array) -> Array:
    """A copy of ``x``, which stays valid when ``x`` is donated."""
    return jnp.copy(x)
