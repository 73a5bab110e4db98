"""The canonical form of a train state: unsharded shapes, without mesh, stage, padding or wire format.

Checkpoints hold this form, so one written on 2 x 4 devices by ZeRO++ can be read on 3 x 2 by exact ZeRO-3.
A leaf whose first dimension divides by the number of devices stays cut along it, exactly as its owners hold
it: converting it sends nothing. Other leaves, small ones or of odd sizes, are gathered and cut again one at
a time, so that no device holds more than one whole leaf.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from zerojax.comm.in_order import on_mesh
from zerojax.errors import ConfigurationError
from zerojax.optim.moments import by_moment
from zerojax.sharding.layout import OWNED, ParamLayout, from_stored, to_stored
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.train.copies import copies_of
from zerojax.train.fields import copied, shardings_of
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState
from zerojax.weights.weight import Weight

Tree = dict[str, Any]
_COUNTERS = ("step", "skipped_in_row", "seed")
OPTIMIZER = "optimizer"
"""The kind of the optimizer's arrays, which are named by their places in its state."""
REINITIALISED = ("secondary", "residual", "average", "losses")
"""Kinds that are initialised again if a checkpoint has none that fits."""


def to_canonical(state: TrainState, *, on_host: bool = False) -> Tree:
    """Everything that a step depends on, by name, each array in its unsharded shape.

    Args:
        state: filled.
        on_host: move each array to page-locked host memory before the next one is made, so that the
            devices hold one at a time.

    Returns:
        A nested dict of copies, none of which shares memory with the state, so the state may be donated:
        "counters", "params", "optimizer" (moments in the shapes of their parameters), "other"; "average"
        ("count", and "params" in their shapes) if the optimizer averages weights; and "secondary"
        (unsharded), "residual" (as stored: it belongs to its mesh) and "losses" if the state has them. Of
        frozen weights only "base", their fingerprint: they are where they came from. Arrays without elements
        are left out.
    """
    tree: Tree = {}
    for name, (leaf, x) in _entries(state).items():
        copy = copied(x) if leaf is None else _convert(state.spec, leaf, x, _canonical(state, leaf, x))
        if on_host:
            on_its_host = copy.sharding.with_memory_kind("pinned_host")
            copy = jax.block_until_ready(jax.device_put(copy, on_its_host))
        tree[name] = copy
    return _nested(tree)


def abstract_canonical(state: TrainState) -> Tree:
    """Shapes, dtypes and shardings of what ``to_canonical`` would return."""
    return _nested(
        {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if leaf is None
            else _canonical(state, leaf, x)
            for name, (leaf, x) in _entries(state).items()
        }
    )


def from_canonical(state: TrainState, tree: Tree) -> TrainState:
    """The inverse of ``to_canonical``, on any mesh, stage and wire format.

    Args:
        state: of the spec that will use it; gives structure and shardings.
        tree: as ``to_canonical`` returns it. Where it lacks them, the average of weights and the recent
            losses of the spike rule start empty, delta's copies are made from the parameters, and residuals
            start at zero.

    Raises:
        ConfigurationError: the tree lacks a parameter or an optimizer state of this spec, or was trained on
            other frozen weights.
    """
    _check_base(state, tree)
    entries = _entries(state)
    given: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
    if not all(name in given for name in entries if name.startswith("secondary/")):
        tree = {kind: values for kind, values in tree.items() if kind != "secondary"}  # of other formats
    reinitialised = tuple(f"{kind}/" for kind in REINITIALISED if kind not in tree)
    lacking = sorted(n for n in entries if n not in given and not n.startswith(reinitialised))
    if lacking:
        raise ConfigurationError(
            f"the checkpoint lacks {', '.join(lacking[:4])}: it is of another model or optimizer"
        )
    stored = {
        name: given[name] if leaf is None else _convert(state.spec, leaf, given[name], x)
        for name, (leaf, x) in entries.items()
        if name in given
    }
    if "secondary" in tree:
        return _put(state, stored)
    return _with_fresh_copies(state, _put(state.replace(copies={}), stored))


def with_weights(state: TrainState, tree: Tree) -> TrainState:
    """The state with other weights; optimizer state, counters and residuals stay as they are.

    Args:
        state: filled.
        tree: "params" of trained leaves in canonical form, and "other" if the model has any. What it lacks,
            such as adapters, stays as it is.
    """
    entries = _entries(state)
    given: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
    stored = {name: x for name, (_, x) in entries.items() if not name.startswith("secondary/")}
    for name, value in given.items():
        leaf, x = entries[name]
        stored[name] = value if leaf is None else _convert(state.spec, leaf, value, x)
    return _with_fresh_copies(state, _put(state.replace(copies={}), stored))


