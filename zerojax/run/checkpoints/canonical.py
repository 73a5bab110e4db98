"""The canonical form of a train state: unsharded shapes, without mesh, stage, padding or wire format.

Checkpoints hold this form, so a checkpoint that ZeRO++ wrote on 2 x 4 devices can be read by exact ZeRO-3 on
3 x 2.

With local updates each node has its own weights, moments and counts. These arrays have the nodes as their
first axis. If a checkpoint was saved by another number of nodes, every node gets the mean of the saved
optimizer states. Its weights and everything else start from the outer weights.

Arrays in host memory are in canonical form already. ``zerojax.run.checkpoints.portions`` saves them without a
second copy of all of them.
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
    delta_replicas,
    entries_of,
)
from zerojax.sharding.memory import HOST, in_host
from zerojax.train.fields import copied
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState, encoded_fields, nodes_at, replicas_at


def to_canonical(state: TrainState, *, on_host: bool = False, placeholders: bool = False) -> Tree:
    """Everything that a step depends on, by name, each array in its unsharded shape.

    Args:
        state: filled.
        on_host: move each array to page-locked host memory before the next one is made, so that the devices
            hold one copy at a time.
        placeholders: return an array of one element, of the same rank, for each array that is in host memory.

    Returns:
        A nested dict of copies. They share no memory with the state, so the state may be donated. Arrays
        without elements are skipped. The kinds are, as far as the state has them:

        - "counters", "params", "other", and "optimizer" with moments in the shapes of their parameters;
        - "average": the "count" and the "params" of averaged weights;
        - "secondary": delta's replicas, unsharded;
        - "residual", as stored, since it belongs to its mesh; and "losses";
        - "base": the fingerprint of the frozen weights, which are not saved;
        - "nodes" with local updates: the nodes' own "weights", the outer weights as "known" to them, and
          their "report"; "outer": the momentum of the outer weights.

        With local updates "optimizer", "average", "residual" (unsharded) and "losses" have the nodes as their
        first axis.
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
    """The shapes, dtypes and shardings of the arrays that ``to_canonical`` returns."""
    return _nested({name: _canonical(state, entry) for name, entry in entries_of(state).items()})


def abstract_saved(state: TrainState, nodes: int | None) -> Tree:
    """Like ``abstract_canonical``, but the optimizer's arrays and the average have a checkpoint's nodes.

    Args:
        state: the state to restore into.
        nodes: the number of nodes that saved the checkpoint with local updates; None without local updates.
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
    """The average of the weights as a checkpoint holds it, for a state that keeps no average.

    ``nodes`` is as in ``abstract_saved``.
    """
    entries = entries_of(state).items()
    params = {name: _of_nodes(state, entry, nodes) for name, entry in entries if name.startswith("params/")}
    return _nested(params) | {"count": _of_nodes(state, Entry(None, state.step, False), nodes)}


def from_canonical(state: TrainState, tree: Tree) -> TrainState:
    """The inverse of ``to_canonical``, on any mesh, stage and wire format.

    Missing kinds are initialised. The average of the weights and the recent losses of the spike rule start
    empty. Delta's replicas are made from the parameters. Residuals and the outer momentum are zeros. All
    nodes start with the outer weights. Optimizer arrays from another number of nodes, or from a state without
    local updates, are replaced by their mean in every node.

    Args:
        state: a state of the spec that will use the arrays; gives structure and shardings.
        tree: as ``to_canonical`` returns it. An array may be replaced by a function that makes it in stored
            form (``read_in_portions``).
    """
    _check_base(state, tree)
    entries = entries_of(state)
    names = traverse_util.flatten_dict(tree, sep="/")
    if not all(name in names for name in entries if name.startswith("secondary/")):
        tree = {kind: values for kind, values in tree.items() if kind != "secondary"}  # in other wire formats
    saved: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
    reinitialised = tuple(f"{kind}/" for kind in REINITIALISED if kind not in tree)
    lacking = sorted(n for n in entries if n not in saved and not n.startswith(reinitialised))
    if lacking:
        raise ConfigurationError(
            f"the checkpoint lacks {', '.join(lacking[:4])}: it is of another model or optimizer"
        )
    stored = {name: _stored(state, entry, saved[name]) for name, entry in entries.items() if name in saved}
    return with_stored(state, stored)


def with_weights(state: TrainState, tree: Tree) -> TrainState:
    """The state with other weights; optimizer state, counters and residuals stay as they are.

    The tree has the "params" of trained leaves in canonical form, and "other" if the model has any. Weights
    that the tree lacks, such as adapters, keep their values.
    """
    entries = entries_of(state)
    saved: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
    renewed = ("secondary/", f"{NODES}/")
    stored = {name: entry.x for name, entry in entries.items() if not name.startswith(renewed)}
    stored |= {name: _stored(state, entries[name], value) for name, value in saved.items()}
    return with_stored(state, stored)


def _check_base(state: TrainState, tree: Tree) -> None:
    """Raises if the tree was trained beside frozen weights that differ from the state's frozen weights."""
    for name, own in state.base.items():
        saved = tree.get("base", {}).get(name)
        if saved is not None and not isinstance(own, jax.ShapeDtypeStruct) and int(saved) != int(own):
            raise ConfigurationError(
                f"the checkpoint was trained on another base: its frozen weights have the fingerprint "
                f"{int(saved):08x}, and this state's have {int(own):08x}. Load the base that it began with."
            )


def with_stored(state: TrainState, stored: dict[str, Array]) -> TrainState:
    """A state made from arrays with the names of ``entries_of``.

    Missing replicas of delta are made from the parameters; other missing arrays are zeros. All fields are
    replaced at once, so that weights in host memory are encoded once.
    """
    lacks_replicas = not any(name.startswith("secondary/") for name in stored)

    def named(name: str, entry: Entry) -> Array:
        if name.startswith("secondary/") and lacks_replicas:
            return entry.x
        return stored[name] if name in stored else zeros(entry.x)

    def zeros(x: Array) -> Array:
        return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=x.sharding)(x.shape, x.dtype)

    fields = changed_fields(state, named)
    if lacks_replicas and delta_replicas(state):
        fields["replicas"] = replicas_at(state.spec, fields["params"])
    if state.local is not None and not any(name.startswith(f"{NODES}/") for name in stored):
        # The checkpoint has no weights of single nodes: they begin with the new outer weights.
        nodes = nodes_at(state.spec, fields["params"])
        fields["local"] = dataclasses.replace(nodes, momentum=fields["local"].momentum)
    encoded = encoded_fields(state.spec, vars(state) | fields)
    return state.replace(**fields, **encoded, current_replicas=False)


def _stored(state: TrainState, entry: Entry, saved: Array | Callable[[TrainState, Entry], Array]) -> Array:
    """A checkpoint's array in stored form; every node gets the mean if the number of nodes differs."""
    if not isinstance(saved, jax.Array):
        return saved(state, entry)
    x = saved
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
    """The description of an entry's array in canonical form, in the memory that now holds the array."""
    x = entry.x
    if entry.leaf is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return _in_memory_of(x, abstract_part(state.spec, entry.leaf, entry.dtype, x.shape[: entry.by_node]))


def _of_nodes(state: TrainState, entry: Entry, nodes: int | None) -> jax.ShapeDtypeStruct:
    """Like ``_canonical``, with a first axis of ``nodes``, or without that axis if ``nodes`` is None."""
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
