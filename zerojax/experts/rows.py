"""The rows in which experts' products read tokens: a row for each assignment of a token to an expert.

Rows are sorted by expert, and within an expert by token. Values move between tokens and rows by gathers in
both directions, with the tables here. There is no scatter-add into places that several rows share, so every
run gives the same bits.
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
        complete: whether every assignment has a row in the window.
        sizes: each expert's number of rows in the window. Rows after these belong to no expert.
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
        sizes: each of these experts' number of rows.
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
        """The window of all rows, for a device that has all experts."""
        return Window(self.order // self.places.shape[1], self.order, self.places, True, self.sizes)

    def window(self, start: Int32[Array, ""] | int, length: int) -> Window:
        """``length`` rows from ``start`` on. Assignments to other rows have the place -1."""
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
    """The value at each row's index, in the dtype of ``values``."""
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
    """``before`` plus the sum of each token's rows in the window, in the dtype of the rows.

    Sums are fp32, in the order of the token's assignments.
    """
    total = jnp.float32(0) if before is None else before.astype(jnp.float32)
    # Without a loop here, XLA makes one loop of gathers and sum, which stores nothing in between. A kernel
    # for gathers (``pallas_kernels.gather_rows``) would store each.
    for i in range(window.places.shape[1]):
        for each in rows:
            total += _at_places(each, window.places[:, i], window.complete)
    return total.astype(rows[0].dtype)
