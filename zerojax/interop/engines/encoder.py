"""Compares a device's shard with the values it last sent, and encodes the change on the device.

docs/engines.md specifies the bytes. A shard is cut into pieces of one size. One program compares all its
pieces, and counts what the encoding of each piece needs. Another packs one piece into a buffer whose size is
a power of two, so few programs are compiled, and little more than the patch is copied to the host.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt, UInt32

from zerojax.interop.engines.receiver import FULL, Patch
from zerojax.sharding.memory import to_device

LARGEST = 1 << 23
"""Most elements of a piece: 16 MiB of bf16."""

VALUE_BITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Bits of a value among which the encoder chooses. A decoder reads any number up to an element's bits."""

_WORD = 32
_SMALLEST = 1 << 10


@dataclass(frozen=True)
class Cut:
    """How a layer's shard is cut into pieces.

    Attributes:
        pieces: of a layer.
        size: elements of a piece, a multiple of 1024. The last piece ends with zeros. Sizes are rounded up by
            at most an eighth, so that pieces of many parameters share compiled programs.
    """

    pieces: int
    size: int

    @staticmethod
    def of(shard: int, largest: int = LARGEST) -> "Cut":
        """The cut of a layer's shard of ``shard`` elements into pieces of at most ``largest``."""
        pieces = max(1, -(-shard // largest))
        size = max(1, -(-shard // pieces))
        unit = 1 << max(10, (size - 1).bit_length() - 4)
        return Cut(pieces, -(-size // unit) * unit)


class Compared(NamedTuple):
    """A shard's pieces, compared with what was sent before. The first axis counts pieces, layer by layer.

    Attributes:
        values: the elements as unsigned integers.
        words: a bit for each element, set if it has changed, 32 in a word.
        counts: the number of changed elements; then, for each of ``VALUE_BITS`` that is smaller than an
            element, the number of values that would be escaped.
        sums: the two checksums.
    """

    values: UInt[Array, "pieces size"]
    words: UInt32[Array, "pieces words"]
    counts: Int32[Array, "pieces widths"]
    sums: UInt32[Array, "pieces 2"]


def compare(
    shard: Float[Array, "..."],
    sent: UInt[Array, "pieces size"] | None,
    *,
    dtype: str,
    layers: int,
    cut: Cut,
) -> Compared:
    """Round a shard to the engine's dtype, and compare its bits with those last sent.

    Args:
        shard: fp32, all layers of one device's shard, one after another.
        sent: ``Compared.values`` of the last version; None before the first.
        dtype: the engine's.
        layers: of the shard.
        cut: of each layer.
    """
    values = _rounded(shard, dtype=dtype, layers=layers, cut=cut)
    return _compared(values, values if sent is None else sent)


@functools.partial(jax.jit, static_argnames=("dtype", "layers", "cut"))
def _rounded(shard: Float[Array, "..."], *, dtype: str, layers: int, cut: Cut) -> UInt[Array, "pieces size"]:
    """The bits of a shard's elements in the engine's dtype, cut into pieces."""
    values = to_device(shard).reshape(layers, -1).astype(dtype)
    values = lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
    values = jnp.pad(values, ((0, 0), (0, cut.pieces * cut.size - values.shape[1])))
    return values.reshape(layers * cut.pieces, cut.size)


# Apart from ``_rounded``, because many shards have pieces of the same size, and share this program.
@jax.jit
def _compared(values: UInt[Array, "pieces size"], sent: UInt[Array, "pieces size"]) -> Compared:
    changed = values != sent
    bits = jnp.arange(_WORD, dtype=jnp.uint32)
    words = (changed.reshape(len(values), -1, _WORD).astype(jnp.uint32) << bits).sum(-1, dtype=jnp.uint32)
    codes, item_bits = _zigzag(values - sent), jnp.iinfo(values.dtype).bits
    every = [changed, *(codes >> width > 0 for width in VALUE_BITS if width < item_bits)]
    counts = jnp.stack([one.sum(1, dtype=jnp.int32) for one in every], axis=1)
    return Compared(values, words, counts, _checksums(values))


@functools.partial(jax.jit, static_argnames=("most", "room"))
def _pack(
    values: UInt[Array, " size"],
    sent: UInt[Array, " size"],
    words: UInt32[Array, " words"],
    count: Int32[Array, ""],
    low: Int32[Array, ""],
    bits: Int32[Array, ""],
    *,
    most: int,
    room: int,
) -> UInt32[Array, " room"]:
    """The sections of a patch with up to ``most`` changed elements, in ``room`` words that end with zeros."""
    item_bits = jnp.iinfo(values.dtype).bits
    index = jnp.arange(most, dtype=jnp.int32)
    there = index < count
    places = _set_bits(words, index)
    codes = _zigzag(values[places] - sent[places]).astype(jnp.uint32)
    gaps = jnp.diff(places, prepend=-1) - 1
    escapes = there & (_shifted(codes, bits) > 0)
    largest = _shifted(jnp.uint32(0xFFFFFFFF), 32 - bits)
    buffer, start = jnp.zeros(room, jnp.uint32), jnp.int32(0)
    for numbers, width, kept, rank, total in (
        (gaps & ((1 << low) - 1), low, there, index, count),
        (jnp.where(escapes, largest, codes - 1), bits, there, index, count),
        (codes, item_bits, escapes, jnp.cumsum(escapes) - 1, escapes.sum()),
    ):
        buffer = _placed(buffer, start, numbers.astype(jnp.uint32), width, kept, rank)
        start += _words(total, width)
    stops = jnp.cumsum(jnp.where(there, (gaps >> low) + 1, 0)) - 1
    return _placed(buffer, start, jnp.ones(most, jnp.uint32), 1, there, stops)


def pack(now: Compared, sent: UInt[Array, "pieces size"], counts: np.ndarray, piece: int) -> Array | None:
    """Dispatch the packing of one piece; None if nothing has changed, or if a full patch is smaller.

    Args:
        now: the comparison.
        sent: the values that it was compared with.
        counts: ``Compared.counts`` on the host.
        piece: the piece's number in the shard.
    """
    count, escaped, low, bits = _header(counts[piece], now.values)
    size, item_bits = now.values.shape[1], 8 * now.values.dtype.itemsize
    # Each quotient of a gap has at least one bit.
    least = (count * (low + bits + 1) + escaped * item_bits) / item_bits
    if not count or least >= size:
        return None
    most = max(_SMALLEST, 1 << math.ceil(math.log2(count)))
    # Bits of all sections, with the longest possible unary codes, in halves of a word for each element.
    bound = count * (low + bits + 1) + (size >> low) + escaped * item_bits + 4 * _WORD
    room = most * -(-bound // (most * _WORD // 2)) // 2
    numbers = (np.int32(x) for x in (count, low, bits))
    return _pack(now.values[piece], sent[piece], now.words[piece], *numbers, most=most, room=room)


def patch_of(
    now: Compared,
    packed: Array | None,
    counts: np.ndarray,
    sums: np.ndarray,
    piece: int,
    number: int,
    versions: tuple[int, int],
) -> Patch | None:
    """The patch of one piece, on the host; None if a full patch is smaller.

    Args:
        now: the comparison.
        packed: from ``pack``.
        counts: ``Compared.counts`` on the host.
        sums: ``Compared.sums`` on the host.
        piece: the piece's number in the shard.
        number: the piece's number in the manifest.
        versions: the version that was compared with, and the version of the values.
    """
    one, other = (int(x) for x in sums[piece])
    if not counts[piece, 0]:
        return Patch(number, *versions, (one, other))
    if packed is None:
        return None
    buffer = np.asarray(packed)
    # The last section ends with a set bit.
    body = buffer[: np.flatnonzero(buffer)[-1] + 1].tobytes()
    if len(body) >= now.values.shape[1] * now.values.dtype.itemsize:
        return None
    count, escaped, low, bits = _header(counts[piece], now.values)
    return Patch(number, *versions, (one, other), count, escaped, low, bits, body)


def full_patch(now: Compared, sums: np.ndarray, piece: int, number: int, version: int) -> Patch:
    """The full patch of one piece; arguments as for ``patch_of``."""
    one, other = (int(x) for x in sums[piece])
    return Patch(number, FULL, version, (one, other), body=np.asarray(now.values[piece]).tobytes())


def low_bits(size: int, count: int) -> int:
    """The low bits of a gap between ``count`` changes among ``size`` elements: log2 of the mean gap."""
    return max(0, (size // max(count, 1)).bit_length() - 1)


def value_bits(escaped: dict[int, int], count: int, item_bits: int) -> int:
    """The bits of a value that make a patch smallest.

    Args:
        escaped: for each number of bits the values that would be escaped.
        count: changed elements.
        item_bits: bits of an element.
    """
    return min(escaped, key=lambda bits: count * bits + escaped[bits] * item_bits)


def _header(counts: np.ndarray, values: Array) -> tuple[int, int, int, int]:
    """The numbers in a patch's header: changed and escaped elements, low bits, bits of a value."""
    item_bits, count = 8 * values.dtype.itemsize, int(counts[0])
    widths = [width for width in VALUE_BITS if width < item_bits]
    escaped = dict(zip(widths, map(int, counts[1:]), strict=True)) | {item_bits: 0}
    bits = value_bits(escaped, count, item_bits)
    return count, escaped[bits], low_bits(values.shape[1], count), bits


def _zigzag(differences: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """Differences of either sign as unsigned integers: 1, -1, 2, -2 become 2, 1, 4, 3."""
    item_bits = jnp.iinfo(differences.dtype).bits
    signed = lax.bitcast_convert_type(differences, jnp.dtype(f"int{item_bits}"))
    return lax.bitcast_convert_type((signed << 1) ^ (signed >> (item_bits - 1)), differences.dtype)


def _checksums(values: UInt[Array, "pieces size"]) -> UInt32[Array, "pieces 2"]:
    """As ``receiver.checksums``, of each piece."""
    each = 4 // values.dtype.itemsize
    words = (
        lax.bitcast_convert_type(values.reshape(len(values), -1, each), jnp.uint32) if each > 1 else values
    )
    number = jnp.arange(words.shape[1], dtype=jnp.uint32)
    return jnp.stack([(words * _mixed(x)).sum(1, dtype=jnp.uint32) for x in (number, ~number)], axis=1)


def _mixed(x: UInt32[Array, " n"]) -> UInt32[Array, " n"]:
    x = x * jnp.uint32(0x9E3779B1)
    x = (x ^ x >> 15) * jnp.uint32(0x85EBCA77)
    return (x ^ x >> 13) | jnp.uint32(1)


def _set_bits(words: UInt32[Array, " words"], index: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The positions of the ``index``-th set bits of a bitmap."""
    counts = lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts)
    word = jnp.searchsorted(ends, index, side="right", method="scan_unrolled")
    word = jnp.minimum(word, len(words) - 1).astype(jnp.int32)
    rank, left, place = index - (ends - counts)[word], words[word], word * _WORD
    for half in (16, 8, 4, 2, 1):
        lower = left & ((1 << half) - 1)
        below = lax.population_count(lower).astype(jnp.int32)
        beyond = rank >= below
        rank = jnp.where(beyond, rank - below, rank)
        left = jnp.where(beyond, left >> half, lower)
        place += jnp.where(beyond, half, 0)
    return place


def _words(count: Int32[Array, ""], width: Int32[Array, ""] | int) -> Int32[Array, ""]:
    return -(-count * width // _WORD)


def _shifted(x: UInt32[Array, "..."], by: Int32[Array, ""] | int) -> UInt32[Array, "..."]:
    """``x >> by``, also by 32 bits, which the hardware leaves undefined."""
    return jnp.where(by >= _WORD, 0, x >> jnp.minimum(by, _WORD - 1).astype(jnp.uint32))


def _placed(
    buffer: UInt32[Array, " buffer"],
    start: Int32[Array, ""],
    numbers: UInt32[Array, " n"],
    width: Int32[Array, ""] | int,
    kept: Array,
    rank: Int32[Array, " n"],
) -> UInt32[Array, " buffer"]:
    """Write the kept numbers of ``width`` bits one behind the other, from the word ``start`` on."""
    bit = rank.astype(jnp.uint32) * jnp.uint32(width)
    word = jnp.where(kept, start + (bit >> 5).astype(jnp.int32), len(buffer))
    shift = bit & 31
    buffer = buffer.at[word].add(numbers << shift, mode="drop")
    return buffer.at[word + 1].add(_shifted(numbers, 32 - shift), mode="drop")
