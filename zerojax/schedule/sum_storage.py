"""Keeps the sums of a stack's gradients in the memory of residuals that are no longer needed.

The backward pass runs from the last layer to the first, and after a layer's vjp its residuals are dead. But
they are parts of stacked arrays, of which a loop gives nothing back before it ends. So the sums, which come
one layer or more behind, are written over them. Where a layer keeps more bytes of activations than it has of
gradients, as without rematerialisation, gradients take no memory of their own.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt

from zerojax.comm.collectives import Values

# Residuals hold sums as integers of their own width: the compiler may widen small floats on the way, and then
# does not return every bit pattern as it was.
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_FP32 = 4


class _Piece(NamedTuple):
    """Where a part of one parameter's sums is kept; counted in fp32 elements of one layer.

    Attributes:
        array: index of the array that keeps it.
        begin: of the part in that array.
        offset: of the part in the parameter.
        size: of the part.
    """

    array: int
    begin: int
    offset: int
    size: int


class SumStorage:
    """Where the sums of one stack are kept: layer i's in place of the residuals of layer i - 1.

    So layer i's may be written once the vjp of layer i - 1 is done. The last layer's residuals are in no
    stack, which leaves layer 0's sums without a place: ``collect`` takes them as they are.

    The arrays that callers carry through the loop are the stacked residuals, flat and as unsigned integers if
    sums are written there, and one more for sums that do not fit.
    """

    def __init__(self, residuals: Any, sinks: Values) -> None:
        """Find a place for each parameter's sums, in the largest residuals first.

        Args:
            residuals: of all layers but the last, stacked.
            sinks: arrays of the sums' shape, fp32 ``[layers, n]``.
        """
        leaves, self._structure = jax.tree.flatten(residuals)
        self._layers = sinks[0].shape[0]
        self._like = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
        room = {i: math.prod(x.shape) * x.dtype.itemsize // _FP32 for i, x in enumerate(self._like)}
        order = sorted((i for i in room if _keeps_bits(self._like[i])), key=lambda i: -room[i])
        extra = len(leaves)
        room[extra] = sum(sink.shape[1] for sink in sinks)
        used = dict.fromkeys(room, 0)
        self._pieces: list[list[_Piece]] = []
        for sink in sinks:
            pieces, offset = [], 0
            for i in (*order, extra):
                size = min(sink.shape[1] - offset, room[i] - used[i])
                if size > 0:
                    pieces.append(_Piece(i, used[i], offset, size))
                    used[i] += size
                    offset += size
            self._pieces.append(pieces)
        self._extra = used[extra]
        self._written = {piece.array for pieces in self._pieces for piece in pieces}

    def start(self, residuals: Any) -> tuple[Array, ...]:
        """The arrays to carry, before any sums."""
        leaves = jax.tree.leaves(residuals)
        arrays = (_flat(x) if i in self._written else x for i, x in enumerate(leaves))
        return (*arrays, lax.empty((self._layers - 1, self._extra), jnp.uint32))

    def residual(self, arrays: Sequence[Array], layer: Any) -> Any:
        """One layer's residuals; they are lost when sums of the layer after it are written."""
        own: list[Array] = []
        for i, like in enumerate(self._like):
            x = lax.dynamic_index_in_dim(arrays[i], layer, keepdims=False)
            own.append(
                lax.bitcast_convert_type(x, like.dtype).reshape(like.shape) if i in self._written else x
            )
        return jax.tree.unflatten(self._structure, own)

    def write(self, arrays: Sequence[Array], sums: Values, layer: Any) -> tuple[Array, ...]:
        """Write the sums of one layer, any but layer 0, over the residuals of the layer before it."""
        written = list(arrays)
        for x, pieces in zip(sums, self._pieces, strict=True):
            for array, begin, offset, size in pieces:
                unsigned = written[array].dtype
                bits = lax.bitcast_convert_type(lax.slice(x, (offset,), (offset + size,)), unsigned)
                place = (layer - 1, begin * _FP32 // unsigned.itemsize)
                written[array] = lax.dynamic_update_slice(written[array], bits.reshape(1, -1), place)
        return tuple(written)

    def collect(self, arrays: Sequence[Array], first: Values) -> Values:
        """The sums of all layers, stacked, fp32 ``[layers, n]``; ``first`` are layer 0's, ``[n]``."""
        floats = {i: _as_fp32(arrays[i]) for i in self._written}
        return tuple(self._joined(floats, x, own) for x, own in zip(first, self._pieces, strict=True))

    def _joined(
        self, floats: dict[int, Array], first: Float32[Array, " n"], pieces: Sequence[_Piece]
    ) -> Float32[Array, "layers n"]:
        # XLA fuses paddings and selections with the optimizer that reads them. It would copy a concatenation,
        # and then hold all gradients beside the residuals after all.
        joined = lax.pad(first[None], jnp.float32(0), [(0, self._layers - 1, 0), (0, 0, 0)])
        for array, begin, offset, size in pieces:
            part = floats[array][:, begin : begin + size]
            around = [(1, 0, 0), (offset, first.size - offset - size, 0)]
            here = lax.pad(jnp.ones(part.shape, jnp.bool_), jnp.bool_(False), around)
            joined = jnp.where(here, lax.pad(part, jnp.float32(0), around), joined)
        return joined


def _keeps_bits(x: jax.ShapeDtypeStruct) -> bool:
    """Whether an array's elements are whole bytes, at most those of an fp32 number: not keys, not int4."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    return jnp.finfo(x.dtype).bits in (8, 16, 32)


def _flat(x: Array) -> UInt[Array, "layers n"]:
    """Stacked arrays as bits, each layer in one row."""
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return lax.bitcast_convert_type(rows, _UNSIGNED[x.dtype.itemsize])


def _as_fp32(bits: UInt[Array, "layers n"]) -> Float32[Array, "layers m"]:
    """Rows of bits as fp32 numbers, without what does not fill a last one."""
    each = _FP32 // bits.dtype.itemsize
    if each > 1:
        whole = bits.shape[1] // each
        bits = bits[:, : whole * each].reshape(bits.shape[0], whole, each)
    return lax.bitcast_convert_type(bits, jnp.float32)
