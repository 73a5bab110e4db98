"""Receives a training job's weights beside an inference engine. Needs Python 3.10 and NumPy, nothing else.

The weights arrive as patches of pieces, which docs/engines.md specifies. This file may be copied, so that it
can run in the engine's environment, without zerojax and JAX.
"""

import struct
from dataclasses import dataclass, field

import numpy as np

# Header of a patch: piece, version before, version, two checksums, changed elements, escaped elements, low
# bits of a gap, bits of a value.
_HEADER = struct.Struct("<IqqIIIIBBxx")

FULL = -1
"""The version before a patch that has all elements of a piece."""

VALUE_BITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Bits of a value among which an encoder chooses. A decoder reads any number up to an element's bits."""

_UNSIGNED = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


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
    body: bytes = field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """Header and body."""
        numbers = self.count, self.escaped, self.low, self.bits
        return _HEADER.pack(self.piece, self.before, self.version, *self.sums, *numbers) + self.body

    @staticmethod
    def of(data: bytes) -> "Patch":
        """Undo ``to_bytes``.

        Raises:
            PatchError: the header is not whole.
        """
        if len(data) < _HEADER.size:
            raise PatchError(f"a patch of {len(data)} bytes has no header: it was cut off")
        piece, before, version, one, other, *numbers = _HEADER.unpack_from(data)
        return Patch(piece, before, version, (one, other), *numbers, bytes(data[_HEADER.size :]))


def low_bits(size: int, count: int) -> int:
    """The low bits of a gap for ``count`` changes among ``size`` elements: the mean gap's logarithm."""
    return max(0, (size // max(count, 1)).bit_length() - 1)


def value_bits(escaped: "dict[int, int]", count: int, item_bits: int) -> int:
    """The bits of a value that make a patch smallest.

    Args:
        escaped: for each number of bits the values that would be escaped.
        count: changed elements.
        item_bits: bits of an element.
    """
    return min(escaped, key=lambda bits: count * bits + escaped[bits] * item_bits)


def encode(old: np.ndarray, new: np.ndarray, piece: int, before: int, version: int) -> Patch:
    """Encode a change. The specification of the encoder that runs on devices, which returns the same bytes.

    Args:
        old: the elements before, as unsigned integers with the elements' bits.
        new: the elements afterwards.
        piece: the piece's number.
        before: the version of ``old``.
        version: the version of ``new``.
    """
    item_bits, sums = 8 * old.itemsize, checksums(new)
    places = np.flatnonzero(old != new)
    if not len(places):
        return Patch(piece, before, version, sums)
    codes = _zigzag(new[places] - old[places])
    every = {bits: int((codes >> bits > 0).sum()) for bits in VALUE_BITS if bits < item_bits}
    bits = value_bits(every | {item_bits: 0}, len(places), item_bits)
    low = low_bits(old.size, len(places))
    gaps = np.diff(places, prepend=-1) - 1
    escapes = codes >> bits > 0
    stops = np.cumsum((gaps >> low) + 1) - 1
    unary = np.zeros(stops[-1] + 1, np.uint8)
    unary[stops] = 1
    values = np.where(escapes, (1 << bits) - 1, codes.astype(np.int64) - 1)
    sections = (
        _fields(gaps & ((1 << low) - 1), low),
        _fields(values, bits),
        _fields(codes[escapes], item_bits),
        np.packbits(unary, bitorder="little").tobytes(),
    )
    body = b"".join(section + bytes(-len(section) % 4) for section in sections)
    escaped = int(escapes.sum())
    patch = Patch(piece, before, version, sums, len(places), escaped, low, bits, body)
    return patch if len(body) < new.nbytes else full(new, piece, version)


def full(new: np.ndarray, piece: int, version: int) -> Patch:
    """The patch with all elements of a piece, as unsigned integers."""
    return Patch(piece, FULL, version, checksums(new), body=new.tobytes())


def decode(patch: Patch, size: int, itemsize: int) -> "tuple[np.ndarray, np.ndarray]":
    """The positions of a patch that is not full, ascending, and what is added to the elements there.

    Args:
        patch: the patch.
        size: elements of the piece.
        itemsize: bytes of an element.

    Returns:
        int64 positions, and differences as unsigned integers, which are added modulo the elements' range.

    Raises:
        PatchError: the body is cut off, or a position is outside the piece.
    """
    dtype, count = _UNSIGNED[itemsize], patch.count
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


def _zigzag(differences: np.ndarray) -> np.ndarray:
    """Differences of either sign as unsigned integers: 1, -1, 2, -2 become 2, 1, 4, 3."""
    signed = differences.view(differences.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _fields(numbers: np.ndarray, width: int) -> bytes:
    """Numbers of ``width`` bits one behind the other, the lowest bit first."""
    bits = numbers[:, None].astype(np.int64) >> np.arange(width) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def _numbers(words: np.ndarray, count: int, width: int) -> np.ndarray:
    """Undo ``_fields``: int64 numbers."""
    if not width:
        return np.zeros(count, np.int64)
    if width in (8, 16, 32):
        return words.view(f"<u{width // 8}")[:count].astype(np.int64)
    start = np.arange(count, dtype=np.int64) * width
    pairs = np.append(words, np.uint32(0)).astype(np.uint64)
    pairs = pairs[:-1] | pairs[1:] << np.uint64(32)
    numbers = pairs[start >> 5] >> (start & 31).astype(np.uint64) & np.uint64((1 << width) - 1)
    return numbers.astype(np.int64)


def keys(count: int) -> "tuple[np.ndarray, np.ndarray]":
    """The odd factors of a piece's first ``count`` 32-bit words in its two checksums."""
    if count > len(_keys[0]):
        number = np.arange(max(count, 1 << 16), dtype=np.uint32)
        _keys[:] = [_mixed(number), _mixed(~number)]
    return _keys[0][:count], _keys[1][:count]


_keys = [np.zeros(0, np.uint32)] * 2


def _mixed(x: np.ndarray) -> np.ndarray:
    x = x * np.uint32(0x9E3779B1)
    x = (x ^ x >> 15) * np.uint32(0x85EBCA77)
    return (x ^ x >> 13) | np.uint32(1)


def checksums(values: np.ndarray) -> "tuple[int, int]":
    """The two checksums of all elements of a piece, as unsigned integers."""
    data = values.tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4")
    one, other = (int(np.dot(words, key)) for key in keys(len(words)))
    return one, other


def changed_checksums(
    sums: "tuple[int, int]", places: np.ndarray, old: np.ndarray, new: np.ndarray
) -> "tuple[int, int]":
    """The checksums after the elements at ``places`` have changed from ``old`` to ``new``."""
    each = 4 // new.itemsize
    shift = (places % each * (8 * new.itemsize)).astype(np.uint32)
    difference = (new.astype(np.uint32) - old.astype(np.uint32)) << shift
    words = places // each
    top = int(words[-1]) + 1 if len(words) else 0
    (one, other), (key, other_key) = sums, keys(top)
    added = (int(np.dot(difference, x[words])) for x in (key, other_key))
    return (one + next(added)) % 2**32, (other + next(added)) % 2**32