def abstract_weight(state: TrainState, leaf: ParamLayout) -> jax.ShapeDtypeStruct:
    """A weight of the model in canonical form, fp32, whether it is trained or frozen."""
    return state.spec.abstract(leaf.unsharded_shape, jnp.float32, _canonical_spec(leaf))


def _check_base(state: TrainState, tree: Tree) -> None:
    """Refuse what was trained beside other frozen weights than the state's."""
    for name, own in state.base.items():
        saved = tree.get("base", {}).get(name)
        if saved is not None and not isinstance(own, jax.ShapeDtypeStruct) and int(saved) != int(own):
            raise ConfigurationError(
                f"the checkpoint was trained on another base: its frozen weights have the fingerprint "
                f"{int(saved):08x}, and those of this state {int(own):08x}. Load the base that it began with."
            )


def _with_fresh_copies(state: TrainState, filled: TrainState) -> TrainState:
    """Add the copies that the spec of ``state`` asks for, computed from the parameters."""
    if not _delta_copies(state):
        return filled
    make = jax.jit(functools.partial(copies_of, state.spec), out_shardings=shardings_of(state.copies))
    return filled.replace(copies=make(filled.params))


def _delta_copies(state: TrainState) -> list[Weight]:
    """Delta's copies, which are saved; those of ``with_node_copy`` are not."""
    return [*state.copies.values()] if state.spec.zero.weights_delta else []


def _entries(state: TrainState) -> dict[str, tuple[ParamLayout | None, Array]]:
    """Each non-empty array of a state by name, with its layout if it has one."""
    entries: dict[str, tuple[ParamLayout | None, Array]] = {}

    def note(name: str, leaf: ParamLayout | None, x: Array) -> Array:
        if x.size if leaf is None else leaf.count:
            entries[name] = leaf, x
        return x

    _changed(state, note)
    return entries


def _put(state: TrainState, stored: dict[str, Array]) -> TrainState:
    """A state of the arrays named as in ``_entries``; missing ones are zeros."""

    def named(name: str, _: ParamLayout | None, x: Array) -> Array:
        if name in stored:
            return stored[name]
        return jax.jit(functools.partial(jnp.zeros, x.shape, x.dtype), out_shardings=x.sharding)()

    return state.replace(**_changed(state, named), current_copies=False)


def _changed(state: TrainState, change: Callable[[str, ParamLayout | None, Array], Array]) -> dict[str, Any]:
    """The fields of a state with ``change(name, layout, x)`` in place of every array that is saved.

    This gives the arrays of a checkpoint their names; the layout is None where there is none.
    """

    def plain(kind: str, values: dict[str, Array]) -> dict[str, Array]:
        return {name: change(f"{kind}/{name}", None, x) for name, x in values.items()}

    def nested(kind: str, tree: Tree, leaves: dict[tuple[str, ...], ParamLayout]) -> Tree:
        given = from_tree(tree).items()
        return to_tree({path: change("/".join((kind, *path)), leaves.get(path), x) for path, x in given})

    def changed_copy(copy: Weight) -> Weight:
        name = "/".join(("secondary", *copy.layout.path))
        if copy.scale is None:
            return copy.replace(change(name, copy.layout, copy.values))
        values = change(f"{name}/values", copy.layout, copy.values)
        return dataclasses.replace(copy, values=values, scale=change(f"{name}/scale", None, copy.scale))

    # 0 in place of None, which is no leaf of a tree.
    layouts = by_moment(state.spec.leaves, state.opt_state, lambda leaf, _: leaf, lambda _: 0)
    return {
        **{name: change(f"counters/{name}", None, getattr(state, name)) for name in _COUNTERS},
        "params": nested("params", state.params, {leaf.path: leaf for leaf in state.spec.leaves}),
        "opt_state": jax.tree_util.tree_map_with_path(
            lambda path, x, layout: change(_optimizer_name(path), layout or None, x), state.opt_state, layouts
        ),
        "model_state": plain("other", state.model_state),
        "copies": {copy.layout.path: changed_copy(copy) for copy in _delta_copies(state)},
        "residual": nested("residual", state.residual, {}),
        "losses": plain("losses", state.losses),
        "base": plain("base", state.base),
    }


def _optimizer_name(path: Any) -> str:
    """Averaged weights are named as a kind of their own, so that they can be read without the moments."""
    for number, key in enumerate(path):
        if (field := getattr(key, "name", None)) in ("averaged_count", "averaged_params"):
            return _name(f"average/{field.removeprefix('averaged_')}", path[number + 1 :])
    return _name(OPTIMIZER, path)


