"""Compares a device's shard with the values it last sent, and encodes the change on the device.

docs/engines.md specifies the bytes. A shard is cut into pieces of one size. One program compares all its
pieces, and counts what the encoding of each piece needs. Another packs several pieces into buffers whose
size is one of a few, so few programs are compiled, and little more than the patches is copied to the host.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt, UInt32

from zerojax.interop.engines.receiver.patches import FULL, Patch
from zerojax.sharding.memory import to_device

LARGEST = 1 << 23
"""Most elements of a piece: 16 MiB of bf16."""

VALUE_BITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Bits of a value among which the encoder chooses. A decoder reads any number up to an element's bits."""

_WORD = 32
_SMALLEST = 1 << 10
_GROUP = 16
"""Most pieces that one program packs."""


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
        size = max(1, -(-shard // max(1, -(-shard // largest))))
        unit = 1 << max(10, (size - 1).bit_length() - 4)
        size = -(-size // unit) * unit
        return Cut(max(1, -(-shard // size)), size)  # larger pieces may be fewer


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


def compare(values: UInt[Array, "pieces size"], sent: UInt[Array, "pieces size"] | None) -> Compared:
    """Compare a shard's elements with those last sent.

    Args:
        values: the bits of the elements in the engine's dtype.
        sent: ``Compared.values`` of the last version; None before the first.
    """
    return Compared(values, *_compared(values, values if sent is None else sent))


@functools.partial(jax.jit, static_argnames=("dtype", "layers", "cut"))
def rounded(shard: Float[Array, "..."], *, dtype: str, layers: int, cut: Cut) -> UInt[Array, "pieces size"]:
    """The bits of a shard's elements in the engine's dtype, cut into pieces.

    Args:
        shard: fp32, all layers of one device's shard, one after another.
        dtype: of the engine's weights.
        layers: of the shard.
        cut: of each layer.
    """
    values = to_device(shard).reshape(layers, -1).astype(dtype)
    values = lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
    return in_pieces(values, cut)


def in_pieces(values: UInt[Array, "layers n"], cut: Cut) -> UInt[Array, "pieces size"]:
    """Cut each layer of a shard into pieces. A last piece ends with zeros."""
    values = jnp.pad(values, ((0, 0), (0, cut.pieces * cut.size - values.shape[1])))
    return values.reshape(-1, cut.size)


# Apart from ``rounded``, because many shards have pieces of the same size, and share this program.
@jax.jit
def _compared(
    values: UInt[Array, "pieces size"], sent: UInt[Array, "pieces size"]
) -> tuple[UInt32[Array, "pieces words"], Int32[Array, "pieces widths"], UInt32[Array, "pieces 2"]]:
    """Bitmap, counts and checksums, as in ``Compared``."""
    bits = jnp.arange(_WORD, dtype=jnp.uint32)
    changed = (values != sent).reshape(len(values), -1, _WORD)
    words = (changed.astype(jnp.uint32) << bits).sum(-1, dtype=jnp.uint32)
    codes, item_bits = _zigzag(values - sent), jnp.iinfo(values.dtype).bits
    every = [lax.population_count(words), *(codes >> width > 0 for width in VALUE_BITS if width < item_bits)]
    counts = jnp.stack([one.sum(1, dtype=jnp.int32) for one in every], axis=1)
    return words, counts, _checksums(values)


@jax.jit
def _taken(
    values: UInt[Array, "pieces size"],
    sent: UInt[Array, "pieces size"],
    words: UInt32[Array, "pieces words"],
    rows: Int32[Array, " n"],
) -> tuple[Array, Array, Array]:
    return values[rows], sent[rows], words[rows]


@functools.partial(jax.jit, static_argnames=("most", "room"))
def _pack(
    values: UInt[Array, "n size"],
    sent: UInt[Array, "n size"],
    words: UInt32[Array, "n words"],
    count: Int32[Array, " n"],
    low: Int32[Array, " n"],
    bits: Int32[Array, " n"],
    *,
    most: int,
    room: int,
) -> tuple[UInt32[Array, "n room"], Int32[Array, " n"]]:
    """The sections of patches with up to ``most`` changed elements, in ``room`` words; the words in use.

    All gathers and scatters index flat arrays, since XLA compiles batched ones ten times as long.
    """
    pieces, size = values.shape
    item_bits = jnp.iinfo(values.dtype).bits
    count, low, bits = count[:, None], low[:, None], bits[:, None]
    piece, index = jnp.arange(pieces)[:, None], jnp.arange(most, dtype=jnp.int32)
    there = index < count
    places = _set_bits(words.reshape(-1), index + jnp.cumsum(count, 0) - count)
    codes = _zigzag(values.reshape(-1)[places] - sent.reshape(-1)[places]).astype(jnp.uint32)
    gaps = jnp.diff(places - piece * size, prepend=-1) - 1
    escapes = there & (_shifted(codes, bits) > 0)
    ranks = jnp.cumsum(escapes, 1)
    largest = _shifted(jnp.uint32(0xFFFFFFFF), 32 - bits)
    buffer, start = jnp.zeros(pieces * room, jnp.uint32), piece * room
    for numbers, width, kept, rank, total in (
        (gaps & ((1 << low) - 1), low, there, index, count),
        (jnp.where(escapes, largest, codes - 1), bits, there, index, count),
        (codes, item_bits, escapes, ranks - 1, ranks[:, -1:]),
    ):
        buffer = _placed(buffer, start, numbers.astype(jnp.uint32), width, kept, rank)
        start += _words(total, width)
    stops = jnp.cumsum(jnp.where(there, (gaps >> low) + 1, 0), 1) - 1
    buffer = _placed(buffer, start, jnp.ones_like(codes), 1, there, stops)
    used = start + _words(stops[:, -1:] + 1, 1) - piece * room
    return buffer.reshape(pieces, room), used[:, 0]


def start_packing(
    now: Compared, sent: UInt[Array, "pieces size"], counts: np.ndarray
) -> Iterator[tuple[list[int], Array, Array]]:
    """Dispatch the packing of a shard's pieces that have changed, unless a full patch is smaller.

    Args:
        now: the comparison.
        sent: the values that it was compared with.
        counts: ``Compared.counts`` on the host.

    Yields:
        Numbers of pieces in the shard, their bodies, and the words of each.
    """
    size, item_bits = now.values.shape[1], 8 * now.values.dtype.itemsize
    rows = [row for row in range(len(counts)) if 0 < _least_bits(counts[row], now.values) < size * item_bits]
    for start in range(0, len(rows), _GROUP):
        group = rows[start : start + _GROUP]
        padding = min(_GROUP, 1 << (len(counts) - 1).bit_length()) - len(group)
        index = np.array(group + group[-1:] * padding, np.int32)
        headers = np.array([_header(counts[row], now.values) for row in index], np.int32)
        most = max(_SMALLEST, 1 << (int(headers[:, 0].max()) - 1).bit_length())
        # Bits of all sections, with the longest possible unary codes, in quarters of a word for each element.
        bound = max(_least_bits(counts[row], now.values) for row in group) + 4 * _WORD
        bound += size >> int(headers[:, 2].min())
        room = most * -(-bound // (most * _WORD // 4)) // 4
        taken = _taken(now.values, sent, now.words, index)
        bodies, words = _pack(*taken, *headers[:, [0, 2, 3]].T, most=most, room=room)
        bodies.copy_to_host_async()
        yield group, bodies, words


def finished_patches(
    now: Compared,
    packed: Iterable[tuple[list[int], Array, Array]],
    counts: np.ndarray,
    sums: np.ndarray,
    numbers: range,
    versions: tuple[int, int],
) -> list[Patch]:
    """The patches of a shard's pieces on the host, without pieces whose full patch is smaller.

    Args:
        now: the comparison.
        packed: from ``start_packing``.
        counts: ``Compared.counts`` on the host.
        sums: ``Compared.sums`` on the host.
        numbers: the pieces' numbers in the manifest.
        versions: the version that was compared with, and the version of the values.
    """
    full = now.values.shape[1] * now.values.dtype.itemsize
    every = [
        Patch(numbers[row], *versions, _pair(sums[row])) for row in np.flatnonzero(counts[:, 0] == 0).tolist()
    ]
    for rows, bodies, words in packed:
        for row, body, length in zip(rows, np.asarray(bodies), np.asarray(words), strict=False):  # padding
            if 4 * length < full:
                header = _header(counts[row], now.values)
                every.append(
                    Patch(numbers[row], *versions, _pair(sums[row]), *header, body[:length].tobytes())
                )
    return every


def full_patch(now: Compared, sums: np.ndarray, piece: int, number: int, version: int) -> Patch:
    """The full patch of one piece.

    Args:
        now: the comparison.
        sums: ``Compared.sums`` on the host.
        piece: the piece's number in the shard.
        number: the piece's number in the manifest.
        version: the version of the values.
    """
    return Patch(
        number, FULL, version, _pair(sums[piece]), body=memoryview(np.asarray(now.values[piece])).cast("B")
    )


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


def _pair(sums: np.ndarray) -> tuple[int, int]:
    return int(sums[0]), int(sums[1])


def _least_bits(counts: np.ndarray, values: Array) -> int:
    """The bits of a patch if each gap's unary code has one bit."""
    count, escaped, low, bits = _header(counts, values)
    return count * (low + bits + 1) + escaped * 8 * values.dtype.itemsize


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


def _set_bits(words: UInt32[Array, " words"], index: Int32[Array, "..."]) -> Int32[Array, "..."]:
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


def _words(count: Int32[Array, "..."], width: Int32[Array, "..."] | int) -> Int32[Array, "..."]:
    return -(-count * width // _WORD)


def _shifted(x: UInt32[Array, "..."], by: Array | int) -> UInt32[Array, "..."]:
    """``x >> by``, also by 32 bits, which the hardware leaves undefined."""
    return jnp.where(by >= _WORD, 0, x >> jnp.minimum(by, _WORD - 1).astype(jnp.uint32))


def _placed(
    buffer: UInt32[Array, " buffer"],
    start: Int32[Array, "pieces 1"],
    numbers: UInt32[Array, "pieces n"],
    width: Int32[Array, "pieces 1"] | int,
    kept: Array,
    rank: Int32[Array, "..."],
) -> UInt32[Array, " buffer"]:
    """Write each piece's kept numbers of ``width`` bits one behind the other, from its word ``start`` on."""
    bit = rank.astype(jnp.uint32) * jnp.uint32(width)
    word = jnp.where(kept, start + (bit >> 5).astype(jnp.int32), len(buffer))
    shift = bit & 31
    buffer = buffer.at[word].add(numbers << shift, mode="drop")
    return buffer.at[word + 1].add(_shifted(numbers, 32 - shift), mode="drop")
