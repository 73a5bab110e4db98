"""The canonical form of a train state: unsharded shapes, without mesh, stage, padding or wire format.

Checkpoints hold this form, so one written on 2 x 4 devices by ZeRO++ can be read on 3 x 2 by exact ZeRO-3.
A leaf whose first dimension divides by the number of devices stays cut along it, exactly as its owners hold
it: converting it sends nothing. Other leaves, small ones or of odd sizes, are gathered and cut again one at
a time, so that no device holds more than one whole leaf.

With local updates each node has weights, moments and counts of its own, which keep their first axis, by
node. Where a checkpoint has those of other nodes than the state, the optimizer's are their mean, and
everything else of the nodes begins again with the outer weights.

What a state has in host memory is there in canonical form, too; ``zerojax.run.checkpoints.portions`` converts
it without a copy of all of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from zerojax.comm.in_order import on_mesh
from zerojax.errors import ConfigurationError
from zerojax.optim.low_precision import as_moment, dtype_in_checkpoint, is_rounded
from zerojax.optim.moments import by_moment
from zerojax.sharding.layout import OWNED, ParamLayout, from_stored, to_stored
from zerojax.sharding.memory import HOST, in_host, to_device
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.train.copies import copies_of
from zerojax.train.fields import copied, shardings_of
from zerojax.train.local_state import LocalState
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState
from zerojax.weights.weight import Weight

Tree = dict[str, Any]
_COUNTERS = ("step", "skipped_in_row", "seed")
OPTIMIZER = "optimizer"
"""The kind of the optimizer's arrays, which are named by their places in its state."""
AVERAGE = "average"
ROUNDING = "rounding"
"""The kind of the count by which moments in few bits are rounded; all else of them has its fp32 names."""
NODES = "nodes"
"""The kind of what each node has of its own with local updates, besides the optimizer's arrays."""
REINITIALISED = ("secondary", "residual", AVERAGE, ROUNDING, "losses", NODES, "outer")
"""Kinds that are initialised again if a checkpoint has none that fits."""


class Entry(NamedTuple):
    """An array of a state that is saved.

    Attributes:
        leaf: the parameter that it belongs to and is laid out like; None if it is saved as it is.
        x: the array, or its description.
        by_node: whether each node has one, along the first axis.
        is_rounded: whether it is a moment in few bits, which is saved by its values.
    """

    leaf: ParamLayout | None
    x: Array
    by_node: bool
    is_rounded: bool = False

    @property
    def dtype(self) -> np.dtype:
        """The dtype in canonical form."""
        return dtype_in_checkpoint(self.x.dtype) if self.is_rounded else self.x.dtype

    @property
    def rank(self) -> int:
        """The number of dimensions in canonical form, without that of nodes."""
        return self.x.ndim - self.by_node if self.leaf is None else len(self.leaf.unsharded_shape)


def to_canonical(state: TrainState, *, on_host: bool = False, placeholders: bool = False) -> Tree:
    """Everything that a step depends on, by name, each array in its unsharded shape.

    Args:
        state: filled.
        on_host: move each array to page-locked host memory before the next one is made, so that the
            devices hold one at a time.
        placeholders: in place of each array that the state has in host memory, return one of a single
            element, of the same rank.

    Returns:
        A nested dict of copies, none of which shares memory with the state, so the state may be donated:
        "counters", "params", "optimizer" (moments in the shapes of their parameters), "other"; "average"
        ("count", and "params" in their shapes) if the optimizer averages weights; and "secondary"
        (unsharded), "residual" (as stored: it belongs to its mesh) and "losses" if the state has them. Of
        frozen weights only "base", their fingerprint: they are where they came from. Arrays without elements
        are left out. With local updates "optimizer", "average", "residual" (unsharded) and "losses" have an
        entry for each node along their first axis; "nodes" are their own "weights", what is "known" in each
        and what they have to "report", and "outer" the momentum of the outer weights.
    """
    tree: Tree = {}
    for name, entry in entries_of(state).items():
        if placeholders and in_host(entry.x):
            tree[name] = _placeholder(state.spec, entry)
            continue
        if entry.leaf is None:
            copy = copied(entry.x)
        else:
            copy = convert(state.spec, entry, _canonical(state, entry), to_nodes=entry.by_node)
        if on_host:
            on_its_host = copy.sharding.with_memory_kind(HOST)
            copy = jax.block_until_ready(jax.device_put(copy, on_its_host))
        tree[name] = copy
    return _nested(tree)


