"""The train state: its fields and specs, its creation, and the whole model gathered from it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int32, PyTree, UInt32

from zerojax.adapters import LossFn, Model, ModelState
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import LoRA, merged
from zerojax.optim.shard_check import Optimizer, optimizer_specs
from zerojax.sharding.layout import ParamLayout, from_stored, to_stored
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.train.frozen import decode_frozen, encode_frozen
from zerojax.train.per_device import Blocks, first_secondary, flat_blocks, stored_secondary, with_scales
from zerojax.train.spec import TrainSpec, build
from zerojax.train.spikes import Losses, SpikeRule
from zerojax.zero_config import ZeroConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The global arrays that a step changes, and the ``TrainSpec`` that stays the same.

    Attributes:
        step: steps taken, skipped ones included.
        skipped_in_row: steps skipped since the last that was not.
        seed: determines, with ``step``, all random bits of a run.
        params: fp32 master weights, nested by path, each as ``ParamLayout.stored_shape``.
        opt_state: the optimizer's state.
        model_state: non-parameter state by name, replicated.
        secondary: with ``weights_delta``, the node-local copies, nested by path, those that fp8 products read
            as ``Scaled`` codes; else empty.
        residual: with ``error_feedback``, the node hop's encoding error, nested by path; else empty.
        losses: with a ``SpikeRule``, recent losses as ``SpikeRule.start`` returns them; else empty.
        frozen: the weights that are not trained, nested by path, encoded in ``ZeroConfig.frozen_weights``;
            those that fp8 products read as ``Scaled`` codes. No step changes them, and states can share them.
        base: with frozen weights, their "fingerprint" (``encode_frozen``); else empty.
        spec: the model, optimizer, loss, mesh and config.
    """

    step: Int32[Array, ""]
    skipped_in_row: Int32[Array, ""]
    seed: UInt32[Array, ""]
    params: PyTree
    opt_state: PyTree
    model_state: ModelState
    secondary: PyTree
    residual: PyTree
    losses: Losses
    frozen: PyTree
    base: dict[str, UInt32[Array, ""]]
    spec: TrainSpec = field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        model: Model,
        tx: Optimizer,
        loss_fn: LossFn,
        *,
        mesh: Mesh,
        zero: ZeroConfig | None = None,
        seed: int = 0,
        sample_batch: Any = None,
        spikes: SpikeRule | None = None,
        lora: LoRA | None = None,
        base: "TrainState | None" = None,
    ) -> "TrainState":
        """Create a model and its optimizer state, sharded from the start: no device ever holds all of it.

        Args:
            model: a callable ``rngs -> nnx.Module``, or a Linen module.
            tx: an optax transform that works on shards, or one made by ``zerojax.chain``.
            loss_fn: ``(model, batch[, rngs]) -> scalar`` or ``-> (scalar, aux dict of scalars)``. If aux
                has ``"tokens"``, the loss is the mean over that many tokens.
            mesh: from ``zerojax.make_mesh``.
            zero: by default exact ZeRO-3.
            seed: of the initial parameters and of all random bits later.
            sample_batch: for a Linen module, arrays of a batch's shapes and dtypes.
            spikes: also skip steps whose loss is a spike; by default none is skipped for that.
            lora: give frozen weights low-rank adapters, which are trained.
            base: a state of the same model with the same frozen weights, which the new one shares: several
                adapters on one base. By default they are created from the seed.

        Raises:
            ConfigurationError: something does not fit; before any device is touched.
        """
        state = cls.abstract(
            model, tx, loss_fn, mesh=mesh, zero=zero, sample_batch=sample_batch, spikes=spikes, lora=lora
        )
        if base is None:
            return state.replace(**initializer(state)(np.uint32(seed)))
        shared = {"frozen": shared_frozen(state, base), "base": jax.tree.map(copied, base.base)}
        return state.replace(**initializer(state, frozen=False)(np.uint32(seed)), **shared)

    @classmethod
    def abstract(
        cls,
        model: Model,
        tx: Optimizer,
        loss_fn: LossFn,
        *,
        mesh: Mesh,
        zero: ZeroConfig | None = None,
        sample_batch: Any = None,
        spikes: SpikeRule | None = None,
        lora: LoRA | None = None,
    ) -> "TrainState":
        """The state's shapes, dtypes and shardings without values, for ahead-of-time compiles.

        The mesh's devices may be descriptions (``zerojax.aot``). Arguments and errors as ``create``.
        """
        zero = zero or ZeroConfig()
        spec = build(
            model, tx, loss_fn, mesh=mesh, zero=zero, sample_batch=sample_batch, spikes=spikes, lora=lora
        )
        return cls(**abstract_fields(spec), spec=spec)

    def replace(self, **changes: Any) -> Self:
        """A copy of the state with ``changes``."""
        return dataclasses.replace(self, **changes)


