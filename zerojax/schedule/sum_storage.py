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
from jaxtyping import Array, Float, Float32, Num, PyTree, UInt

from zerojax.sharding.layers import Index, put_layer
from zerojax.sharding.layout import Values

# Sums are written as integers of the residuals' width: the compiler may widen small floats on the way, and
# then does not return every bit pattern as it was.
_UNSIGNED = {1: jnp.dtype(jnp.uint8), 2: jnp.dtype(jnp.uint16), 4: jnp.dtype(jnp.uint32)}
_WORD = 4
"""Bytes of the units in which residuals are divided among parameters."""
_MOST_PIECES = 16
"""Smaller parts take too long: whatever reads a parameter's sums looks for each element in all pieces."""


class _Piece(NamedTuple):
    """Where a part of one parameter's sums is kept; counted in elements of these sums, of one layer.

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
        extra: the sums that do not fit there, ``[rows, n]`` for each dtype; or all sums, one array per
            parameter.
    """

    residuals: PyTree[Array]
    extra: PyTree[Float[Array, "layers n"]]


class SumStorage:
    """Where the sums of one stack are kept: layer i's in place of the residuals of layer i - 1.

    Layer i's sums may be written once the vjp of layer i - 1 is done. The last layer's residuals are in no
    stack, so layer 0's sums have no place: ``collect`` takes them as an argument. In a stack with layers of
    several kinds, layer i - 1 of the same kind may not be done. Each kind's residuals then have a row for all
    layers, and layer i's sums replace its own residuals.

    Callers carry the stacked residuals through the loop, and more arrays for sums that do not fit there
    (``Stored``).
    """

    def __init__(
        self, residuals: PyTree[Array], sinks: Values, rows: int, dtypes: Sequence[jnp.dtype]
    ) -> None:
        """Find a place for each parameter's sums, in the largest residuals first.

        There are ``rows`` stacked residuals. ``sinks`` have the shape of the sums, fp32 ``[layers, n]``.
        ``dtypes`` are fp32, or bf16 for sums that bf16 holds exactly.
        """
        leaves = jax.tree.leaves(residuals)
        self._rows, self._dtypes = rows, tuple(dtypes)
        self._without_first = bool(sinks) and sinks[0].shape[0] > rows
        room = {i: math.prod(x.shape[1:]) * x.dtype.itemsize // _WORD for i, x in enumerate(leaves)}
        order = sorted((i for i, x in enumerate(leaves) if _keeps_bits(x.dtype)), key=lambda i: -room[i])
        self._extra = dict.fromkeys(dtypes, 0)
        index = {dtype: len(leaves) + n for n, dtype in enumerate(self._extra)}
        used = dict.fromkeys(room, 0)  # in words, like the room
        self._pieces: list[list[_Piece]] = []
        for sink, dtype in zip(sinks, dtypes, strict=True):
            pieces, offset, each = [], 0, _WORD // dtype.itemsize
            for i in order:
                words = min((sink.shape[1] - offset) // each, room[i] - used[i])
                if words * each * _MOST_PIECES > sink.shape[1]:
                    pieces.append(_Piece(i, used[i] * each, offset, words * each))
                    used[i] += words
                    offset += words * each
            if rest := sink.shape[1] - offset:
                pieces.append(_Piece(index[dtype], self._extra[dtype], offset, rest))
                self._extra[dtype] += rest
            self._pieces.append(pieces)

    def start(self, residuals: PyTree[Array]) -> Stored:
        """The carry before there are any sums: the residuals, and uninitialised room for the sums."""
        extra = tuple(lax.empty((self._rows, size), dtype) for dtype, size in self._extra.items())
        return Stored(residuals, extra)

    def write(self, stored: Stored, sums: Values, layer: Index) -> Stored:
        """Write the sums of one layer, fp32. Layer 0 has no place if there is one row less than layers."""
        arrays, structure = jax.tree.flatten(stored)
        for x, dtype, pieces in zip(sums, self._dtypes, self._pieces, strict=True):
            for array, begin, offset, size in pieces:
                old = arrays[array]
                part = lax.slice(x, (offset,), (offset + size,)).astype(dtype)
                bits = _viewed(part[None], _UNSIGNED[old.dtype.itemsize])
                place = (layer - self._without_first, begin * dtype.itemsize // old.dtype.itemsize)
                new = lax.dynamic_update_slice(_as_rows(old), bits, place)
                arrays[array] = lax.bitcast_convert_type(new.reshape(old.shape), old.dtype)
        return jax.tree.unflatten(structure, arrays)

    def collect(self, stored: Stored, first: Values | None) -> Values:
        """The sums of all layers, stacked, fp32 ``[layers, n]``; ``first`` are layer 0's, if not written."""
        # Else the compiler would compute the last writes again, element by element, in all that reads a sum.
        arrays = jax.tree.leaves(lax.optimization_barrier(stored))
        each = zip(first or [None for _ in self._pieces], self._dtypes, self._pieces, strict=True)
        return tuple(self._joined(arrays, x, dtype, own) for x, dtype, own in each)

    def _joined(
        self,
        arrays: Sequence[Array],
        first: Float32[Array, " n"] | None,
        dtype: jnp.dtype,
        pieces: Sequence[_Piece],
    ) -> Float32[Array, "layers n"]:
        # XLA fuses paddings with the optimizer that reads them. It would copy a concatenation, and then hold
        # all gradients in addition to the residuals. An element is in one piece, and zero bits elsewhere.
        unsigned = _UNSIGNED[dtype.itemsize]
        before, whole = int(self._without_first), sum(piece.size for piece in pieces)
        joined = jnp.zeros((self._rows + before, whole), unsigned)
        if first is not None:
            bits = lax.bitcast_convert_type(first[None].astype(dtype), unsigned)
            joined |= lax.pad(bits, unsigned.type(0), [(0, self._rows, 0), (0, 0, 0)])
        for array, begin, offset, size in pieces:
            part = _viewed(_as_rows(arrays[array]), unsigned)[:, begin : begin + size]
            around = [(before, 0, 0), (offset, whole - offset - size, 0)]
            joined |= lax.pad(part, unsigned.type(0), around)
        return lax.bitcast_convert_type(joined, dtype).astype(jnp.float32)


class SeparateSums:
    """A ``SumStorage`` for sums that are read layer by layer: each parameter's sums have a separate array.

    ``SumStorage`` joins the pieces of a parameter when its sums are read. A loop over layers would begin with
    that copy.
    """

    def __init__(self, sinks: Values) -> None:
        """Take arrays of the sums' shape, fp32 ``[layers, n]``."""
        self._sinks = sinks

    def start(self, residuals: PyTree[Array]) -> Stored:
        """As ``SumStorage.start``."""
        return Stored(residuals, tuple(lax.empty(sink.shape, jnp.float32) for sink in self._sinks))

    def write(self, stored: Stored, sums: Values, layer: Index) -> Stored:
        """As ``SumStorage.write``."""
        return stored._replace(extra=put_layer(stored.extra, sums, layer))

    def collect(self, stored: Stored, first: Values | None) -> Values:
        """As ``SumStorage.collect``."""
        return stored.extra if first is None else put_layer(stored.extra, first, 0)


def _keeps_bits(dtype: jnp.dtype) -> bool:
    """Whether residuals of a dtype can hold sums: their elements are 1, 2 or 4 whole bytes."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16, 32)


def _as_rows(x: Num[Array, "layers ..."]) -> UInt[Array, "layers n"]:
    """Stacked arrays as bits, each layer in one row."""
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return lax.bitcast_convert_type(rows, _UNSIGNED[x.dtype.itemsize])


def _viewed(rows: Num[Array, "layers n"], dtype: jnp.dtype) -> Num[Array, "layers m"]:
    """Rows of numbers as another dtype, without the last ones of a row if they do not fill a number."""
    layers, each = rows.shape[0], dtype.itemsize // rows.dtype.itemsize
    if each > 1:
        whole = rows.shape[1] // each
        rows = rows[:, : whole * each].reshape(layers, whole, each)
    bits = lax.bitcast_convert_type(rows, dtype)
    return bits.reshape(layers, math.prod(bits.shape[1:]))
