"""An optimizer's moments of each parameter, and its view of a stack's layers."""

import functools
from collections.abc import Callable, Sequence

import jax
import optax
from jax.tree_util import KeyPath
from jaxtyping import Array, Num, PyTree

from zerojax.sharding.layout import ParamLayout

Shape = tuple[int, ...]


def by_moment[T](
    leaves: Sequence[ParamLayout],
    tree: PyTree,
    moment: Callable[[ParamLayout, Array], T],
    other: Callable[[Array], T],
    shape: Callable[[ParamLayout], Shape] = lambda leaf: leaf.stored_shape,
) -> PyTree[T]:
    """``moment(leaf, x)`` for each moment x of a parameter in an optimizer's state, and ``other(x)`` else.

    A moment's path in the state ends with its parameter's path, and its shape is ``shape(leaf)``. Parameters
    and updates themselves count as moments. (optax's own function initialises with a placeholder in place of
    the parameters, which label functions cannot walk.)
    """
    known = {leaf.path: leaf for leaf in leaves}

    def choose(keys: KeyPath, x: Array) -> T:
        names = [str(getattr(key, "key", key)) for key in keys]
        endings = (tuple(names[first:]) for first in range(len(names)))
        leaf = next((known[ending] for ending in endings if ending in known), None)
        return other(x) if leaf is None or x.shape != shape(leaf) else moment(leaf, x)

    return jax.tree_util.tree_map_with_path(choose, tree)


def _row_shape(leaf: ParamLayout) -> Shape:
    """The shape of a stored leaf whose layers are one after another, with the ndim of one layer."""
    stored = leaf.stored_shape[len(leaf.stack) :]
    return (leaf.layers * leaf.padded, *stored[1:])


def with_layers_in_a_row(
    tx: optax.GradientTransformation, leaves: Sequence[ParamLayout], *, sharded: bool
) -> optax.GradientTransformation:
    """A transform whose masks and label functions see a stacked leaf with the ndim of one layer.

    Each device puts its own parts of the layers one after another, which moves nothing between devices. The
    state keeps its usual shapes. This is correct because an element's update does not depend on the element's
    place in its leaf (``check_shardable``). ``leaves`` are all parameters, ``sharded`` from stage 1 on.
    """

    def parts(leaf: ParamLayout) -> int:
        return leaf.padded // leaf.owned if sharded else 1

    def to_row(leaf: ParamLayout, x: Num[Array, "..."]) -> Num[Array, "..."]:
        if not leaf.stack:
            return x
        # By device, then by layer: a device keeps its elements.
        return x.reshape(leaf.layers, parts(leaf), -1).swapaxes(0, 1).reshape(_row_shape(leaf))

    def from_row(leaf: ParamLayout, x: Num[Array, "..."]) -> Num[Array, "..."]:
        if not leaf.stack:
            return x
        return x.reshape(parts(leaf), leaf.layers, -1).swapaxes(0, 1).reshape(leaf.stored_shape)

    rows = functools.partial(by_moment, leaves, moment=to_row, other=lambda x: x)
    stored = functools.partial(by_moment, leaves, moment=from_row, other=lambda x: x, shape=_row_shape)

    def init(params: PyTree[Array]) -> PyTree[Array]:
        return stored(tx.init(rows(params)))

    def update(
        updates: PyTree[Array], state: PyTree[Array], params: PyTree[Array] = None
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        updates, state = tx.update(rows(updates), rows(state), rows(params))
        return stored(updates), stored(state)

    return optax.GradientTransformation(init, update)
