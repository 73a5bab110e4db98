"""Which arrays of a train state are saved, and their names in checkpoints."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from zerojax.optim.low_precision import dtype_in_checkpoint, is_rounded
from zerojax.optim.moments import by_moment
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.train.fields import LocalState
from zerojax.train.state import TrainState
from zerojax.weights import Weight

Tree = dict[str, Any]
_COUNTERS = ("step", "skipped_in_row", "seed")
OPTIMIZER = "optimizer"
"""The kind of the optimizer's arrays, which are named by their paths in its state."""
AVERAGE = "average"
ROUNDING = "rounding"
"""The kind of the rounding count of low-precision moments. The moments themselves have their fp32 names."""
NODES = "nodes"
"""The kind of the arrays that each node owns with local updates, except the optimizer's arrays."""
REINITIALISED = ("secondary", "residual", AVERAGE, ROUNDING, "losses", NODES, "outer")
"""Kinds that are initialised if the checkpoint has none, or none that fits."""


class Entry(NamedTuple):
    """An array of a state that is saved.

    Attributes:
        leaf: the layout of the array's parameter; None if the array is saved as it is.
        x: the array, or its description.
        by_node: whether each node has its own array, along the first axis.
        is_rounded: whether it is a low-precision moment, which is saved by its values.
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
        """The number of dimensions in canonical form, without the axis of nodes."""
        return self.x.ndim - self.by_node if self.leaf is None else len(self.leaf.unsharded_shape)


def entries_of(state: TrainState) -> dict[str, Entry]:
    """Each non-empty array of a state by name."""
    entries: dict[str, Entry] = {}

    def note(name: str, entry: Entry) -> Array:
        if entry.x.size if entry.leaf is None else entry.leaf.count:
            entries[name] = entry
        return entry.x

    changed_fields(state, note)
    return entries


def changed_fields(state: TrainState, change: Callable[[str, Entry], Array]) -> dict[str, Any]:
    """The fields of a state, with ``change(name, entry)`` in place of every array that is saved.

    This function gives the arrays of a checkpoint their names.
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

    def changed_replica(replica: Weight) -> Weight:
        name = "/".join(("secondary", *replica.layout.path))
        if replica.scale is None:
            return replica.replace(change(name, Entry(replica.layout, replica.values, False)))
        values = change(f"{name}/values", Entry(replica.layout, replica.values, False))
        scale = change(f"{name}/scale", Entry(None, replica.scale, False))
        return dataclasses.replace(replica, values=values, scale=scale)

    def changed_local(local: LocalState) -> LocalState:
        values = {"skipped_in_row": local.skipped_in_row, "report": local.report}
        return LocalState(
            weights=nested(f"{NODES}/weights", local.weights, by_node=True),
            known=nested(f"{NODES}/known", local.known),
            momentum=nested("outer/momentum", local.momentum),
            **plain(NODES, values, by_node=True),
        )

    nodes = (spec.world.nodes,) if by_node else ()
    layouts = by_moment(
        spec.leaves,
        state.opt_state,
        lambda leaf, _: leaf,
        lambda _: 0,  # JAX would not take None for a leaf
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
        "replicas": {one.layout.path: changed_replica(one) for one in delta_replicas(state)},
        "residual": nested("residual", state.residual, leaves if by_node else {}, by_node=by_node),
        "losses": plain("losses", state.losses, by_node=by_node),
        "base": plain("base", state.base),
        "local": None if state.local is None else changed_local(state.local),
    }


def delta_replicas(state: TrainState) -> list[Weight]:
    """The replicas that delta keeps in each node, which are saved. Copies by ``with_replica`` are not."""
    return [*state.replicas.values()] if state.spec.zero.weights_delta else []


def _optimizer_name(path: Any) -> str:
    """The name of an array of the optimizer.

    Averaged weights are a kind by themselves, so that they can be read without the moments. A moment's name
    does not depend on its dtype.
    """
    for number, key in enumerate(path):
        if (field := getattr(key, "name", None)) in ("averaged_count", "averaged_params"):
            return _name(f"{AVERAGE}/{field.removeprefix('averaged_')}", path[number + 1 :])
        if field == "rounds":
            return f"{ROUNDING}/{field}"
    return _name(OPTIMIZER, tuple(key for key in path if getattr(key, "name", None) != "rounded"))


def _name(kind: str, path: Any) -> str:
    return f"{kind}/{jax.tree_util.keystr(path, simple=True, separator='/')}".removesuffix("/")
