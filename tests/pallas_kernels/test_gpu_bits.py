"""The kernels on a GPU against the reference on the CPU, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import CASES, case, has_gpu, nf4_edges, same

import pallas_kernels as pk
from pallas_kernels import backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process"),
]
SEED = 77
ROUNDINGS = ("nearest", "stochastic")
# Rows of an odd number of blocks begin at odd multiples of two bytes: the kernels' slowest road.
SHAPES = ((64, 3, 704), (256, 2, 8192), (2048, 3, 2048 * 5), (128, 1, 128 * 257))


def both(call, *arrays):
    """call(*arrays) on the GPU and on the CPU, as numpy arrays."""
    with jax.default_device(jax.devices("cpu")[0]):
        want = np.asarray(jax.jit(call)(*map(jnp.asarray, arrays)))
    with jax.default_device(jax.devices("cuda")[0]):
        got = np.asarray(jax.jit(call)(*map(jnp.asarray, arrays)))
    return got, want


def seed():
    return np.uint32(SEED)


def test_kernels_are_in_use():
    assert backends.cuda_kernels("encode"), pk.backend_report()


@pytest.mark.parametrize("rotation", [0, 32])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_encode_and_decode(fmt, shape, rounding, rotation):
    block, rows, n = shape

    def encode(x, s):
        return pk.encode(x, fmt, block=block, rounding=rounding, rotation=rotation, seed=s)

    for name in CASES:
        got, want = both(encode, case(name, rows, n), seed())
        same(got, want)
        if rotation == 0 and rounding == "nearest":
            for dtype in (jnp.bfloat16, jnp.float32):
                same(*both(lambda p, d=dtype: pk.decode(p, fmt, n, block=block, dtype=d), want))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_encode_reordered(fmt, rounding, chunks):
    local, nodes, block, q = 4, 3, 64, 64 * 7
    for rotation in (0, 32):
        for name in ("normal", "bf16", "broken"):
            got, want = both(
                lambda g, s, r=rotation: pk.encode_reordered(
                    g,
                    fmt,
                    local=local,
                    nodes=nodes,
                    chunks=chunks,
                    block=block,
                    rounding=rounding,
                    rotation=r,
                    seed=s,
                ),
                case(name, 1, local * nodes * chunks * q)[0],
                seed(),
            )
            same(got, want)


@pytest.mark.parametrize("peers", [1, 2, 5, 8])
@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_decode_sum(fmt, peers):
    for block, n in ((64, 704), (256, 8192), (2048, 2048 * 5)):
        for name in ("normal", "ladder", "broken", "threshold"):
            payload = np.asarray(pk.encode(case(name, peers, n), fmt, block=block))
            for rotation in (0, 32):
                same(
                    *both(
                        lambda p, r=rotation, n=n, b=block: pk.decode_sum(
                            p, fmt, n, block=b, rotation=r, scale=1 / 3
                        ),
                        payload,
                    )
                )


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt_out", pk.FORMATS)
@pytest.mark.parametrize("fmt_in", pk.FORMATS)
def test_decode_sum_encode(fmt_in, fmt_out, rounding):
    block, peers, rows, n = 64, 4, 3, 704
    for name in ("normal", "ladder", "broken"):
        payload = np.asarray(pk.encode(case(name, peers, rows * n), fmt_in, block=block))
        got, want = both(
            lambda p, s: pk.decode_sum_encode(
                p, fmt_in, fmt_out, rows, n, block=block, rounding=rounding, seed=s
            ),
            payload,
            seed(),
        )
        if fmt_out in pk.QUANTIZED:
            same(got, want)
        else:
            dtype = np.float32 if fmt_out == "fp32" else jnp.bfloat16
            same(got.view(dtype), want.view(dtype))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_difference(fmt, rounding, dtype):
    for block, rows, n in SHAPES[:2]:
        for name in ("normal", "ladder", "tiny", "broken"):
            w = case(name, rows, n)
            base = np.asarray(jnp.asarray(case("normal", rows, n), dtype))
            payload, want = both(
                lambda x, b, s, block=block: pk.encode_delta(
                    x, b, fmt, block=block, rounding=rounding, seed=s
                ),
                w,
                base,
                seed(),
            )
            same(payload, want)
            same(*both(lambda p, b, block=block: pk.decode_add(p, b, fmt, block=block), want, base))


@pytest.mark.parametrize("shape", [*SHAPES, (64, 2, 64 * 257)], ids=str)
def test_nf4(shape):
    block, rows, n = shape
    for name in CASES:
        got, want = both(lambda x: pk.encode_nf4(x, block=block), case(name, rows, n))
        same(got, want)
        for dtype in (jnp.bfloat16, jnp.float32):
            same(*both(lambda p, d=dtype: pk.decode_nf4(p, n, block=block, dtype=d), want))


def test_every_nf4_scale_and_midpoint():
    same(*both(pk.encode_nf4, nf4_edges()))


@pytest.mark.parametrize("fmt", pk.QUANTIZED)
def test_every_scale(fmt):
    """All 128 mantissas and every exponent a block maximum can have: the reciprocal is exact."""
    peaks = np.ldexp(
        (1 + np.arange(256) / 256)[None].astype(np.float32), np.arange(-90, 127)[:, None]
    ).astype(np.float32)
    x = peaks.reshape(-1, 1) * np.linspace(-1, 1, 64, dtype=np.float32)[None]
    for rounding in ROUNDINGS:
        same(*both(lambda v, s, r=rounding: pk.encode(v, fmt, block=64, rounding=r, seed=s), x, seed()))
