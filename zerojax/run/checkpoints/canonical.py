"""The canonical form of a train state: unsharded shapes, without mesh, stage, padding or wire format.

Checkpoints hold this form, so one written on 2 x 4 devices by ZeRO++ can be read on 3 x 2 by exact ZeRO-3.

With local updates each node has weights, moments and counts of its own, which keep their first axis, by
node. Where a checkpoint has those of other nodes than the state, the optimizer's are their mean, and
everything else of the nodes begins again with the outer weights.

What a state has in host memory is there in canonical form, too; ``zerojax.run.checkpoints.portions`` converts
it without a copy of all of it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import PartitionSpec
from jaxtyping import Array

from zerojax.errors import ConfigurationError
from zerojax.run.checkpoints.conversion import abstract_part, convert, in_each_node, mean_over_nodes
from zerojax.run.checkpoints.entries import (
    AVERAGE,
    NODES,
    OPTIMIZER,
    REINITIALISED,
    ROUNDING,
    Entry,
    Tree,
    changed_fields,
    delta_copies,
    entries_of,
)
from zerojax.sharding.memory import HOST, in_host
from zerojax.train.copies import copies_of
from zerojax.train.fields import copied, shardings_of
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState


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
            form = _canonical(state, entry)
            copy = convert(
                state.spec, entry.leaf, entry.x, form, by_node=entry.by_node, to_nodes=entry.by_node
            )
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

    fields = changed_fields(state, named)
    if lacks_copies and delta_copies(state):
        make = jax.jit(functools.partial(copies_of, state.spec), out_shardings=shardings_of(state.copies))
        fields["copies"] = make(fields["params"])
    if any(name.startswith(f"{NODES}/") for name in stored) or state.local is None:
        return state.replace(**fields, current_copies=False)
    # Without them the nodes begin with the new outer weights.
    momentum = fields.pop("local").momentum
    filled = state.replace(**fields, current_copies=False)
    assert filled.local is not None
    return filled.replace(local=dataclasses.replace(filled.local, momentum=momentum))


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
        return convert(state.spec, entry.leaf, x, like, by_node=of_nodes, to_nodes=entry.by_node)
    if entry.by_node == of_nodes and x.sharding == like.sharding:
        return x
    return jax.jit(functools.partial(jnp.broadcast_to, shape=like.shape), out_shardings=like.sharding)(x)


def _canonical(state: TrainState, entry: Entry) -> jax.ShapeDtypeStruct:
    """The description of an array in canonical form, in the memory where the array is."""
    x = entry.x
    if entry.leaf is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return _in_memory_of(x, abstract_part(state.spec, entry.leaf, entry.dtype, x.shape[: entry.by_node]))


def _of_nodes(state: TrainState, entry: Entry, nodes: int | None) -> jax.ShapeDtypeStruct:
    """The same with the axis of so many nodes, or without."""
    x, by_node = entry.x, entry.by_node
    if nodes is not None and by_node and x.shape[0] == nodes:
        return _canonical(state, entry)
    if entry.leaf is None:
        like = state.spec.abstract(x.shape[by_node:], x.dtype)
    else:
        like = abstract_part(state.spec, entry.leaf, entry.dtype)
    if nodes is not None:
        return in_each_node(state.spec, like, nodes)
    return like if by_node else _in_memory_of(x, like)


def _in_memory_of(x: Array, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert like.sharding is not None
    if not in_host(x):
        return like
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding.with_memory_kind(HOST))


def _nested(flat: dict[str, Any]) -> Tree:
    return traverse_util.unflatten_dict(flat, sep="/")