def abstract_fields(spec: TrainSpec) -> dict[str, Any]:
    """Every field of a state but ``spec``, as ShapeDtypeStructs with shardings."""

    def like(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: spec.abstract(x.shape, x.dtype), tree)

    def by_leaf(make: Callable[[ParamLayout], jax.ShapeDtypeStruct], wanted: bool = True) -> PyTree:
        return to_tree(spec.by_path(make)) if wanted else {}

    zero, scalar = spec.zero, jax.ShapeDtypeStruct((), jnp.int32)
    params = by_leaf(lambda leaf: spec.abstract(leaf.stored_shape, jnp.float32, spec.param_spec(leaf)))
    opt_state = jax.tree.map(
        lambda x, place: spec.abstract(x.shape, x.dtype, place),
        jax.eval_shape(spec.tx.init, params),
        optimizer_specs(spec.tx, spec.leaves, spec.by_path(spec.param_spec)),
    )
    return {
        "step": like(scalar),
        "skipped_in_row": like(scalar),
        "seed": spec.abstract((), jnp.uint32),
        "params": params,
        "opt_state": opt_state,
        "model_state": like(spec.adapter.abstract_model_state),
        "secondary": by_leaf(spec.abstract_secondary, zero.weights_delta),
        "residual": by_leaf(spec.abstract_residual, zero.error_feedback),
        "losses": like(jax.eval_shape(spec.spikes.start)) if spec.spikes else {},
        "frozen": to_tree({leaf.path: spec.abstract_frozen(leaf) for leaf in spec.frozen}),
        "base": {"fingerprint": spec.abstract((), jnp.uint32)} if spec.frozen else {},
    }


def state_specs(spec: TrainSpec) -> dict[str, PyTree]:
    """The PartitionSpec of every array of a state, by field."""
    return jax.tree.map(lambda x: x.sharding.spec, abstract_fields(spec))


def shardings_of(tree: PyTree) -> PyTree:
    """The sharding of each leaf of a tree of arrays or of ShapeDtypeStructs."""
    return jax.tree.map(lambda x: x.sharding, tree)


def secondary_of(spec: TrainSpec, params: PyTree) -> PyTree:
    """Delta's secondary copies, computed from the master weights: for a new state or a new mesh."""
    shard_map = functools.partial(jax.shard_map, mesh=spec.mesh, check_vma=False)

    def copies(blocks: Blocks) -> dict[Path, Any]:
        scaled, _ = with_scales(spec, flat_blocks(blocks, spec.leaves), {})
        return stored_secondary(scaled, first_secondary(spec, scaled))

    make = shard_map(
        copies,
        in_specs=(spec.by_path(spec.param_spec),),
        out_specs=spec.by_path(spec.secondary_spec),
    )
    return to_tree(make(from_tree(params)))


def shared_frozen(state: TrainState, base: TrainState) -> PyTree:
    """The frozen weights of another state of the same model, for ``state``.

    Raises:
        ConfigurationError: they are others, or in another format, or on another mesh.
    """
    ours, theirs = ({leaf.path: leaf for leaf in one.spec.frozen} for one in (state, base))
    if other := [path for path, leaf in ours.items() if theirs.get(path) != leaf]:
        raise ConfigurationError(
            f"base= does not freeze {'/'.join(other[0])!r} in the same way: give both states the same model, "
            "mesh, ZeroConfig.frozen and frozen_weights."
        )
    every = from_tree(base.frozen)
    return to_tree({path: every[path] for path in ours})


def gather_params(state: TrainState) -> dict[str, Any]:
    """The whole model on every host, in the model's own shapes and dtypes, nested by path.

    Leaves are gathered one at a time, so a device holds at most one whole leaf. All processes must call it.
    Frozen weights are decoded, and their adapters merged into them (``W + scale A B``).

    Returns:
        A nested dict of numpy arrays, which share no memory with the state.

    Raises:
        ConfigurationError: the state was donated, or is abstract.
    """
    check_there(state)
    spec = state.spec
    params, stored = from_tree(state.params), from_tree(state.frozen)
    whole = {leaf.path: _gathered(spec, leaf, params[leaf.path]) for leaf in spec.leaves}
    for leaf in spec.frozen:
        weight = _gathered(spec, leaf, stored[leaf.path])
        if adapter := spec.adapter_of(leaf):
            assert spec.lora is not None
            a, b = (whole.pop(part.path) for part in adapter)
            weight = merged(weight, a, b, spec.lora)
        whole[leaf.path] = weight
    return to_tree(whole)


