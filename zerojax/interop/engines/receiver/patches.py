"""Patches of pieces, their decoder and their checksums."""

import struct
from dataclasses import dataclass, field

import numpy as np

# Header of a patch: piece, version before, version, two checksums, changed elements, escaped elements, low
# bits of a gap, bits of a value.
HEADER = struct.Struct("<IqqIIIIBBxx")

FULL = -1
"""The version before a patch that has all elements of a piece."""

UNSIGNED = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class PatchError(ValueError):
    """A patch or a message does not fit; nothing was changed."""


@dataclass(frozen=True)
class Patch:
    """A change of one piece of the weights.

    Attributes:
        piece: its number in the manifest.
        before: the version that the patch changes; ``FULL`` if it has all elements.
        version: the version after it.
        sums: the checksums of the piece after it.
        count: changed elements.
        escaped: changed elements whose values are in the section of escaped values.
        low: bits of a gap in the section of low bits.
        bits: bits of a value.
        body: the sections one after another, or all elements.
    """

    piece: int
    before: int
    version: int
    sums: tuple[int, int]
    count: int = 0
    escaped: int = 0
    low: int = 0
    bits: int = 1
    body: bytes | memoryview = field(default=b"", repr=False)

    def header(self) -> bytes:
        """All but the body."""
        numbers = self.count, self.escaped, self.low, self.bits
        return HEADER.pack(self.piece, self.before, self.version, *self.sums, *numbers)

    def to_bytes(self) -> bytes:
        """Header and body."""
        return self.header() + self.body

    @staticmethod
    def of(data: bytes | bytearray) -> "Patch":
        """Undo ``to_bytes``. The body is a view of the data.

        Raises:
            PatchError: the header is incomplete.
        """
        if len(data) < HEADER.size:
            raise PatchError(f"a patch of {len(data)} bytes has no header: it was cut off")
        piece, before, version, one, other, count, escaped, low, bits = HEADER.unpack_from(data)
        body = memoryview(data)[HEADER.size :]
        return Patch(piece, before, version, (one, other), count, escaped, low, bits, body)


def full(new: np.ndarray, piece: int, version: int) -> Patch:
    """The patch with all elements ``new`` of a piece: a vector of unsigned integers, padding included."""
    return Patch(piece, FULL, version, checksums(new), body=new.tobytes())


def elements(patch: Patch, size: int, itemsize: int) -> np.ndarray:
    """All elements of a full patch, as unsigned integers: a view of its body.

    Args:
        patch: the patch.
        size: elements of the piece.
        itemsize: bytes of an element.

    Raises:
        PatchError: the body has another size.
    """
    if len(patch.body) != size * itemsize:
        raise PatchError(f"a full patch for piece {patch.piece} has the wrong size, {len(patch.body)}")
    return np.frombuffer(patch.body, UNSIGNED[itemsize])


def decode(patch: Patch, size: int, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of a patch that is not full, ascending, and the differences to add there.

    Args:
        patch: the patch.
        size: elements of the piece.
        itemsize: bytes of an element.

    Returns:
        int64 positions, and differences as unsigned integers, which are added modulo the elements' range.

    Raises:
        PatchError: the body is cut off, or a position is outside the piece.
    """
    dtype, count = UNSIGNED[itemsize], patch.count
    if count > size or patch.escaped > count or patch.low > 32 or not 1 <= patch.bits <= 8 * itemsize:
        raise PatchError(f"the header of a patch for piece {patch.piece} is invalid")
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, dtype)
    words = np.frombuffer(patch.body, "<u4", len(patch.body) // 4)
    widths = (count, patch.low), (count, patch.bits), (patch.escaped, 8 * itemsize)
    ends = np.cumsum([0, *(-(-number * width // 32) for number, width in widths)])
    unary = np.unpackbits(words[ends[-1] :].view(np.uint8), bitorder="little")
    stops = np.flatnonzero(unary)
    if len(stops) != count:
        raise PatchError(f"a patch for piece {patch.piece} has {len(stops)} of {count} positions")
    low, values, escaped = (
        _numbers(words[start:stop], *one)
        for start, stop, one in zip(ends[:-1], ends[1:], widths, strict=True)
    )
    places = np.cumsum(((np.diff(stops, prepend=-1) - 1) << patch.low) + low + 1) - 1
    if places[-1] >= size:
        raise PatchError(f"a patch for piece {patch.piece} changes element {places[-1]} of {size}")
    escapes = values == (1 << patch.bits) - 1
    if escapes.sum() != patch.escaped:
        raise PatchError(f"a patch for piece {patch.piece} has a wrong number of escaped values")
    codes = (values + 1).astype(dtype)
    codes[escapes] = escaped
    return places, (codes >> 1) ^ (0 - (codes & 1)).astype(dtype)


def _numbers(words: np.ndarray, count: int, width: int) -> np.ndarray:
    """Numbers of ``width`` bits one behind the other, the lowest bit first, as int64."""
    if not width:
        return np.zeros(count, np.int64)
    if width in (8, 16, 32):
        return words.view(f"<u{width // 8}")[:count].astype(np.int64)
    start = np.arange(count, dtype=np.int64) * width
    pairs = np.append(words, np.uint32(0)).astype(np.uint64)
    pairs = pairs[:-1] | pairs[1:] << np.uint64(32)
    numbers = pairs[start >> 5] >> (start & 31).astype(np.uint64) & np.uint64((1 << width) - 1)
    return numbers.astype(np.int64)


def keys(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors of a piece's first ``count`` 32-bit words in its two checksums: odd, uint32[count] each."""
    if count > len(_keys[0]):
        number = np.arange(max(count, 1 << 16), dtype=np.uint32)
        _keys[:] = [_mixed(number), _mixed(~number)]
    return _keys[0][:count], _keys[1][:count]


_keys = [np.zeros(0, np.uint32)] * 2


def _mixed(x: np.ndarray) -> np.ndarray:
    x = x * np.uint32(0x9E3779B1)
    x = (x ^ x >> 15) * np.uint32(0x85EBCA77)
    return (x ^ x >> 13) | np.uint32(1)


def checksums(values: np.ndarray) -> tuple[int, int]:
    """The two checksums, modulo 2^32, of a piece's elements: a vector of unsigned integers."""
    padding = -values.size % (4 // values.itemsize)
    words = (np.append(values, np.zeros(padding, values.dtype)) if padding else values).view("<u4")
    one, other = (int(np.dot(words, key)) for key in keys(len(words)))
    return one, other


def changed_checksums(
    sums: tuple[int, int], places: np.ndarray, old: np.ndarray, new: np.ndarray
) -> tuple[int, int]:
    """The checksums after the elements at ``places`` changed from ``old`` to ``new``; all have one length."""
    each = 4 // new.itemsize
    shift = (places % each * (8 * new.itemsize)).astype(np.uint32)
    difference = (new.astype(np.uint32) - old.astype(np.uint32)) << shift
    words = places // each
    top = int(words[-1]) + 1 if len(words) else 0
    (one, other), (key, other_key) = sums, keys(top)
    added = (int(np.dot(difference, x[words])) for x in (key, other_key))
    return (one + next(added)) % 2**32, (other + next(added)) % 2**32
