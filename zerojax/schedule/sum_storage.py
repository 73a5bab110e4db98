"""Keeps the sums of a stack's gradients in the memory of residuals that are no longer needed.

The backward pass runs from the last layer to the first, and a layer's residuals are dead after its vjp. But
they are parts of stacked arrays that are freed only when the loop ends. So the sums, which arrive one layer
or more later, are written over them. If a layer keeps more bytes of activations than it has of gradients, as
without rematerialisation, gradients take no additional memory.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Num, PyTree, UInt

from zerojax.sharding.layers import Index, put_layer

# Sums are written as integers of the residuals' width: the compiler may widen small floats on the way, and
# then does not return every bit pattern as it was.
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_FP32 = 4

Sums = tuple[Float32[Array, "..."], ...]
"""Gradient sums: one array per trained parameter."""


class _Piece(NamedTuple):
    """Where a part of one parameter's sums is kept; counted in fp32 elements of one layer.

    Attributes:
        array: index of the array that keeps it.
        begin: the part's first element in that array.
        offset: the part's first element in the parameter.
        size: the part's elements.
    """

    array: int
    begin: int
    offset: int
    size: int


class Stored(NamedTuple):
    """Carried through the backward pass, for the layers of one kind.

    Attributes:
        residuals: stacked. Layers that are done hold sums instead.
        extra: the sums that do not fit there, fp32 ``[rows, n]``; or all sums, one array per parameter.
    """

    residuals: PyTree[Array]
    extra: PyTree[Float32[Array, "layers n"]]


class SumStorage:
    """Where the sums of one stack are kept: layer i's in place of the residuals of layer i - 1.

    Layer i's sums may be written once the vjp of layer i - 1 is done. The last layer's residuals are in no
    stack, so layer 0's sums have no place: ``collect`` takes them as an argument. In a stack with layers of
    several kinds, layer i - 1 of the same kind may not be done. Each kind's residuals then have a row for all
    layers, and layer i's sums replace its own residuals.

    Callers carry the stacked residuals through the loop, and one more array for sums that do not fit there
    (``Stored``).
    """

    def __init__(self, residuals: PyTree[Array], sinks: Sums, rows: int) -> None:
        """Find a place for each parameter's sums, in the largest residuals first.

        There are ``rows`` stacked residuals. ``sinks`` have the shape of the sums, fp32 ``[layers, n]``.
        """
        leaves = jax.tree.leaves(residuals)
        self._rows = rows
        self._without_first = bool(sinks) and sinks[0].shape[0] > rows
        room = {i: math.prod(x.shape[1:]) * x.dtype.itemsize // _FP32 for i, x in enumerate(leaves)}
        order = sorted((i for i, x in enumerate(leaves) if _keeps_bits(x.dtype)), key=lambda i: -room[i])
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

    def start(self, residuals: PyTree[Array]) -> Stored:
        """The carry before there are any sums: the residuals, and uninitialised room for the sums, fp32."""
        return Stored(residuals, lax.empty((self._rows, self._extra), jnp.float32))

    def write(self, stored: Stored, sums: Sums, layer: Index) -> Stored:
        """Write the sums of one layer. Layer 0 has no place if there is one row less than layers."""
        arrays, structure = jax.tree.flatten(stored)
        for x, pieces in zip(sums, self._pieces, strict=True):
            for array, begin, offset, size in pieces:
                old = arrays[array]
                unsigned = _UNSIGNED[old.dtype.itemsize]
                bits = lax.bitcast_convert_type(lax.slice(x, (offset,), (offset + size,)), unsigned)
                place = (layer - self._without_first, begin * _FP32 // old.dtype.itemsize)
                new = lax.dynamic_update_slice(_as_rows(old), bits.reshape(1, -1), place)
                arrays[array] = lax.bitcast_convert_type(new.reshape(old.shape), old.dtype)
        return jax.tree.unflatten(structure, arrays)

    def collect(self, stored: Stored, first: Sums | None) -> Sums:
        """The sums of all layers, stacked, fp32 ``[layers, n]``; ``first`` are layer 0's, if not written."""
        # Else the compiler would compute the last writes again, element by element, in all that reads a sum.
        arrays = jax.tree.leaves(lax.optimization_barrier(stored))
        written = {piece.array for pieces in self._pieces for piece in pieces}
        floats = {i: _as_fp32(_as_rows(arrays[i])) for i in written}
        of_first = first or [None for _ in self._pieces]
        return tuple(self._joined(floats, x, own) for x, own in zip(of_first, self._pieces, strict=True))

    def _joined(
        self, floats: dict[int, Array], first: Float32[Array, " n"] | None, pieces: Sequence[_Piece]
    ) -> Float32[Array, "layers n"]:
        # XLA fuses paddings and selections with the optimizer that reads them. It would copy a concatenation,
        # and then hold all gradients in addition to the residuals.
        before, whole = int(self._without_first), sum(piece.size for piece in pieces)
        joined = (
            jnp.zeros((self._rows, whole))
            if first is None
            else lax.pad(first[None], jnp.float32(0), [(0, self._rows, 0), (0, 0, 0)])
        )
        for array, begin, offset, size in pieces:
            part = floats[array][:, begin : begin + size]
            around = [(before, 0, 0), (offset, whole - offset - size, 0)]
            here = lax.pad(jnp.ones(part.shape, jnp.bool_), jnp.bool_(False), around)
            joined = jnp.where(here, lax.pad(part, jnp.float32(0), around), joined)
        return joined


class SeparateSums:
    """A ``SumStorage`` for sums that are read layer by layer: each parameter's sums have a separate array.

    ``SumStorage`` joins the pieces of a parameter when its sums are read. A loop over layers would begin with
    that copy.
    """

    def __init__(self, sinks: Sums) -> None:
        """Take arrays of the sums' shape, fp32 ``[layers, n]``."""
        self._sinks = sinks

    def start(self, residuals: PyTree[Array]) -> Stored:
        """As ``SumStorage.start``."""
        return Stored(residuals, tuple(lax.empty(sink.shape, jnp.float32) for sink in self._sinks))

    def write(self, stored: Stored, sums: Sums, layer: Index) -> Stored:
        """As ``SumStorage.write``."""
        return stored._replace(extra=put_layer(stored.extra, sums, layer))

    def collect(self, stored: Stored, first: Sums | None) -> Sums:
        """As ``SumStorage.collect``."""
        return stored.extra if first is None else put_layer(stored.extra, first, 0)


def _keeps_bits(dtype: jnp.dtype) -> bool:
    """Whether residuals of a dtype can hold sums: their elements are 1, 2 or 4 whole bytes."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16, 32)


def _as_rows(x: Num[Array, "layers ..."]) -> UInt[Array, "layers n"]:
    """Stacked arrays as bits, each layer in one row."""
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return lax.bitcast_convert_type(rows, _UNSIGNED[x.dtype.itemsize])


def _as_fp32(bits: UInt[Array, "layers n"]) -> Float32[Array, "layers m"]:
    """Rows of bits as fp32 numbers, without the last bits of a row if they do not fill a number."""
    each = _FP32 // bits.dtype.itemsize
    if each > 1:
        whole = bits.shape[1] // each
        bits = bits[:, : whole * each].reshape(bits.shape[0], whole, each)
    return lax.bitcast_convert_type(bits, jnp.float32)
