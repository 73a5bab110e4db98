"""The train state: its fields and its creation."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Int32, PyTree, UInt32

from zerojax.adapters import LossFn, Model, ModelState
from zerojax.errors import ConfigurationError
from zerojax.formatting import size
from zerojax.matmul.lora import LoRA
from zerojax.optim.shard_check import Optimizer
from zerojax.sharding.mesh import refuse_another
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.train.batch import unmarked
from zerojax.train.build import build
from zerojax.train.fields import (
    LocalState,
    Shards,
    abstract_fields,
    abstract_local,
    copied,
    first_local,
    shardings_of,
)
from zerojax.train.host_update import first_encoded
from zerojax.train.initial import base_initializer, first_values, in_portions, initializer
from zerojax.train.memory import check_host_memory, device_bytes
from zerojax.train.pass_weights import ByPath, replicas_of
from zerojax.train.spec import TrainSpec
from zerojax.train.spikes import Losses, SpikeRule
from zerojax.validation.bounds import checked_seed
from zerojax.validation.spelling import suggests
from zerojax.weights import Weight
from zerojax.zero_config import ZeroConfig

_LARGE = ("params", "opt_state", "encoded", "model_state", "replicas", "residual", "frozen", "local")
"""The fields whose size a summary shows."""
_SETTABLE = ("step", "skipped_in_row", "seed", "params", "opt_state", "model_state", "residual", "losses")
"""The fields in which a program may set values by hand."""
_DERIVED = ("encoded", "replicas", "local")
"""The fields that ``with_params`` computes from the master weights."""

_GONE = (
    "the state was passed to train_step before, which takes its arrays for the next one (donation): "
    "use the state that train_step returned."
)


@functools.partial(jax.tree_util.register_dataclass, drop_fields=("_masters",))
@dataclass(frozen=True, repr=False)
class TrainState:
    """The global arrays that a step changes, and the ``TrainSpec`` that stays the same.

    Attributes:
        step: steps taken, skipped ones included.
        skipped_in_row: consecutive skipped steps up to the last one.
        seed: determines, with ``step``, all random bits of a run.
        params: fp32 master weights, nested by path, each as ``ParamLayout.stored_shape``.
        opt_state: the optimizer's state; empty without one.
        encoded: by path, the trained weights as their owners send them next, if the master weights are in
            host memory (``ZeroConfig.host``); else empty.
        model_state: non-parameter state by name, replicated.
        replicas: by path, the node's replica: secondary partitions of trained weights. With ``weights_delta``
            it is always there. Otherwise only ``with_replica`` makes it, together with frozen weights that
            are not in every node.
        residual: with ``error_feedback``, the node hop's encoding error, nested by path; else empty.
        losses: with a ``SpikeRule``, recent losses as ``SpikeRule.start`` returns them; else empty.
        frozen: the weights that are not trained, nested by path, encoded in ``ZeroConfig.frozen_weights``. No
            step changes them, and states can share them.
        base: with frozen weights, their "fingerprint" (``encode_frozen``); else empty.
        spec: the model, optimizer, loss, mesh and config.
        local: with ``ZeroConfig.every``, the nodes' own weights and what belongs to them. ``params`` are then
            the outer weights, and ``opt_state`` and ``losses`` have an entry for each node along their first
            axis. Else None.
        current_replicas: whether ``replicas`` have the values of ``params`` already. If not, they are
            delta's, and the next pass refreshes them.
    """

    step: Int32[Array, ""]
    skipped_in_row: Int32[Array, ""]
    seed: UInt32[Array, ""]
    params: PyTree
    opt_state: PyTree
    encoded: dict[Path, Weight]
    model_state: ModelState
    replicas: dict[Path, Weight]
    residual: PyTree
    losses: Losses
    frozen: PyTree
    base: dict[str, UInt32[Array, ""]]
    local: LocalState | None
    spec: TrainSpec = field(metadata={"static": True})
    current_replicas: bool = field(default=False, metadata={"static": True})
    _masters: tuple[Any, ...] | None = field(default=None, compare=False)
    """The leaves of the ``params`` that the fields in ``_DERIVED`` were computed from."""

    def __post_init__(self) -> None:
        """Remember which weights this state was made with."""
        if self._masters is None:
            object.__setattr__(self, "_masters", tuple(jax.tree.leaves(vars(self)["params"])))

    def replace(self, **changes: Any) -> Self:
        """A copy of the state with ``changes``, as ``dataclasses.replace`` makes it; computes nothing.

        With delta, local updates or master weights in host memory, other fields are computed from ``params``:
        use ``with_params`` there. The replica of ``with_replica`` is dropped if its weights are replaced.
        """
        if (
            self.current_replicas
            and not self.spec.zero.weights_delta
            and changes.keys() & {"params", "frozen"}
        ):
            changes = {"replicas": {}, "current_replicas": False} | changes
        if "params" in changes and all(name in changes or not getattr(self, name) for name in _DERIVED):
            changes["_masters"] = None
        return dataclasses.replace(self, **changes)

    def with_params(self, params: PyTree) -> Self:
        """The state with other master weights, and with everything that is computed from them.

        These are delta's replica in every node; with local updates the nodes' own weights, which all begin
        with ``params``; and the encoded weights if the master weights are in host memory. The optimizer's
        state, counters and all other fields stay.

        Args:
            params: as the field ``params``, in place. ``zerojax.put_params`` takes whole arrays instead.
        """
        changes = {"replicas": {}, "current_replicas": False} | derived(self.spec, params)
        return self.replace(params=params, **changes)

    @property
    def computes_with_other_params(self) -> bool:
        """Whether ``params`` are other arrays than the ones that derived fields were computed from."""
        if not any(getattr(self, name) for name in _DERIVED):
            return False
        pairs = zip(jax.tree.leaves(self.params), self._masters or (), strict=False)
        return any(x is not one for x, one in pairs if isinstance(x, jax.Array))

    @property
    def shards(self) -> Shards:
        """The fields that a pass of ``TrainSpec.reading`` reads.

        With local updates the weights are the outer ones, as every node knows them.
        """
        shards = Shards.of(vars(self))
        if self.local is None:
            return shards
        return dataclasses.replace(shards, params=self.local.known, encoded={}, residual={})

    def __repr__(self) -> str:
        """A summary of a few lines."""
        spec, zero, at = self.spec, self.spec.zero, "donated"
        if isinstance(self.step, jax.ShapeDtypeStruct | Tracer):
            at = "abstract"
        elif not _is_gone(self):
            at = f"step {int(self.step)}, seed {int(self.seed)}"
        trained, frozen = (sum(leaf.count for leaf in leaves) for leaves in (spec.leaves, spec.frozen))
        held = {name: device_bytes(vars(self)[name]) for name in _LARGE}
        return "\n  ".join(
            [
                f"<TrainState: {at}",
                f"parameters trained: {trained:,}, frozen: {frozen:,}; units: {len(spec.unit_groups)}",
                f"mesh: {spec.world.nodes} x {spec.world.local}; {zero}",
                f"on each device: {', '.join(f'{name} {size(n)}' for name, n in held.items() if n)}>",
            ]
        )

    @classmethod
    @suggests
    def create(
        cls,
        model: Model,
        tx: Optimizer | None,
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
            tx: an optax transform that works on shards, or one made by ``zerojax.chain``. None makes a state
                for inference alone, whose weights may all be frozen: evaluations, predictions and generation
                accept it, and ``train_step`` refuses it.
            loss_fn: ``(model, batch[, rngs]) -> scalar`` or ``-> (scalar, aux dict of scalars)``. If aux
                has ``"tokens"``, the loss is the mean over that many tokens.
            mesh: from ``zerojax.make_mesh``.
            zero: by default exact ZeRO-3.
            seed: of the initial parameters and of all random bits later.
            sample_batch: for a Linen module, arrays of a batch's shapes and dtypes.
            spikes: when a loss is a spike, so that its step is skipped; by default no loss is.
            lora: give frozen weights low-rank adapters, which are trained.
            base: a state of the same model with the same frozen weights, which the new one shares: several
                adapters on one base. By default they are created from the seed.

        Raises:
            ConfigurationError: something does not fit; before any device is touched.

        Examples:
            >>> def loss_fn(model, batch):
            ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
            >>> model = lambda rngs: zerojax.Stack(Block, 3, rngs=rngs)
            >>> mesh, zero = zerojax.make_mesh(2, 4), zerojax.ZeroConfig(compute_dtype="float32")
            >>> state = zerojax.TrainState.create(model, optax.sgd(0.1), loss_fn, mesh=mesh, zero=zero)
        """
        state = cls.abstract(
            model, tx, loss_fn, mesh=mesh, zero=zero, sample_batch=sample_batch, spikes=spikes, lora=lora
        )
        check_host_memory(state.spec)
        if base is None:
            state = initial_base(state, seed)
        else:
            shared = shared_frozen(state, base)
            state = state.replace(frozen=shared, base=jax.tree.map(copied, base.base))
        return first_state(state, seed)

    @classmethod
    @suggests
    def abstract(
        cls,
        model: Model,
        tx: Optimizer | None,
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
        sample = unmarked(sample_batch)
        spec = build(model, tx, loss_fn, mesh=mesh, zero=zero, sample_batch=sample, spikes=spikes, lora=lora)
        return cls(**abstract_fields(spec), spec=spec)


def first_state(state: TrainState, seed: int) -> TrainState:
    """An abstract state with the values that a seed gives it at step 0; its frozen weights stay.

    Raises:
        ConfigurationError: the seed is out of bounds.
    """
    init = state.spec.once("initializer", lambda: initializer(state.spec))
    return _with_first_values(state, init(checked_seed(seed)))


def _with_first_values(state: TrainState, fields: Mapping[str, Any]) -> TrainState:
    """An abstract state with ``fields``, as ``initializer`` makes them, and the fields computed from them."""
    return state.replace(**fields, **encoded_fields(state.spec, fields))


def derived(spec: TrainSpec, params: PyTree) -> dict[str, Any]:
    """The fields of a state that are computed from master weights, by functions that are compiled once."""
    fields: dict[str, Any] = {}
    if spec.zero.weights_delta:
        fields["replicas"] = replicas_at(spec, params)
    if spec.local_updates:
        fields["local"] = nodes_at(spec, params)
    return fields | encoded_fields(spec, {"params": params} | fields)


def encoded_fields(spec: TrainSpec, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The field ``encoded``, from a state's other fields; none if passes read master weights."""
    if not spec.in_host("masters"):
        return {}
    local, replicas = fields.get("local"), fields.get("replicas", {})
    params = fields["params"] if local is None else local.weights
    return {"encoded": first_encoded(spec, params, replicas if spec.zero.weights_delta else {})}


def replicas_at(spec: TrainSpec, params: PyTree) -> ByPath:
    """Delta's replicas of master weights."""
    return spec.once("replicas", lambda: jax.jit(functools.partial(replicas_of, spec)))(params)


def nodes_at(spec: TrainSpec, params: PyTree) -> LocalState:
    """The arrays of local updates when all nodes begin with ``params``."""

    def make() -> Callable[[PyTree], LocalState]:
        return in_portions(functools.partial(first_local, spec), shardings_of(abstract_local(spec)))

    return spec.once("local", make)(params)


class _Donated:
    """A field whose arrays a step takes over. Reading it from a donated state is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, state: TrainState | None, _: type | None = None) -> PyTree:
        if state is None:
            raise AttributeError(self._name)
        leaf = vars(state)["params"]
        while isinstance(leaf, dict):
            leaf = next(iter(leaf.values()), None)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ConfigurationError(_GONE)
        return vars(state)[self._name]

    def __set__(self, state: TrainState, value: PyTree) -> None:
        vars(state)[self._name] = value


for _name in ("params", "opt_state"):
    setattr(TrainState, _name, _Donated(_name))


def check_there(state: TrainState) -> None:
    """Refuse a state without values, which no compiled function accepts.

    Raises:
        ConfigurationError: its arrays were donated to a step, or never created; ``params`` are other weights
            than its derived fields; or the current mesh of ``jax.set_mesh`` is another.
    """
    refuse_another(state.spec.mesh)
    if isinstance(state.step, jax.ShapeDtypeStruct):
        raise ConfigurationError(
            "the state is abstract: make it by TrainState.create, or restore a checkpoint into it."
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state.frozen)[:1]):
        raise ConfigurationError(
            "the state has no frozen weights yet: load them by checkpoints.restore_base, and then the "
            "checkpoint of the trained weights."
        )
    if _is_gone(state):
        raise ConfigurationError(_GONE)
    _refuse_other_params(state)


def _refuse_other_params(state: TrainState) -> None:
    """Refuse master weights that were set without the fields that are computed from them.

    Raises:
        ConfigurationError: naming the ways that compute them.
    """
    if state.computes_with_other_params:
        raise ConfigurationError(
            "state.params has other weights than this state computes with: other fields are computed from "
            "them (a node's replica, local updates, or weights in host memory). Set weights by state = "
            "state.with_params(tree), or zerojax.put_params(state, arrays)."
        )


def settled(state: TrainState) -> TrainState:
    """The state, with values that a program set by hand made arrays like the ones that they replace.

    Such a value may be a Python number, a NumPy array or an array on one device: a learning rate
    (``optax.inject_hyperparams``), a counter or batch statistics. With local updates all nodes use a value
    for the optimizer.

    Raises:
        ConfigurationError: a value is no number, or does not fit the array that it replaces.
    """
    spec, given = state.spec, {name: getattr(state, name) for name in _SETTABLE}
    wanted, known = spec.once(
        "settable", lambda: jax.tree.flatten({name: abstract_fields(spec)[name] for name in _SETTABLE})
    )
    leaves, tree = jax.tree.flatten(given)
    if tree != known or all(map(_is_placed, leaves, wanted)):
        return state
    placed = jax.tree_util.tree_map_with_path(_placed, given, jax.tree.unflatten(known, wanted))

    def has_changed(name: str) -> bool:
        return any(map(operator.is_not, jax.tree.leaves(given[name]), jax.tree.leaves(placed[name])))

    # A field that stays as it is keeps its identity: by that a state knows the weights it was made with.
    return state.replace(**{name: placed[name] for name in _SETTABLE if has_changed(name)})


def _is_placed(x: Any, like: jax.ShapeDtypeStruct) -> bool:
    if isinstance(x, Tracer | jax.ShapeDtypeStruct):  # without a value
        return True
    if isinstance(x, jax.Array) and x.committed and x.ndim == len(like.shape):
        return True
    return jnp.issubdtype(like.dtype, jax.dtypes.extended)  # a random key


def _placed(path: Any, x: Any, like: jax.ShapeDtypeStruct) -> Array:
    """A value that was set by hand, as an array with the shape, dtype and sharding of ``like``."""
    if _is_placed(x, like):
        return x
    try:
        if isinstance(x, jax.Array) and x.committed:
            return jax.device_put(jnp.broadcast_to(x, like.shape), like.sharding)
        value = np.asarray(x)
        if jnp.issubdtype(value.dtype, jnp.inexact) and not jnp.issubdtype(like.dtype, jnp.inexact):
            raise TypeError("a fraction in place of a whole number")
        value = np.broadcast_to(value.astype(like.dtype), like.shape)
    except (TypeError, ValueError) as error:
        found = f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array | np.ndarray) and x.ndim else repr(x)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        raise ConfigurationError(
            f"state.{name} was set to {found:.80}, which does not fit its {like.dtype}{list(like.shape)}: "
            "set a number, or an array of that kind."
        ) from error
    assert like.sharding is not None
    return jax.make_array_from_callback(like.shape, like.sharding, value.__getitem__)


def _is_gone(state: TrainState) -> bool:
    """Whether a state was donated.

    On CPUs an array that was read before, as by ``int(state.step)``, stays on the first device, and JAX asks
    only that one.
    """
    if not isinstance(state.step, jax.Array) or isinstance(state.step, Tracer):
        return False
    arrays = [x for x in (state.step, *jax.tree.leaves(vars(state)["params"])) if isinstance(x, jax.Array)]
    return any(x.is_deleted() for x in arrays) or state.step.addressable_shards[-1].data.is_deleted()


def begin_with(state: TrainState, params: PyTree, seed: int) -> TrainState:
    """A state at step 0 with given master weights, and otherwise as ``TrainState.create`` makes it.

    The state is abstract. ``params`` are in place, like ``TrainState.params``; they are not copied.
    """

    adapter = state.spec.adapter

    def init(seed: Array, stored: PyTree) -> dict[str, Any]:
        # The initial weights are never read: XLA does not compute them. Without state no model is made.
        model_state = adapter.init(jax.random.key(seed))[1] if adapter.abstract_model_state else {}
        return first_values(state.spec, seed, stored, model_state)

    places = shardings_of(abstract_fields(state.spec))
    del places["params"], places["encoded"], places["frozen"], places["base"]
    return _with_first_values(
        state, {"params": params} | in_portions(init, places)(checked_seed(seed), params)
    )


def initial_base(state: TrainState, seed: int) -> TrainState:
    """The state with the frozen weights that a seed draws."""
    return state.replace(**base_initializer(state.spec)(checked_seed(seed))) if state.frozen else state


def shared_frozen(state: TrainState, base: TrainState) -> PyTree:
    """The frozen weights of another state of the same model, for ``state``.

    Raises:
        ConfigurationError: they are other weights, or in another format, or on another mesh.
    """
    ours, theirs = ({leaf.path: leaf for leaf in one.spec.frozen} for one in (state, base))
    same = state.spec.strategy.frozen == base.spec.strategy.frozen
    if other := [path for path, leaf in ours.items() if not same or theirs.get(path) != leaf]:
        raise ConfigurationError(
            f"base= does not freeze {'/'.join(other[0])!r} in the same way: give both states the same model, "
            "mesh, ZeroConfig.frozen, frozen_weights and frozen_spread."
        )
    every = from_tree(base.frozen)
    return to_tree({path: every[path] for path in ours})
