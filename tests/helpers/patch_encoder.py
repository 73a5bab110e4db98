"""The encoder of patches in numpy, which specifies the bytes that a device encodes."""

import numpy as np

from zerojax.interop.engines.encoder import VALUE_BITS, low_bits, value_bits
from zerojax.interop.engines.receiver.patches import Patch, checksums, full


def encode(old: np.ndarray, new: np.ndarray, piece: int, before: int, version: int) -> Patch:
    """Encode a change.

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


def _zigzag(differences: np.ndarray) -> np.ndarray:
    """Differences of either sign as unsigned integers: 1, -1, 2, -2 become 2, 1, 4, 3."""
    signed = differences.view(differences.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _fields(numbers: np.ndarray, width: int) -> bytes:
    """Numbers of ``width`` bits one behind the other, the lowest bit first."""
    bits = numbers[:, None].astype(np.int64) >> np.arange(width) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()
