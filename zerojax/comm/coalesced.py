"""Coalesced collectives: several payloads are joined, cross an axis together and are split again."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coalesced:
    """Payloads that cross an axis together, or have crossed it. To split those is to wait for them.

    Attributes:
        alone: those that have a collective each, by their places among all payloads.
        joined: the others, joined; empty if there are none.
        staying: those that do not cross, by their places.
        parts: of the joined ones the place, the length and the dtype.
    """

    alone: dict[int, Array]
    joined: tuple[Array, ...]
    staying: dict[int, Array]
    parts: tuple[tuple[int, int, np.dtype], ...] = field(metadata={"static": True})

    def split(self) -> list[Array]:
        """The payloads in the order in which they were given."""
        arrived, start = self.alone | self.staying, 0
        for wire in self.joined:
            for i, length, dtype in self.parts:
                piece = lax.slice_in_dim(wire, start, start + length, axis=-1)
                start += length
                arrived[i] = from_bytes(piece, dtype) if wire.dtype == jnp.uint8 else piece
        return [arrived[i] for i in range(len(arrived))]

    def across(self, collective: Callable[[Array], Array]) -> "Coalesced":
        """What arrives by a collective of each wire.

        Barriers keep the compiler from moving an encoding or a cast to the other side of the wire.
        """
        alone = {i: _across(part, collective) for i, part in self.alone.items()}
        return replace(self, alone=alone, joined=tuple(_across(wire, collective) for wire in self.joined))


def coalesce(
    parts: Sequence[Array], *, stays: Sequence[bool] | None = None, alone: float = ALONE_BYTES
) -> Coalesced:
    """Join ``parts`` along their last axis, unless they have ``alone`` bytes or more.

    Parts of one dtype are joined as they are, others as bytes. ``stays`` says of each whether it does not
    cross; none by default.
    """
    staying = {i: part for i, part in enumerate(parts) if stays is not None and stays[i]}
    crossing = [i for i in range(len(parts)) if i not in staying]
    joined = [i for i in crossing if parts[i].nbytes < alone or len(crossing) == 1]
    apart = {i: parts[i] for i in crossing if i not in joined}
    if not joined:
        return Coalesced(apart, (), staying, ())
    small = [parts[i] for i in joined]
    if any(part.dtype != small[0].dtype for part in small):
        small = [as_bytes(part) for part in small]
    wire = small[0] if len(small) == 1 else jnp.concatenate(small, -1)
    lengths = tuple((i, part.shape[-1], parts[i].dtype) for i, part in zip(joined, small, strict=True))
    return Coalesced(apart, (wire,), staying, lengths)


def gather_together(parts: Sequence[Num[Array, " m"]], axis: str, *, own_stream: bool = False) -> list[Rows]:
    """All-gather ``parts`` over an axis; returns ``[extent, m]`` each.

    Small ones share a collective; large ones get one each, which XLA combines without a copy.

    ``own_stream`` is as for ``exchange``.
    """

    def gather(wire: Array) -> Array:
        with on_own_stream(own_stream and axis == NODE):
            return lax.all_gather(wire, axis)

    return coalesce(parts).across(gather).split()


def exchange_together(parts: Sequence[Rows], axis: Axis, *, own_stream: bool = False) -> list[Rows]:
    """All-to-all of ``parts`` over an axis; row i of each goes to peer i. Arguments as ``exchange``."""
    return exchange(for_exchange(parts, own_stream=own_stream), axis, own_stream=own_stream).split()


def for_exchange(
    parts: Sequence[Rows], *, own_stream: bool = False, stays: Sequence[bool] | None = None
) -> Coalesced:
    """Coalesce ``parts``, ``[extent, m]`` each, for ``exchange``; ``stays`` is as for ``coalesce``.

    Small ones share a collective; large ones get one each, since XLA does not combine all-to-alls. With a
    stream of their own XLA runs no two collectives of the same devices at once, so with several nodes large
    parts are joined as well, at the cost of a copy.
    """
    alone = math.inf if own_stream and lax.axis_size(NODE) > 1 else ALONE_BYTES
    return coalesce(parts, stays=stays, alone=alone)


def exchange(sent: Coalesced, axis: Axis, *, own_stream: bool = False) -> Coalesced:
    """``exchange_together`` for those who coalesce earlier, or split later what has arrived.

    Args:
        sent: as ``for_exchange`` returns it, with the same ``own_stream``.
        axis: to exchange over.
        own_stream: whether hops between nodes get a stream of their own, so that they and hops within a
            node do not wait for each other.
    """

    def collective(wire: Array) -> Array:
        with on_own_stream(own_stream and axis == NODE):
            return lax.all_to_all(wire, axis, split_axis=0, concat_axis=0, tiled=True)

    return sent.across(collective)


def _across(wire: Array, collective: Callable[[Array], Array]) -> Array:
    # With a constant, since XLA's double buffering cannot compile a barrier on a loop's carry alone.
    wire, _ = lax.optimization_barrier((wire, np.int32(0)))
    # Without this one a cast of what arrives could move before the collective, which would send more bytes.
    return lax.optimization_barrier(collective(wire))