def _placeholder(train_spec: TrainSpec, entry: Entry) -> Array:
    one = np.zeros((1,) * (entry.rank + entry.by_node), entry.dtype)
    return jax.make_array_from_callback(one.shape, train_spec.sharding(PartitionSpec()), lambda _: one)


def abstract_canonical(state: TrainState) -> Tree:
    """Shapes, dtypes and shardings of what ``to_canonical`` would return."""
    return _nested({name: _canonical(state, entry) for name, entry in entries_of(state).items()})


def abstract_saved(state: TrainState, nodes: int | None) -> Tree:
    """As ``abstract_canonical``, but the optimizer's arrays and the average as a checkpoint has them.

    Args:
        state: to restore.
        nodes: that saved it with local updates; None if it was saved without.
    """
    return _nested(
        {
            name: _of_nodes(state, entry, nodes)
            if name.startswith((f"{OPTIMIZER}/", f"{AVERAGE}/", f"{ROUNDING}/"))
            else _canonical(state, entry)
            for name, entry in entries_of(state).items()
        }
    )


def abstract_average(state: TrainState, nodes: int | None) -> Tree:
    """The average of the weights as a checkpoint has it, of a state that keeps none: ``abstract_saved``."""
    entries = entries_of(state).items()
    params = {name: _of_nodes(state, entry, nodes) for name, entry in entries if name.startswith("params/")}
    return _nested(params) | {"count": _of_nodes(state, Entry(None, state.step, False), nodes)}


def from_canonical(state: TrainState, tree: Tree) -> TrainState:
    """The inverse of ``to_canonical``, on any mesh, stage and wire format.

    Args:
        state: of the spec that will use it; gives structure and shardings.
        tree: as ``to_canonical`` returns it, or in place of arrays functions that make them in stored form
            (``read_in_portions``). Where it lacks them, the average of weights and the recent
            losses of the spike rule start empty, delta's copies are made from the parameters, residuals and
            the outer momentum start at zero, and all nodes begin with the outer weights. The optimizer's
            arrays of other nodes, or of a state without local updates, become their mean, in every node.

    Raises:
        ConfigurationError: the tree lacks a parameter or an optimizer state of this spec, or was trained on
            other frozen weights.
    """
    _check_base(state, tree)
    entries = entries_of(state)
    given: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
    if not all(name in given for name in entries if name.startswith("secondary/")):
        tree = {kind: values for kind, values in tree.items() if kind != "secondary"}  # of other formats
        given = traverse_util.flatten_dict(tree, sep="/")
    reinitialised = tuple(f"{kind}/" for kind in REINITIALISED if kind not in tree)
    lacking = sorted(n for n in entries if n not in given and not n.startswith(reinitialised))
    if lacking:
        raise ConfigurationError(
            f"the checkpoint lacks {', '.join(lacking[:4])}: it is of another model or optimizer"
        )
    stored = {name: _stored(state, entry, given[name]) for name, entry in entries.items() if name in given}
    return _put(state, stored)


def with_weights(state: TrainState, tree: Tree) -> TrainState:
    """The state with other weights; optimizer state, counters and residuals stay as they are.

    The tree has "params" of trained leaves in canonical form, and "other" if the model has any. What it
    lacks, such as adapters, stays as it is.
    """
    entries = entries_of(state)
    given: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
    renewed = ("secondary/", f"{NODES}/")
    stored = {name: entry.x for name, entry in entries.items() if not name.startswith(renewed)}
    stored |= {name: _stored(state, entries[name], value) for name, value in given.items()}
    return _put(state, stored)


def _check_base(state: TrainState, tree: Tree) -> None:
    """Refuse what was trained beside other frozen weights than the state's."""
    for name, own in state.base.items():
        saved = tree.get("base", {}).get(name)
        if saved is not None and not isinstance(own, jax.ShapeDtypeStruct) and int(saved) != int(own):
            raise ConfigurationError(
                f"the checkpoint was trained on another base: its frozen weights have the fingerprint "
                f"{int(saved):08x}, and those of this state {int(own):08x}. Load the base that it began with."
            )


