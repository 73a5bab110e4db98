"""The wire formats and the storage format: bit widths, largest codes, bytes of a row, and their checks."""

from typing import Any, Final, Literal, get_args

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray[Any, Any]
"""An array on a device, or NumPy's on the host."""
Format = Literal["fp32", "bf16", "fp8", "int8", "fp6", "int4", "int2"]

FORMATS: Final[tuple[str, ...]] = get_args(Format)
"""Every wire format, widest first."""

RAW: Final = ("fp32", "bf16")
"""The formats that are plain casts, without scales."""

QUANTIZED: Final = tuple(fmt for fmt in FORMATS if fmt not in RAW)
"""The formats that carry one scale per block."""

STORED: Final = ("nf4",)
"""The formats that only store frozen weights (``encode_nf4``). They have neither sums nor differences."""

BITS: Final = {"fp32": 32, "bf16": 16, "fp8": 8, "int8": 8, "fp6": 6, "int4": 4, "int2": 2}
"""Bits of one element's code, without the block scale."""

QMAX: Final = {"fp8": 448.0, "int8": 127.0, "fp6": 28.0, "int4": 7.0, "int2": 1.0}
"""The largest magnitude of a code. The maximum of a block is scaled to it."""

MINIFLOAT: Final = {"fp8": (3, 7), "fp6": (2, 3)}
"""(mantissa bits, exponent bias) of the two small floating-point formats: e4m3 and e3m2."""

PLANES: Final = {fmt: (BITS[fmt],) for fmt in QUANTIZED} | {"fp6": (4, 2)}
"""Bits of a code in each plane of a row, lowest first. A plane has these bits of every code in the row."""

MIN_BLOCK, MAX_BLOCK = 64, 2048
ROTATION: Final = 32
"""Width of the Hadamard rotation. The only other choice is 0 (none)."""

ROUNDINGS: Final = ("nearest", "stochastic")

SCALE_BYTES: Final = 2
NF4_GROUP: Final = 256
"""Blocks of nf4 whose 8-bit scales share one fp32 unit."""


def check_block(fmt: str, n: int, block: int | None) -> None:
    """Raise ValueError unless rows of ``n`` elements can be sent in ``fmt`` with this block size."""
    if fmt in STORED:
        raise ValueError(
            f"{fmt} only stores frozen weights, and cannot be sent: use encode_{fmt} and decode_{fmt}"
        )
    if fmt not in FORMATS:
        raise ValueError(f"unknown wire format {fmt!r}: choose one of {', '.join(FORMATS)}")
    _check_row(fmt, n, block)


def is_block_size(size: int) -> bool:
    """Whether so many elements can share a scale."""
    return MIN_BLOCK <= size <= MAX_BLOCK and size & (size - 1) == 0


def _check_row(fmt: str, n: int, block: int | None) -> None:
    if n < 1:
        raise ValueError(f"a payload row has {n} elements: give it at least one")
    if fmt in RAW:
        return
    if block is None or not is_block_size(block):
        raise ValueError(
            f"block size {block} for {fmt}: it must be a power of two, {MIN_BLOCK} to {MAX_BLOCK}"
        )
    if n % block:
        raise ValueError(f"a row of {n} elements does not divide into {fmt} blocks of {block}: pad the row")


def nbytes(fmt: str, n: int, block: int | None = None) -> int:
    """Payload bytes of a row of ``n`` elements, including scales.

    Args:
        fmt: one of ``FORMATS``.
        n: elements in the row; a multiple of ``block`` for the quantized formats.
        block: elements that share a scale, a power of two from 64 to 2048; ignored for fp32 and bf16.

    Raises:
        ValueError: the format is unknown, the block size is invalid, or the row does not divide into blocks.
    """
    check_block(fmt, n, block)
    scales = SCALE_BYTES * (n // block) if fmt in QUANTIZED and block is not None else 0
    return n * BITS[fmt] // 8 + scales


def nf4_sections(n: int, block: int) -> tuple[int, int, int]:
    """Bytes of an nf4 row of ``n`` elements before its scales, before its units, and in all."""
    blocks = n // block
    scales = n // 2
    units = scales + -(-blocks // 4) * 4
    return scales, units, units + 4 * -(-blocks // NF4_GROUP)


def nf4_bytes(n: int, block: int = 64) -> int:
    """Payload bytes of an nf4 row of ``n`` elements: 4.127 bits an element in long rows of blocks of 64.

    They are half a byte for each element, one byte for each block (padded to a multiple of four), and four
    bytes for each 256 blocks or part of them.

    Args:
        n: elements in the row, a multiple of ``block``.
        block: elements that share a scale, a power of two from 64 to 2048.

    Raises:
        ValueError: the block size is invalid, or the row does not divide into blocks.
    """
    _check_row("nf4", n, block)
    return nf4_sections(n, block)[2]
