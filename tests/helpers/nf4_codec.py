"""An independent nf4 codec in plain numpy, for tests to compare with.

Written from the specification in `pallas_kernels.nf4_reference` by other means: row by row and block by
block, by searches in tables.
"""

from itertools import pairwise

import numpy as np

F32 = np.float32
# The paper's appendix E: those below zero, with their signs turned, and those above.
BELOW = """0.09105003625154495 0.18477343022823334 0.28444138169288635 0.39491748809814453 0.5250730514526367
0.6961928009986877 1.0"""
ABOVE = """0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 0.44070982933044434
0.5626170039176941 0.7229568362236023 1.0"""
LEVELS = np.array(sorted([*(-float(x) for x in BELOW.split()), 0.0, *map(float, ABOVE.split())]), F32)
MIDDLES = np.array([(float(a) + float(b)) / 2 for a, b in pairwise(LEVELS)], F32)
BOUNDS = np.array([k**3 + (k - 1) ** 3 for k in range(2, 255)], F32)


def row_bytes(n, block):
    """Payload bytes of a row of n elements."""
    blocks = n // block
    return n // 2 + (blocks + 3) // 4 * 4 + (blocks + 255) // 256 * 4


def _broken(part):
    return not np.isfinite(part).all() or np.abs(part).max() > 2.0**120


def _encode_group(blocks):
    """Codes of the elements, codes of the scales, and the unit of up to 256 blocks."""
    peaks = [0.0 if _broken(part) else float(np.abs(part).max()) for part in blocks]
    unit = F32(max([*peaks, 2.0**-80])) * F32(1 / 254**3)
    codes, scales = [], []
    for part, peak in zip(blocks, peaks, strict=True):
        if _broken(part):
            scales.append(255)
            codes.append(np.full(len(part), 7))
            continue
        scales.append(1 + np.searchsorted(BOUNDS * (unit / F32(2)), F32(peak), side="left"))
        codes.append(np.searchsorted(MIDDLES * (F32(scales[-1] ** 3) * unit), part, side="left"))
    return np.concatenate(codes), scales, unit


def encode_row(x, block):
    """uint8 payload of one row."""
    blocks = np.asarray(x).astype(F32).reshape(-1, block)
    groups = [_encode_group(blocks[i : i + 256]) for i in range(0, len(blocks), 256)]
    codes = np.concatenate([codes for codes, _, _ in groups]).astype(np.uint8)
    scales = np.array([scale for _, scales, _ in groups for scale in scales], np.uint8)
    padding = np.zeros(-len(scales) % 4, np.uint8)
    units = np.array([unit for _, _, unit in groups], F32).view(np.uint8)
    return np.concatenate([codes[::2] + 16 * codes[1::2], scales, padding, units])


def decode_row(payload, n, block):
    """float32[n] of one payload row."""
    payload, blocks = np.ascontiguousarray(payload), n // block
    units = payload[-4 * ((blocks + 255) // 256) :].view(F32)
    values = []
    for i in range(blocks):
        code = int(payload[n // 2 + i])
        scale = F32(np.nan) if code == 255 else F32(code**3) * units[i // 256]
        packed = payload[i * block // 2 : (i + 1) * block // 2]
        nibbles = np.array([half for byte in packed for half in (byte % 16, byte // 16)])
        values.append(LEVELS[nibbles] * scale)
    return np.concatenate(values)


def encode(x, block):
    """uint8[rows, bytes] of x[rows, n]."""
    return np.stack([encode_row(row, block) for row in np.asarray(x)])


def decode(payload, n, block):
    """float32[rows, n]."""
    return np.stack([decode_row(row, n, block) for row in np.asarray(payload)])
