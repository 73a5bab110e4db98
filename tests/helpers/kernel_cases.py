"""Inputs that are hard for codecs, and the comparison of results."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from nf4_codec import MIDDLES

CASES = ("normal", "bf16", "half", "sparse", "tiny", "threshold", "huge", "broken", "ties", "ladder")


def case(name: str, rows: int, n: int) -> np.ndarray:
    """An array [rows, n] of the named kind; every kind is deterministic."""
    rng = np.random.default_rng(CASES.index(name))
    x = rng.normal(size=(rows, n)).astype(np.float32)
    match name:
        case "bf16":
            return x.astype(ml_dtypes.bfloat16)
        case "half":
            return x.astype(np.float16)
        case "sparse":
            return np.where(rng.random((rows, n)) < 0.005, x, np.float32(0))
        case "tiny":
            return x * np.float32(2.0**-140)
        case "threshold":
            # Block maxima on both sides of the magnitude below which blocks are flushed.
            return x * np.exp2(rng.uniform(-86, -70, size=(rows, n)).round()).astype(np.float32)
        case "huge":
            return np.clip(x, -3, 3) * np.float32(2.0**126)
        case "broken":
            x[:, ::97] = np.nan
            x[:, 1 :: n // 3] = np.inf
            x[:, 200:330] = -0.0
            return x
        case "ties":
            # The maximum makes the scale 1 in every integer format: quotients are exact halves.
            x = (rng.integers(-14, 15, size=(rows, n)) / 2).astype(np.float32)
            x[:, ::64] = 7
            return x
        case "ladder":
            return np.exp2(rng.uniform(-40, 40, size=(rows, n))).astype(np.float32) * np.sign(x)
        case _:
            return x


def nf4_edges() -> np.ndarray:
    """fp32[1, 258 * 64]: a block for each of nf4's scales, of numbers on every midpoint and an ulp beside.

    Then two blocks of zeros, and two of another group.
    """
    scales = np.arange(1, 255, dtype=np.float32)[:, None] ** 3 * np.float32(1 / 254**3)
    edges = (MIDDLES * scales).view(np.int32)[..., None] + np.array([-1, 0, 1], np.int32)
    x = np.zeros((258, 64), np.float32)
    x[:254, :45] = edges.view(np.float32).reshape(254, 45)
    x[:254, 63:] = scales
    x[253, 63] = 1  # not an ulp less, or the unit would differ
    x[256:] = np.arange(64)
    return x.reshape(1, -1)


def has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bits, but for the payload of a NaN, which chips choose."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if got.dtype != np.uint8:
        got, want = got.astype(np.float32), want.astype(np.float32)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        got, want = (np.where(np.isnan(x), np.float32(0), x).view(np.uint32) for x in (got, want))
    np.testing.assert_array_equal(got, want)


def delta_rows(
    batch: int, time: int, key_heads: int, heads: int, dim: int, width: int, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """Arguments of ``pallas_kernels.delta_rule``: several documents a row; 64 keys of the first are equal."""
    rng = np.random.default_rng(time)
    query, key = rng.standard_normal((2, batch, time, key_heads, dim))
    key[0, :64] = key[0, 0]
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.standard_normal((batch, time, heads, width))
    low = [jnp.asarray(x, dtype) for x in (query / dim**0.5, key, value)]
    log_decay = -rng.exponential(size=(batch, time, heads)) / 8
    beta = rng.uniform(size=(batch, time, heads))
    ends = np.sort(rng.integers(min(64, time), time + 1, (batch, 2, 1)), axis=1)
    documents = (np.arange(time) >= ends).sum(1)
    state = rng.standard_normal((batch, heads, dim, width)) / dim**0.5
    fp32 = [jnp.asarray(x, jnp.float32) for x in (log_decay, beta)]
    return *low, *fp32, jnp.asarray(documents, jnp.int32), jnp.asarray(state, jnp.float32)


def by_channel(args: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The arguments with a decay for each channel of the keys. A few channels of the last head decay fast."""
    query, log_decay = args[0], np.asarray(args[3])
    rates = np.random.default_rng(0).exponential(size=(*log_decay.shape, query.shape[3]))
    rates[:, :, -1, ::5] *= 40
    return *args[:3], jnp.asarray(log_decay[..., None] * rates, jnp.float32), *args[4:]
