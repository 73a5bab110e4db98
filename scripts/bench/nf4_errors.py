#!/usr/bin/env python3
"""The error that nf4's 8-bit scales add, beside the error of QLoRA's double quantization.

    scripts/bench/nf4_errors.py

Prints a table: the error of 2.1 million weights in blocks of 64, relative to their root mean square, with
scales in fp32; and by how much of itself it grows with pallas_kernels' scales and with QLoRA's
(arXiv:2305.14314 as bitsandbytes does it: the mean subtracted, the rest in an 8-bit float with an exponent of
decimal places, the codes chosen by the scales in fp32). In brackets the same where each block's error is
relative to that block.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels.nf4_reference import LEVELS, MIDPOINTS

BLOCK, GROUP, GROUPS = 64, 256, 128


def weights() -> dict[str, np.ndarray]:
    """float32[blocks, BLOCK] by a description of their distribution."""
    rng = np.random.default_rng(0)
    shape = (GROUPS * GROUP, BLOCK)
    normal, some = rng.normal(size=shape), rng.random((shape[0], 1)) < 0.01
    one = np.arange(BLOCK) == rng.integers(BLOCK, size=(shape[0], 1))
    kinds = {
        "normal": normal,
        "Student's t, 3 degrees of freedom": rng.standard_t(3, size=shape),
        "normal, 1% of the blocks 20 times as large": np.where(some, 20 * normal, normal),
        "normal, one weight of 1% of the blocks 50 times as large": np.where(some & one, 50 * normal, normal),
        "normal, blocks of log-normal sizes": normal * np.exp(rng.normal(size=(shape[0], 1))),
        "normal, 1% of the blocks 1000 times as large": np.where(some, 1000 * normal, normal),
    }
    return {kind: x.astype(np.float32) for kind, x in kinds.items()}


def decimal_levels() -> np.ndarray:
    """The values of bitsandbytes' signed dynamic map of 8 bits."""
    levels = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1)
        middles = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        levels += [*middles, *-middles]
    return np.sort(levels)


def nearest(levels: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The level nearest to each x."""
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]


def qlora_scales(peaks: np.ndarray) -> np.ndarray:
    """[blocks, 1] after double quantization."""
    mean = peaks.mean()
    rest = (peaks - mean).reshape(GROUPS, GROUP)
    largest = np.abs(rest).max(axis=1, keepdims=True)
    return (nearest(decimal_levels(), rest / largest) * largest).reshape(-1, 1) + mean


def errors(decoded: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The relative error of all weights, and the root mean square of the blocks' relative errors."""
    square, size = np.square(decoded - x).mean(axis=1), np.square(x).mean(axis=1)
    return np.sqrt([square.mean() / size.mean(), (square / size).mean()])


def main() -> None:
    """Print the table."""
    harness.table("weights", "error, scales in fp32", "ours", "QLoRA's")
    for kind, x in weights().items():
        peaks = np.abs(x).max(axis=1, keepdims=True)
        values = LEVELS[np.searchsorted(MIDPOINTS, x / peaks)]
        exact = errors(values * peaks, x)
        qlora = errors(values * qlora_scales(peaks), x) / exact - 1
        payload = pk.encode_nf4(jnp.asarray(x.reshape(1, -1)), block=BLOCK)
        decoded = pk.decode_nf4(payload, x.size, block=BLOCK, dtype=jnp.float32)
        ours = errors(np.asarray(decoded).reshape(x.shape), x) / exact - 1
        cells = [f"{100 * a:+.2f}% ({100 * b:+.2f}%)" for a, b in (ours, qlora)]
        harness.row(kind, f"{100 * exact[0]:.2f}% ({100 * exact[1]:.2f}%)", *cells)


if __name__ == "__main__":
    main()