def gather_adapters(state: TrainState) -> dict[str, Any]:
    """The adapters on every host, fp32, nested by the path of their weight: "lora_a" and "lora_b".

    All processes must call it.

    Raises:
        ConfigurationError: the state has none, was donated, or is abstract.
    """
    check_there(state)
    spec, params = state.spec, from_tree(state.params)
    parts = [part for leaf in spec.frozen for part in spec.adapter_of(leaf)]
    if not parts:
        raise ConfigurationError("the state has no adapters: create it with lora=.")
    return to_tree({part.path: _gathered(spec, part, params[part.path]) for part in parts})


def _gathered(spec: TrainSpec, leaf: ParamLayout, stored: Any) -> np.ndarray:
    """One whole parameter on this host, in its own dtype."""

    def decode(x: Any) -> Array:
        return (decode_frozen(x, leaf) if leaf.frozen else from_stored(x, leaf)).astype(leaf.dtype)

    everyone = spec.sharding(PartitionSpec())
    gather = spec.once(f"gather {leaf.name}", lambda: jax.jit(decode, out_shardings=everyone))
    return np.asarray(gather(stored))


def put_params(state: TrainState, params: PyTree) -> TrainState:
    """A state whose master weights are ``params``; the optimizer's state is unchanged.

    It shares all other arrays with ``state``, so a step from either donates those of both.

    Args:
        state: any.
        params: on the host, in the model's shapes, nested by path, as ``gather_params`` returns.

    Raises:
        ConfigurationError: a path is missing, unknown, or of the wrong shape.
    """
    spec, given = state.spec, from_tree(params)
    known = {leaf.path: leaf for leaf in spec.leaves}
    if given.keys() != known.keys():
        odd = sorted("/".join(path) for path in given.keys() ^ known.keys())
        raise ConfigurationError(f"put_params: these paths are missing or unknown: {', '.join(odd[:8])}.")
    placed = {}
    for path, leaf in known.items():
        if np.shape(given[path]) != leaf.unsharded_shape:
            raise ConfigurationError(
                f"put_params: {leaf.name!r} has shape {np.shape(given[path])}, not {leaf.unsharded_shape}."
            )
        stored = np.asarray(to_stored(jnp.asarray(given[path], jnp.float32), leaf))
        placed[path] = jax.device_put(stored, spec.sharding(spec.param_spec(leaf)))
    return with_params(state, to_tree(placed))


def with_params(state: TrainState, params: PyTree) -> TrainState:
    """A state whose master weights are ``params``, in stored form and in place; they are not copied."""
    secondary = jax.jit(functools.partial(secondary_of, state.spec))(params) if state.secondary else {}
    return state.replace(params=params, secondary=secondary)


def gather_model(state: TrainState) -> Any:
    """An ordinary, unsharded model with the state's weights, for sampling or for use without zerojax.

    Returns:
        The ``nnx.Module`` in evaluation mode, or for Linen the module's ``apply`` bound to its variables. It
        shares no memory with the state.

    Raises:
        ConfigurationError: as ``gather_params``.
    """
    spec = state.spec
    weights = {path: jnp.asarray(x) for path, x in from_tree(gather_params(state)).items()}
    model_state = {name: copied(x.addressable_data(0)) for name, x in state.model_state.items()}
    return spec.adapter.whole(weights, model_state)


def check_there(state: TrainState) -> None:
    """Refuse a state without values, which no compiled function accepts.

    Raises:
        ConfigurationError: its arrays were donated to a step, or never created.
    """
    if isinstance(state.step, jax.ShapeDtypeStruct):
        raise ConfigurationError(
            "the state is abstract: make it by TrainState.create, or restore a checkpoint into it."
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state.frozen)[:1]):
        raise ConfigurationError(
            "the state has no frozen weights yet: load them by checkpoints.restore_base then the checkpoint "
            "of what was trained."
        )
    if isinstance(state.step, jax.Array) and not isinstance(state.step, Tracer) and state.step.is_deleted():
        raise ConfigurationError(
            "the state was passed to train_step before, which takes its arrays for the next one (donation): "
            "go on with the state that train_step returned."
        )


