"""What an optimizer holds of each parameter, and how it sees the layers of a stack."""

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

    A moment is nested like its parameter, in whatever it is a part of, and has its shape. (optax itself
    initialises with a placeholder in place of the parameters, which label functions cannot walk.)

    The tree is the state, or the parameters or updates themselves, which count as moments; ``shape`` is that
    of a parameter's moments.
    """
    known = {leaf.path: leaf for leaf in leaves}

    def choose(keys: KeyPath, x: Array) -> T:
        names = [str(getattr(key, "key", key)) for key in keys]
        # The parameter's own path ends the moment's, behind the names of what holds it.
        endings = (tuple(names[first:]) for first in range(len(names)))
        leaf = next((known[ending] for ending in endings if ending in known), None)
        return other(x) if leaf is None or x.shape != shape(leaf) else moment(leaf, x)

    return jax.tree_util.tree_map_with_path(choose, tree)


def _row_shape(leaf: ParamLayout) -> Shape:
    """The shape of a stored leaf whose layers are one after another: of the ndim of one layer."""
    stored = leaf.stored_shape[len(leaf.stack) :]
    return (leaf.layers * leaf.padded, *stored[1:])


def with_layers_in_a_row(
    tx: optax.GradientTransformation, leaves: Sequence[ParamLayout], *, sharded: bool
) -> optax.GradientTransformation:
    """A transform whose masks and label functions see the ndim of one layer where several are stacked.

    Each device puts its own parts of the layers one after another, which moves nothing. The state keeps the
    shapes that it has without this.

    The transform gives the same update for an element wherever in its leaf it is, as ``check_shardable``
    finds out. The leaves are those of all parameters, ``sharded`` from stage 1 on.
    """

    def parts(leaf: ParamLayout) -> int:
        return leaf.padded // leaf.owned if sharded else 1

    def to_row(leaf: ParamLayout, x: Num[Array, "..."]) -> Num[Array, "..."]:
        if not leaf.stack:
            return x
        # By device, then by layer: what a device has stays there.
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