def _delta_copies(state: TrainState) -> list[Weight]:
    """Delta's copies, which are saved; those of ``with_node_copy`` are not."""
    return [*state.copies.values()] if state.spec.zero.weights_delta else []


def entries_of(state: TrainState) -> dict[str, Entry]:
    """Each non-empty array of a state by name."""
    entries: dict[str, Entry] = {}

    def note(name: str, entry: Entry) -> Array:
        if entry.x.size if entry.leaf is None else entry.leaf.count:
            entries[name] = entry
        return entry.x

    _changed(state, note)
    return entries


def _put(state: TrainState, stored: dict[str, Array]) -> TrainState:
    """A state of the arrays named as in ``entries_of``. Missing copies of delta are made, others are zeros.

    All fields are replaced at once, so that weights in host memory are encoded once.
    """
    lacks_copies = not any(name.startswith("secondary/") for name in stored)

    def named(name: str, entry: Entry) -> Array:
        if name.startswith("secondary/") and lacks_copies:
            return entry.x
        return stored[name] if name in stored else zeros(entry.x)

    def zeros(x: Array) -> Array:
        return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=x.sharding)(x.shape, x.dtype)

    fields = _changed(state, named)
    if lacks_copies and _delta_copies(state):
        make = jax.jit(functools.partial(copies_of, state.spec), out_shardings=shardings_of(state.copies))
        fields["copies"] = make(fields["params"])
    if any(name.startswith(f"{NODES}/") for name in stored) or state.local is None:
        return state.replace(**fields, current_copies=False)
    # Without them the nodes begin with the new outer weights.
    momentum = fields.pop("local").momentum
    filled = state.replace(**fields, current_copies=False)
    assert filled.local is not None
    return filled.replace(local=dataclasses.replace(filled.local, momentum=momentum))


def _changed(state: TrainState, change: Callable[[str, Entry], Array]) -> dict[str, Any]:
    """The fields of a state with ``change(name, entry)`` in place of every array that is saved.

    This gives the arrays of a checkpoint their names.
    """
    spec, by_node = state.spec, state.local is not None
    leaves = {leaf.path: leaf for leaf in spec.leaves}

    def plain(kind: str, values: dict[str, Array], *, by_node: bool = False) -> dict[str, Array]:
        return {name: change(f"{kind}/{name}", Entry(None, x, by_node)) for name, x in values.items()}

    def nested(
        kind: str, tree: Tree, leaves: Mapping[Path, ParamLayout] = leaves, *, by_node: bool = False
    ) -> Tree:
        return to_tree(
            {
                path: change("/".join((kind, *path)), Entry(leaves.get(path), x, by_node))
                for path, x in from_tree(tree).items()
            }
        )

    def changed_copy(copy: Weight) -> Weight:
        name = "/".join(("secondary", *copy.layout.path))
        if copy.scale is None:
            return copy.replace(change(name, Entry(copy.layout, copy.values, False)))
        values = change(f"{name}/values", Entry(copy.layout, copy.values, False))
        scale = change(f"{name}/scale", Entry(None, copy.scale, False))
        return dataclasses.replace(copy, values=values, scale=scale)

    def changed_local(local: LocalState) -> LocalState:
        told = {"skipped_in_row": local.skipped_in_row, "report": local.report}
        return LocalState(
            weights=nested(f"{NODES}/weights", local.weights, by_node=True),
            known=nested(f"{NODES}/known", local.known),
            momentum=nested("outer/momentum", local.momentum),
            **plain(NODES, told, by_node=True),
        )

    nodes = (spec.world.nodes,) if by_node else ()
    layouts = by_moment(
        spec.leaves,
        state.opt_state,
        lambda leaf, _: leaf,
        lambda _: 0,  # in place of None, which is no leaf of a tree
        lambda leaf: (*nodes, *leaf.stored_shape),
    )
    return {
        **{name: change(f"counters/{name}", Entry(None, getattr(state, name), False)) for name in _COUNTERS},
        "params": nested("params", state.params),
        "opt_state": jax.tree_util.tree_map_with_path(
            lambda path, x, layout: change(
                _optimizer_name(path), Entry(layout or None, x, by_node, is_rounded(path))
            ),
            state.opt_state,
            layouts,
        ),
        "model_state": plain("other", state.model_state),
        "copies": {copy.layout.path: changed_copy(copy) for copy in _delta_copies(state)},
        "residual": nested("residual", state.residual, leaves if by_node else {}, by_node=by_node),
        "losses": plain("losses", state.losses, by_node=by_node),
        "base": plain("base", state.base),
        "local": None if state.local is None else changed_local(state.local),
    }