def averaged(state: TrainState) -> TrainState:
    """A state whose weights are the average, for evaluation or gathering, not for training.

    It shares its arrays with ``state``, and is invalid after a step from that.

    Raises:
        ConfigurationError: the optimizer keeps no average, or has made no update yet.
    """
    check_there(state)
    params = optax.tree_utils.tree_get(state.opt_state, "averaged_params")
    if params is None:
        raise ConfigurationError(
            "there is no average of the weights: end the optimizer's chain with zerojax.average_weights, or "
            "set optimizer.ema_decay."
        )
    if not int(optax.tree_utils.tree_get(state.opt_state, "averaged_count")):
        raise ConfigurationError("the average of the weights is of no update yet: take a step first.")
    return with_params(state, params)


@jax.jit
def copied(x: Array) -> Array:
    """A copy that outlives a donation of ``x``."""
    return jnp.copy(x)


def initializer(state: TrainState, *, frozen: bool = True) -> Any:
    """The compiled function from a seed to a state's first values, each computed where it is stored.

    Args:
        state: abstract.
        frozen: whether the values include the frozen weights.
    """
    spec = state.spec

    def init(seed: Array) -> dict[str, Any]:
        key = jax.random.key(seed)
        weights, model_state = spec.adapter.init(key)
        weights |= adapter_values(spec, key)
        stored = to_tree(
            {leaf.path: to_stored(weights[leaf.path].astype(jnp.float32), leaf) for leaf in spec.leaves}
        )
        stored = jax.lax.with_sharding_constraint(stored, shardings_of(state.params))
        values = {"params": stored, **_first_values(state, seed, stored, model_state)}
        if frozen:
            values |= frozen_values(spec, weights)
        return values

    fields = _field_shardings(state)
    if not frozen:
        del fields["frozen"], fields["base"]
    return jax.jit(init, out_shardings=fields)


def initial_base(state: TrainState, seed: int) -> TrainState:
    """The state with the frozen weights that ``TrainState.create`` makes of a seed."""
    if not state.frozen:
        return state

    def init(seed: Array) -> dict[str, Any]:
        return frozen_values(state.spec, state.spec.adapter.init(jax.random.key(seed))[0])

    fields = {name: shardings_of(getattr(state, name)) for name in ("frozen", "base")}
    return state.replace(**jax.jit(init, out_shardings=fields)(np.uint32(seed)))


def frozen_values(spec: TrainSpec, weights: Mapping[Path, Array]) -> dict[str, Any]:
    """The state's fields "frozen" and "base" for a model's weights of unsharded shape."""
    if not spec.frozen:
        return {"frozen": {}, "base": {}}
    encoded = {leaf.path: encode_frozen(spec, leaf, weights[leaf.path]) for leaf in spec.frozen}
    total = sum((hashed for _, hashed in encoded.values()), jnp.uint32(0))
    return {
        "frozen": to_tree({path: stored for path, (stored, _) in encoded.items()}),
        "base": {"fingerprint": total},
    }


def adapter_values(spec: TrainSpec, key: Array) -> dict[Path, Array]:
    """The first values of all adapters, by path, of unsharded shape."""
    values: dict[Path, Array] = {}
    for leaf in spec.frozen:
        if spec.adapter_of(leaf):
            assert spec.lora is not None
            own = spec.lora.init(jax.random.fold_in(key, leaf.index), leaf.shape, leaf.stack)
            values |= {(*leaf.path, name): value for name, value in own.items()}
    return values


def begin_with(state: TrainState, params: PyTree, seed: int) -> TrainState:
    """A state at step 0 with given master weights, and otherwise as ``TrainState.create`` makes it.

    Args:
        state: abstract.
        params: as ``TrainState.params``, already in place; they are not copied.
        seed: as of ``create``.
    """

    def init(seed: Array, stored: PyTree) -> dict[str, Any]:
        # The initial weights are never read, so XLA does not compute them.
        _, model_state = state.spec.adapter.init(jax.random.key(seed))
        return _first_values(state, seed, stored, model_state)

    fields = _field_shardings(state)
    del fields["params"], fields["frozen"], fields["base"]
    return state.replace(params=params, **jax.jit(init, out_shardings=fields)(np.uint32(seed), params))


def _first_values(state: TrainState, seed: Array, stored: PyTree, model_state: ModelState) -> dict[str, Any]:
    """Every field at step 0 but the parameters."""
    spec = state.spec
    return {
        "step": jnp.int32(0),
        "skipped_in_row": jnp.int32(0),
        "seed": seed.astype(jnp.uint32),
        "opt_state": spec.tx.init(stored),
        "model_state": model_state,
        "secondary": secondary_of(spec, stored) if spec.zero.weights_delta else {},
        "residual": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.residual),
        "losses": spec.spikes.start() if spec.spikes else {},
    }


def _field_shardings(state: TrainState) -> dict[str, PyTree]:
    return {field: shardings_of(getattr(state, field)) for field in abstract_fields(state.spec)}
