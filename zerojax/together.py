"""One collective for what belongs together: parts are joined to cross an axis, and taken apart behind it."""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Num

from zerojax.codec import as_bytes, from_bytes
from zerojax.mesh import LOCAL

ALONE_BYTES = 1 << 20
"""Parts of so much go alone within a node: joining them would cost a copy of a full-size buffer."""

Rows = Num[Array, "rows m"]


def gather_together(parts: Sequence[Num[Array, " m"]], axis: str) -> list[Rows]:
    """One all-gather for all small ``parts``, one each for the large; ``[extent, m]`` each."""
    return _together(parts, lambda wire: lax.all_gather(wire, axis), ALONE_BYTES)


def exchange_together(parts: Sequence[Rows], axis: str | tuple[str, ...]) -> list[Rows]:
    """One all-to-all for all small ``parts``, one each for the large; row i goes to peer i.

    Between nodes one for all of them: beside such a hop a copy takes no time, and of the few collectives
    that the compiler lets run at once (``zerojax.xla``) it should be one.
    """
    alone = ALONE_BYTES if axis == LOCAL else math.inf
    return _together(
        parts, lambda wire: lax.all_to_all(wire, axis, split_axis=0, concat_axis=0, tiled=True), alone
    )


def _together(parts: Sequence[Array], collective: Callable[[Array], Array], alone: float) -> list[Array]:
    """Run ``collective`` on ``parts`` joined along their last axis, then take them apart.

    Those of ``alone`` bytes and more are not joined.
    Parts of one dtype are joined as they are, others as bytes. Barriers keep the compiler from moving
    an encoding or a cast to the other side of the wire.
    """
    arrived: list[Array | None] = [None] * len(parts)
    joined = [i for i, part in enumerate(parts) if part.nbytes < alone or len(parts) == 1]
    for i in set(range(len(parts))) - set(joined):
        arrived[i] = _across(parts[i], collective)
    if joined:
        small = [parts[i] for i in joined]
        dtype = small[0].dtype
        if any(part.dtype != dtype for part in small):
            small, dtype = [as_bytes(part) for part in small], jnp.dtype(jnp.uint8)
        wire = _across(small[0] if len(small) == 1 else jnp.concatenate(small, -1), collective)
        start = 0
        for i, part in zip(joined, small, strict=True):
            piece = lax.slice_in_dim(wire, start, start + part.shape[-1], axis=-1)
            start += part.shape[-1]
            arrived[i] = from_bytes(piece, parts[i].dtype) if dtype == jnp.uint8 else piece
    return [part for part in arrived if part is not None]


def _across(wire: Array, collective: Callable[[Array], Array]) -> Array:
    # Beside a constant: XLA's double buffering cannot compile a barrier on nothing but what a loop carries.
    wire, _ = lax.optimization_barrier((wire, np.int32(0)))
    return lax.optimization_barrier(collective(wire))
