"""The tensors of a model, and the pieces in which they arrive."""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .patches import PatchError

# Bytes of an element of the dtypes of safetensors files.
ITEMS = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}

Tensor = tuple[str, str, tuple[int, ...]]
"""A tensor's name, dtype ("BF16") and shape."""


@dataclass(frozen=True)
class Strip:
    """A rectangle of a parameter's matrix, and where it is in a tensor.

    The element at (row, column) is at ``offset + (row - top) * down + (column - left) * right`` of the flat
    tensor.
    """

    tensor: int
    top: int
    bottom: int
    left: int
    end: int
    offset: int
    down: int
    right: int

    @property
    def last(self) -> int:
        """The position of its last element in the flat tensor."""
        return (
            self.offset + (self.bottom - self.top - 1) * self.down + (self.end - self.left - 1) * self.right
        )

    def of(self, flat: np.ndarray) -> np.ndarray:
        """The rectangle as a view [rows, columns] of the flat tensor."""
        shape = self.bottom - self.top, self.end - self.left
        strides = self.down * flat.itemsize, self.right * flat.itemsize
        return np.lib.stride_tricks.as_strided(flat[self.offset :], shape, strides)


@dataclass(frozen=True)
class Piece:
    """A piece of the weights.

    Attributes:
        size: its elements, padding included.
        itemsize: bytes of an element.
        width: columns of the parameter's matrix.
        runs: for each range without padding its first place in the piece, and its first and last element
            (exclusive) in the matrix.
        strips: the rectangles of the matrix in the tensors.
    """

    size: int
    itemsize: int
    width: int
    runs: tuple[tuple[int, int, int], ...]
    strips: tuple[Strip, ...]

    def points(self, places: np.ndarray) -> list[tuple[Strip, np.ndarray, np.ndarray]]:
        """Where elements are in tensors.

        Args:
            places: positions in the piece, ascending.

        Returns:
            For each strip the indices of its positions, and their positions in the flat tensor.
        """
        found: list[tuple[Strip, np.ndarray, np.ndarray]] = []
        for place, first, last in self.runs:
            start, stop = np.searchsorted(places, (place, place + last - first))
            rows, columns = np.divmod(places[start:stop] + (first - place), self.width)
            for strip in self.strips:
                one, end = np.searchsorted(rows, (strip.top, strip.bottom))
                index, row, column = np.arange(start + one, start + end), rows[one:end], columns[one:end]
                if (strip.left, strip.end) != (0, self.width):
                    kept = (column >= strip.left) & (column < strip.end)
                    index, row, column = index[kept], row[kept], column[kept]
                at = (row - strip.top) * strip.down + (column - strip.left) * strip.right + strip.offset
                if len(index):
                    found.append((strip, index, at))
        return found

    def blocks(self, values: np.ndarray) -> Iterator[tuple[Strip, tuple[slice, slice], np.ndarray]]:
        """All elements of a piece as rectangles: (strip, its rows and columns, view of ``values``)."""
        for place, first, last in self.runs:
            for top, bottom, left, end in _rectangles(first, last, self.width):
                start = place - first + top * self.width + left
                block = values[start : start + (bottom - top) * (end - left)].reshape(
                    bottom - top, end - left
                )
                for strip in self.strips:
                    rows = max(top, strip.top), min(bottom, strip.bottom)
                    columns = max(left, strip.left), min(end, strip.end)
                    if rows[0] < rows[1] and columns[0] < columns[1]:
                        own = _from(rows, strip.top), _from(columns, strip.left)
                        yield strip, own, block[_from(rows, top), _from(columns, left)]


def _from(span: tuple[int, int], origin: int) -> slice:
    return slice(span[0] - origin, span[1] - origin)


def _rectangles(first: int, last: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """The elements [first, last) of a matrix as rectangles: a partial row, whole rows, a partial row."""
    while first < last:
        row, left = divmod(first, width)
        whole = (last - first) // width if left == 0 else 0
        end = width if whole else min(width, left + last - first)
        yield row, row + max(whole, 1), left, end
        first += max(whole, 1) * (end - left)


class Manifest:
    """The tensors of a model, and the pieces in which they arrive.

    Args:
        data: JSON, as docs/engines.md describes it.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.digest = data, hashlib.sha256(data).hexdigest()
        values = json.loads(data)
        self.files = {name: base64.b64decode(text) for name, text in values["files"].items()}
        if bad := [name for name in self.files if Path(name).name != name or name.startswith(".")]:
            raise PatchError(f"the manifest has a file {bad[0]!r}, which is no plain name")
        self.tensors: list[Tensor] = [(name, dtype, tuple(shape)) for name, dtype, shape in values["tensors"]]
        matrices = [(width, tuple(Strip(*strip) for strip in strips)) for width, strips in values["matrices"]]
        for strip in (strip for _, strips in matrices for strip in strips):
            shape = self.tensors[strip.tensor][2]
            if not 0 <= strip.offset <= strip.last < max(1, int(np.prod(shape, dtype=np.int64))):
                raise PatchError(f"{strip} in the manifest is outside its tensor of shape {shape}")
        kinds = {dtype for _, dtype, _ in self.tensors if ITEMS[dtype] == 1}
        self.codes = ", ".join(sorted(kinds))  # dtypes of quantized weights
        self.pieces: list[Piece] = []
        for matrix, size, runs in values["pieces"]:
            width, strips = matrices[matrix]
            itemsize = ITEMS[self.tensors[strips[0].tensor][1]]
            self.pieces.append(Piece(size, itemsize, width, tuple(map(tuple, runs)), strips))