def _optimizer_name(path: Any) -> str:
    """Averaged weights are named as a kind of their own, so that they can be read without the moments.

    Moments have the same names whatever their dtype is.
    """
    for number, key in enumerate(path):
        if (field := getattr(key, "name", None)) in ("averaged_count", "averaged_params"):
            return _name(f"{AVERAGE}/{field.removeprefix('averaged_')}", path[number + 1 :])
        if field == "rounds":
            return f"{ROUNDING}/{field}"
    return _name(OPTIMIZER, tuple(key for key in path if getattr(key, "name", None) != "rounded"))


def _name(kind: str, path: Any) -> str:
    return f"{kind}/{jax.tree_util.keystr(path, simple=True, separator='/')}".removesuffix("/")


def _stored(state: TrainState, entry: Entry, given: Array | Callable[[TrainState, Entry], Array]) -> Array:
    """An array of a checkpoint as the state has it: of the same nodes, or the mean of others in each."""
    if not isinstance(given, jax.Array):
        return given(state, entry)
    x = given
    like, of_nodes = entry.x, x.ndim > entry.rank
    if of_nodes and not (entry.by_node and x.shape[0] == like.shape[0]):
        x, of_nodes = mean_over_nodes(state.spec, x), False
    if entry.leaf is not None:
        # Another state may have cut it along another dimension.
        x = jax.device_put(x, _of_nodes(state, entry, x.shape[0] if of_nodes else None).sharding)
        return convert(state.spec, Entry(entry.leaf, x, of_nodes), like, to_nodes=entry.by_node)
    if entry.by_node == of_nodes and x.sharding == like.sharding:
        return x
    return jax.jit(functools.partial(jnp.broadcast_to, shape=like.shape), out_shardings=like.sharding)(x)


def mean_over_nodes(train_spec: TrainSpec, x: Array) -> Array:
    """The mean over nodes; of counts, the largest."""
    reduce = jnp.mean if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.max
    to = train_spec.sharding(PartitionSpec(*_spec(x)[1:]))
    return jax.jit(functools.partial(reduce, axis=0), out_shardings=to)(x)


def convert(
    train_spec: TrainSpec, entry: Entry, like: jax.ShapeDtypeStruct | Array, *, to_nodes: bool
) -> Array:
    """Convert one array to its canonical or stored form, whichever ``like`` has, perhaps in every node.

    A moment may have another dtype there. One function is compiled per layout and mesh.
    """
    leaf, x, by_node, _ = entry
    assert leaf is not None
    # The function, which is kept, holds no array.
    source, target, whole, dtype = _spec(x), _spec(like), like.shape, like.dtype

    def on_device(part: Array) -> Array:
        # A node's own arrays are laid out as if it were the world.
        layout, shape = leaf.in_node if by_node else leaf, whole[1:] if to_nodes else whole
        cut = _cut_rows if _is_cut_by_rows(layout) else _gather_and_cut
        have = PartitionSpec(*source[1:]) if by_node else source
        want = PartitionSpec(*target[1:]) if to_nodes else target
        part = as_moment(to_device(part), dtype)
        done = cut(layout, have, want, shape)(part[0] if by_node else part)
        return done[None] if to_nodes else done

    def make() -> Callable[[Array], Array]:
        return jax.jit(on_mesh(on_device, train_spec.mesh, in_specs=source, out_specs=target))

    layout = f"{leaf.unsharded_shape} {leaf.stack} {leaf.shard} {leaf.parts}"
    key = f"canonical {layout} {x.shape} {x.sharding.memory_kind} {source} {like.shape} {dtype} {target}"
    # One at a time, to bound the memory, and because XLA:CPU starts and runs programs on the same few
    # threads: a process that starts 32 at once deadlocks when another process lags behind.
    return jax.block_until_ready(jax.device_put(train_spec.once_on_mesh(key, make)(x), like.sharding))


