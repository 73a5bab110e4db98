"""Coalesced collectives: several payloads are joined, cross an axis together and are split again."""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Num

from zerojax.comm.xla_options import on_own_stream
from zerojax.sharding.mesh import NODE
from zerojax.sharding.wire_format import as_bytes, from_bytes

ALONE_BYTES = 1 << 20
"""Payloads of this size or more get a collective each: joining them would copy a full-size buffer."""

Axis = str | tuple[str, ...]
Rows = Num[Array, "rows m"]


def gather_together(parts: Sequence[Num[Array, " m"]], axis: str, *, own_stream: bool = False) -> list[Rows]:
    """All-gather ``parts`` over an axis; returns ``[extent, m]`` each.

    Small ones share a collective; large ones get one each, which XLA combines without a copy.

    Args:
        parts: one payload each.
        axis: to gather over.
        own_stream: whether a hop between nodes gets a stream of its own; see ``exchange_together``.
    """

    def gather(wire: Array) -> Array:
        with on_own_stream(own_stream and axis == NODE):
            return lax.all_gather(wire, axis)

    return _together(parts, gather, ALONE_BYTES)


def exchange_together(parts: Sequence[Rows], axis: Axis, *, own_stream: bool = False) -> list[Rows]:
    """All-to-all of ``parts`` over an axis; row i of each goes to peer i.

    Small ones share a collective; large ones get one each, since XLA does not combine all-to-alls.

    Args:
        parts: ``[extent, m]`` each.
        axis: to exchange over.
        own_stream: whether hops between nodes get a stream of their own, so that they and hops within a
            node do not wait for each other. XLA then runs no two collectives of the same devices at once, so
            with several nodes large parts are joined as well, at the cost of a copy.
    """

    def exchange(wire: Array) -> Array:
        with on_own_stream(own_stream and axis == NODE):
            return lax.all_to_all(wire, axis, split_axis=0, concat_axis=0, tiled=True)

    return _together(parts, exchange, math.inf if own_stream and lax.axis_size(NODE) > 1 else ALONE_BYTES)


def _together(parts: Sequence[Array], collective: Callable[[Array], Array], alone: float) -> list[Array]:
    """Run ``collective`` on ``parts`` joined along their last axis, then split the result.

    Parts of ``alone`` bytes or more are not joined. Parts of one dtype are joined as they are, others as
    bytes. Barriers keep the compiler from moving an encoding or a cast to the other side of the wire.
    """
    joined = [i for i, part in enumerate(parts) if part.nbytes < alone or len(parts) == 1]
    arrived = {i: _across(parts[i], collective) for i in set(range(len(parts))) - set(joined)}
    if joined:
        small = [parts[i] for i in joined]
        dtype = small[0].dtype
        if any(part.dtype != dtype for part in small):
            small = [as_bytes(part) for part in small]
            dtype = jnp.dtype(jnp.uint8)
        wire = _across(small[0] if len(small) == 1 else jnp.concatenate(small, -1), collective)
        start = 0
        for i, part in zip(joined, small, strict=True):
            piece = lax.slice_in_dim(wire, start, start + part.shape[-1], axis=-1)
            start += part.shape[-1]
            arrived[i] = from_bytes(piece, parts[i].dtype) if dtype == jnp.uint8 else piece
    return [arrived[i] for i in range(len(parts))]


def _across(wire: Array, collective: Callable[[Array], Array]) -> Array:
    # With a constant, since XLA's double buffering cannot compile a barrier on a loop's carry alone.
    wire, _ = lax.optimization_barrier((wire, np.int32(0)))
    # Without this one a cast of what arrives could move before the collective, which would send more bytes.
    return lax.optimization_barrier(collective(wire))