def _name(kind: str, path: Any) -> str:
    return f"{kind}/{jax.tree_util.keystr(path, simple=True, separator='/')}".removesuffix("/")


def _convert(train_spec: TrainSpec, leaf: ParamLayout, x: Array, like: jax.ShapeDtypeStruct | Array) -> Array:
    """Convert one array to its canonical or stored form, whichever ``like`` has.

    One function is compiled per layout and cached by the spec.
    """
    source, target = _spec(x), _spec(like)
    cut = _cut_rows if _is_cut_by_rows(leaf) else _gather_and_cut
    on_device = cut(leaf, source, target, like)

    def make() -> Callable[[Array], Array]:
        return jax.jit(on_mesh(on_device, train_spec.mesh, in_specs=source, out_specs=target))

    layout = f"{leaf.unsharded_shape} {leaf.stack} {leaf.shard}"
    key = f"canonical {layout} {x.shape} {source} {like.shape} {target}"
    # One at a time, to bound the memory, and because XLA:CPU starts and runs programs on the same few
    # threads: a process that starts 32 at once deadlocks when another process lags behind.
    return jax.block_until_ready(train_spec.once(key, make)(x))


def _is_cut_by_rows(leaf: ParamLayout) -> bool:
    """Whether each device owns a range of the first dimension of a layer."""
    return leaf.padded == leaf.size and bool(leaf.shape) and leaf.shape[0] % leaf.world.size == 0


def _cut_rows(
    leaf: ParamLayout, source: PartitionSpec, target: PartitionSpec, like: jax.ShapeDtypeStruct | Array
) -> Callable[[Array], Array]:
    """The conversion on a device for a leaf cut by rows: both forms have their numbers in the same order."""
    axis = len(leaf.stack)
    have, want = _axes(source, axis), _axes(target, axis)
    shape = (*like.shape[:axis], -1, *like.shape[axis + 1 :])

    def on_device(part: Array) -> Array:
        for name in (NODE, LOCAL):  # owners are numbered along nodes first
            if name in have and name not in want:
                part = lax.all_gather(part, name, axis=axis, tiled=True)
        part = part.reshape(shape)
        for name in (LOCAL, NODE):
            if name in want and name not in have:
                part = _own_part(part, name, axis)
        return part

    return on_device


def _gather_and_cut(
    leaf: ParamLayout, source: PartitionSpec, target: PartitionSpec, like: jax.ShapeDtypeStruct | Array
) -> Callable[[Array], Array]:
    """The conversion on a device for any other leaf: gather it and cut out the device's part.

    XLA's partitioner would gather for this reshape as well, but with a warning.
    """
    to_form = from_stored if like.shape == leaf.unsharded_shape else to_stored

    def on_device(part: Array) -> Array:
        for axis in range(part.ndim):
            if names := _axes(source, axis):
                part = lax.all_gather(part, names, axis=axis, tiled=True)
        whole = to_form(part, leaf).reshape(like.shape)
        for axis in range(whole.ndim):
            if names := _axes(target, axis):
                whole = _own_part(whole, names, axis)
        return whole

    return on_device


def _own_part(x: Array, names: str | tuple[str, ...], axis: int) -> Array:
    size = x.shape[axis] // lax.axis_size(names)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, axis)


def _axes(spec: PartitionSpec, axis: int) -> tuple[str, ...]:
    """The mesh axes that shard a dimension."""
    names = spec[axis] if axis < len(spec) else None
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _spec(x: Array | jax.ShapeDtypeStruct) -> PartitionSpec:
    assert isinstance(x.sharding, NamedSharding)  # as everything in a state is placed
    return x.sharding.spec


def _canonical(state: TrainState, leaf: ParamLayout, x: Array) -> jax.ShapeDtypeStruct:
    return state.spec.abstract(leaf.unsharded_shape, x.dtype, _canonical_spec(leaf))


def _canonical_spec(leaf: ParamLayout) -> PartitionSpec:
    """Cut as its owners hold it; else over as many devices as divide one of its dimensions."""
    if _is_cut_by_rows(leaf):
        return leaf.spec()
    world = leaf.world
    for axes, parts in ((OWNED, world.size), (LOCAL, world.local), (NODE, world.nodes)):
        for number, extent in enumerate(leaf.unsharded_shape):
            if parts > 1 and extent and extent % parts == 0:
                return PartitionSpec(*(None,) * number, axes)
    return PartitionSpec()


def _nested(flat: dict[str, Any]) -> Tree:
    return traverse_util.unflatten_dict(flat, sep="/")
