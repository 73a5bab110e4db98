"""The rows in which experts' products read tokens: a row for each assignment of a token to an expert.

Rows lie in order of their experts, of one expert in the order of their tokens. What moves between tokens and
rows is a gather in both directions, by the tables here, never a sum into places that several rows share: so
the same bits come out every time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Num


class Window(NamedTuple):
    """Consecutive rows.

    Attributes:
        tokens: the token of each row.
        order: the assignment of each row, ``token * per_token + i``.
        places: the row of each assignment; negative if it has none in the window.
        complete: whether every assignment has one.
        sizes: rows of each expert in it, which come first. Rows after these are nobody's.
    """

    tokens: Int32[Array, " rows"]
    order: Int32[Array, " rows"]
    places: Int32[Array, "tokens per_token"]
    complete: bool
    sizes: Int32[Array, " experts"]


class Rows(NamedTuple):
    """All rows of some of the experts.

    Attributes:
        order: as in ``Window``; assignments to other experts come last, then padding.
        places: the row of each assignment.
        sizes: rows of each of these experts.
    """

    order: Int32[Array, " padded"]
    places: Int32[Array, "tokens per_token"]
    sizes: Int32[Array, " experts"]

    @property
    def total(self) -> Int32[Array, ""]:
        """How many rows these experts have."""
        return self.sizes.sum(dtype=jnp.int32)

    @property
    def all(self) -> Window:
        """Every row, where every assignment is to one of these experts."""
        return Window(self.order // self.places.shape[1], self.order, self.places, True, self.sizes)

    def window(self, start: Int32[Array, ""] | int, length: int) -> Window:
        """The rows from ``start`` on."""
        order = lax.dynamic_slice_in_dim(self.order, start, length)
        stops = jnp.cumsum(self.sizes, dtype=jnp.int32)
        first, last = (jnp.clip(x - start, 0, length) for x in (stops - self.sizes, stops))
        places = self.places - start
        places = jnp.where(places < jnp.minimum(length, stops[-1] - start), places, -1)
        return Window(order // places.shape[1], order, places, False, last - first)


def rows_of(
    experts: Int32[Array, "tokens per_token"], first: Int32[Array, ""] | int, count: int, padded: int
) -> Rows:
    """The rows of ``count`` experts from the number ``first`` on.

    ``padded`` is the length of ``Rows.order``, at least the number of assignments.
    """
    own = experts.reshape(-1) - first
    own = jnp.where((own >= 0) & (own < count), own, count)
    order = jnp.argsort(own, stable=True).astype(jnp.int32)
    index = jnp.arange(len(order), dtype=jnp.int32)
    places = jnp.zeros_like(order).at[order].set(index, unique_indices=True, mode="promise_in_bounds")
    sizes = (own[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    return Rows(jnp.pad(order, (0, padded - len(order))), places.reshape(experts.shape), sizes)


def to_rows(values: Num[Array, "tokens ..."], index: Int32[Array, " rows"]) -> Num[Array, "rows ..."]:
    """The value at each row's index."""
    return values.at[index].get(mode="promise_in_bounds")


def of_assignments(values: Float[Array, " rows"], window: Window) -> Float[Array, "tokens per_token"]:
    """The value of each assignment's row, fp32; 0 if it has none in the window."""
    return _at_places(values, window.places, window.complete)


def _at_places(rows: Array, places: Array, complete: bool) -> Array:
    """The values at places, fp32; 0 where a place is negative."""
    if complete:
        return to_rows(rows, places).astype(jnp.float32)
    found = to_rows(rows, jnp.maximum(places, 0)).astype(jnp.float32)
    return jnp.where((places >= 0).reshape(*places.shape, *(1,) * (found.ndim - places.ndim)), found, 0)


def to_tokens(
    rows: Sequence[Float[Array, "rows d"]], window: Window, before: Float[Array, "tokens d"] | None = None
) -> Float[Array, "tokens d"]:
    """For each token the sum of its rows in the window, in fp32 and in the order of the token's assignments.

    The sum is added to ``before``.

    Returns:
        In the dtype of the rows.
    """
    total = jnp.float32(0) if before is None else before.astype(jnp.float32)
    # Written out, gathers and sum are one loop of the compiler's, which writes nothing in between.
    for i in range(window.places.shape[1]):
        for each in rows:
            total += _at_places(each, window.places[:, i], window.complete)
    return total.astype(rows[0].dtype)
