"""Coalesced collectives: several payloads are joined, cross an axis together and are split again."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Num

from zerojax.sharding.mesh import NODE

ALONE_BYTES = 1 << 20
"""Payloads of this size or more get a collective each: joining them would copy a full-size buffer."""

Axis = str | tuple[str, ...]
Rows = Num[Array, "rows m"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arrived:
    """Payloads that have crossed an axis together and are not yet split. Splitting them waits for them.

    Attributes:
        alone: the payloads that crossed separately, by their places among all payloads.
        joined: the joined payloads; empty if there are none.
        parts: place, length and dtype of each joined payload.
    """

    alone: dict[int, Array]
    joined: tuple[Array, ...]
    parts: tuple[tuple[int, int, np.dtype], ...] = field(metadata={"static": True})

    def split(self) -> list[Array]:
        """The payloads in the order in which they were sent."""
        arrived, start = dict(self.alone), 0
        for wire in self.joined:
            for i, length, dtype in self.parts:
                piece = lax.slice_in_dim(wire, start, start + length, axis=-1)
                start += length
                if wire.dtype != dtype:  # joined as bytes
                    piece = piece.reshape(*piece.shape[:-1], -1, dtype.itemsize)
                    piece = lax.bitcast_convert_type(piece, dtype)
                arrived[i] = piece
        return [arrived[i] for i in range(len(arrived))]


def gather_together(
    parts: Sequence[Num[Array, " m"]], axis: str, *, separate_stream: bool = False
) -> list[Rows]:
    """All-gather ``parts`` over an axis; returns ``[extent, m]`` each.

    Small ones share a collective; large ones get one each, which XLA combines without a copy.

    ``separate_stream`` is as for ``exchange_together``.
    """
    gather = functools.partial(lax.all_gather, axis_name=axis)
    across = functools.partial(_across, gather, separate_stream and axis == NODE)
    return _across_together(parts, across, ALONE_BYTES).split()


def exchange_together(parts: Sequence[Rows], axis: Axis, *, separate_stream: bool = False) -> Arrived:
    """All-to-all of ``parts`` over an axis; row i of each goes to peer i.

    Small payloads share a collective. Large ones get one each, because XLA does not combine all-to-alls.

    Args:
        parts: ``[extent, m]`` each.
        axis: the axis to exchange over.
        separate_stream: whether hops between nodes run on a separate stream, so that they and hops within a
            node do not wait for each other. XLA then runs only one collective of the same devices at a time.
            So with several nodes large parts are joined as well, at the cost of a copy.
    """
    swap = functools.partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)
    across = functools.partial(_across, swap, separate_stream and axis == NODE)
    alone = math.inf if separate_stream and lax.axis_size(NODE) > 1 else ALONE_BYTES
    return _across_together(parts, across, alone)


def _across_together(parts: Sequence[Array], across: Callable[[Array], Array], alone: float) -> Arrived:
    """Send ``parts`` ``across`` an axis, joined along their last axis.

    Parts of ``alone`` bytes or more are not joined. Parts of one dtype are joined as they are, others as
    bytes. Barriers keep the compiler from moving an encoding or a cast to the other side of the wire.
    """
    joined = [i for i, part in enumerate(parts) if part.nbytes < alone or len(parts) == 1]
    separate = {i: across(parts[i]) for i in set(range(len(parts))) - set(joined)}
    if not joined:
        return Arrived(separate, (), ())
    small = [parts[i] for i in joined]
    if any(part.dtype != small[0].dtype for part in small):
        small = [_as_bytes(part) for part in small]
    wire = across(small[0] if len(small) == 1 else jnp.concatenate(small, -1))
    lengths = tuple((i, part.shape[-1], parts[i].dtype) for i, part in zip(joined, small, strict=True))
    return Arrived(separate, (wire,), lengths)


def _across(collective: Callable[[Array], Array], separate_stream: bool, wire: Array) -> Array:
    # With a constant, since XLA's double buffering cannot compile a barrier on a loop's carry alone.
    wire, _ = lax.optimization_barrier((wire, np.int32(0)))
    # Without this barrier a cast of the result could move before the collective, which would send more bytes.
    # On one stream a hop within a node waits for the hop between nodes before it, and the next hop between
    # nodes waits for that. XLA has two communication domains with a stream each; nothing else uses this one.
    domain = {"collective_communication_domain": "scale_up_fabric"} if separate_stream else {}
    with set_xla_metadata(**domain):
        arrived = collective(wire)
    return lax.optimization_barrier(arrived)


def _as_bytes(x: Num[Array, "*rows m"]) -> Num[Array, "*rows b"]:
    """View the same memory as bytes along the last axis."""
    if x.dtype == jnp.uint8:
        return x
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)