def _is_cut_by_rows(leaf: ParamLayout) -> bool:
    """Whether each device owns a range of the first dimension of a layer."""
    return leaf.padded == leaf.size and bool(leaf.shape) and leaf.shape[0] % leaf.world.size == 0


def _cut_rows(
    leaf: ParamLayout, source: PartitionSpec, target: PartitionSpec, like: tuple[int, ...]
) -> Callable[[Array], Array]:
    """The conversion on a device for a leaf cut by rows: both forms have their numbers in the same order."""
    axis = len(leaf.stack)
    have, want = _axes(source, axis), _axes(target, axis)
    shape = (*like[:axis], -1, *like[axis + 1 :])

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
    leaf: ParamLayout, source: PartitionSpec, target: PartitionSpec, like: tuple[int, ...]
) -> Callable[[Array], Array]:
    """The conversion on a device for any other leaf: gather it and cut out the device's part.

    XLA's partitioner would gather for this reshape as well, but with a warning.
    """
    to_form = from_stored if like == leaf.unsharded_shape else to_stored

    def on_device(part: Array) -> Array:
        for axis in range(part.ndim):
            if names := _axes(source, axis):
                part = lax.all_gather(part, names, axis=axis, tiled=True)
        whole = to_form(part, leaf).reshape(like)
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


def abstract_part(
    spec: TrainSpec, leaf: ParamLayout, dtype: Any = jnp.float32, nodes: tuple[int, ...] = ()
) -> jax.ShapeDtypeStruct:
    """The description of what is laid out like a weight, or like some of its layers, in canonical form.

    Where each node has one, ``nodes`` is their number.
    """
    if not nodes:
        return spec.abstract(leaf.unsharded_shape, dtype, _canonical_spec(leaf))
    own = PartitionSpec(NODE, *_canonical_spec(leaf.in_node, (LOCAL,)))
    return spec.abstract((*nodes, *leaf.unsharded_shape), dtype, own)


def _canonical(state: TrainState, entry: Entry) -> jax.ShapeDtypeStruct:
    """The description of an array in canonical form, in the memory where the array is."""
    leaf, x, by_node, _ = entry
    if leaf is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return _in_memory_of(x, abstract_part(state.spec, leaf, entry.dtype, x.shape[:by_node]))


def _of_nodes(state: TrainState, entry: Entry, nodes: int | None) -> jax.ShapeDtypeStruct:
    """The same with the axis of so many nodes, or without."""
    leaf, x, by_node, _ = entry
    if nodes is not None and by_node and x.shape[0] == nodes:
        return _canonical(state, entry)
    if leaf is None:
        like = state.spec.abstract(x.shape[by_node:], x.dtype)
    else:
        like = abstract_part(state.spec, leaf, entry.dtype)
    if nodes is not None:
        return in_each_node(state.spec, like, nodes)
    return like if by_node else _in_memory_of(x, like)


def in_each_node(spec: TrainSpec, x: jax.ShapeDtypeStruct, nodes: int) -> jax.ShapeDtypeStruct:
    """The description of an array that each of so many nodes has, along a first axis."""
    return spec.abstract((nodes, *x.shape), x.dtype, PartitionSpec(None, *_spec(x)))


def _in_memory_of(x: Array, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert like.sharding is not None
    if not in_host(x):
        return like
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding.with_memory_kind(HOST))


def _canonical_spec(leaf: ParamLayout, owners: tuple[str, ...] = OWNED) -> PartitionSpec:
    """Cut as its owners hold it; else over as many devices as divide one of its dimensions."""
    if _is_cut_by_rows(leaf):
        return leaf.spec(owners)
    world = leaf.world
    for axes, parts in ((owners, world.size), (LOCAL, world.local), (NODE, world.nodes)):
        for number, extent in enumerate(leaf.unsharded_shape):
            if parts > 1 and extent and extent % parts == 0:
                return PartitionSpec(*(None,) * number, axes)
    return PartitionSpec()


def _nested(flat: dict[str, Any]) -> Tree:
    return traverse_util.unflatten_dict(flat, sep="/")
