"""Interpreted kernels against the reference; run by test_interpreted.py with TRITON_INTERPRET=1."""

import functools
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import CASES, by_channel, case, delta_rows, nf4_edges

from pallas_kernels import (
    QUANTIZED,
    STORED,
    attention_reference,
    delta_chunks_reference,
    grouped_reference,
    nf4_reference,
    reference,
)
from pallas_kernels.triton import calls

SEED = jnp.uint32(9)
SHAPES = ((64, 3, 704), (256, 2, 4096))


def check(name, *arrays, specification=reference, **options):
    """Compare a kernel with the reference; NaNs may differ in their payload."""
    got = np.asarray(getattr(calls, name)(*arrays, **options))
    want = np.asarray(getattr(specification, name)(*arrays, **options))
    assert got.shape == want.shape, (name, options)
    assert got.dtype == want.dtype, (name, options)
    if want.dtype != np.uint8:
        got, want = got.astype(np.float32), want.astype(np.float32)
        same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    else:
        same = got == want
    assert same.all(), (name, options, int((~same).sum()), np.argwhere(~same)[:5].tolist())


def check_format(fmt):
    """Every kernel in one format."""
    for block, rows, n in SHAPES:
        shared = {"fmt": fmt, "block": block}
        # Every case in short rows; rows of several programs differ in where they begin alone.
        short = n < block * 16
        inputs = [jnp.asarray(case(name, rows, n)) for name in CASES if name != "half"]
        for rounding in ("nearest", "stochastic"):
            seed = SEED if rounding == "stochastic" else None
            for rotation in (0, 32):
                for x in inputs if short else inputs[:1]:
                    check("encode", x, seed, rounding=rounding, rotation=rotation, **shared)
            check("encode_delta", inputs[0], inputs[1], seed, rounding=rounding, **shared)
            check("encode_delta", inputs[6], inputs[0], seed, rounding=rounding, **shared)
        order = {"local": 2, "nodes": 2, "chunks": 2, "rounding": "stochastic", "rotation": 32}
        check("encode_reordered", inputs[1].reshape(-1)[: 8 * block], SEED, **order, **shared)
        for name in ("normal", "broken", "ladder") if short else ("normal",):
            x = jnp.asarray(case(name, 5, n))
            payload = reference.encode(x, None, rounding="nearest", rotation=0, **shared)
            for dtype in (jnp.bfloat16, jnp.float32):
                check("decode", payload, n=n, dtype=jnp.dtype(dtype), **shared)
                check("decode_add", payload, x.astype(dtype), **shared)
            for rotation in (0, 32):
                check("decode_sum", payload, n=n, rotation=rotation, scale=0.2, **shared)
        out = {"rows_out": 2, "n": n // 2 // block * block, "block": block}
        total = out["rows_out"] * out["n"]
        x = jnp.asarray(case("normal", 4, total))
        payload = reference.encode(x, None, rounding="nearest", rotation=0, **shared)
        for fmt_out in {"int4", fmt}:
            for seed, rounding in ((None, "nearest"), (SEED, "stochastic")):
                options = {"fmt_in": fmt, "fmt_out": fmt_out, "rounding": rounding, **out}
                check("decode_sum_encode", payload, seed, **options)


def check_nf4():
    """The kernel of nf4, on every case, scale and midpoint; in blocks of 64 and, of 2048, on one case."""
    rows = [case(name, 1, 704).astype(np.float32) for name in CASES]
    narrow = case("bf16", 1, 4096)
    for block, x in ((64, np.concatenate(rows)), (64, nf4_edges()), (2048, narrow)):
        shared = {"block": block, "specification": nf4_reference}
        payload = nf4_reference.encode_nf4(jnp.asarray(x), block=block)
        for dtype in (jnp.bfloat16, jnp.float32):
            check("decode_nf4", payload, n=x.shape[1], dtype=jnp.dtype(dtype), **shared)


def check_attention():
    """Attention to a cache: few rows and many, padded widths, shared heads, windows, a softcap, and sinks."""
    for rows, heads, kv_heads, length, dim, softcap in (
        (3, 2, 2, 70, 24, None),
        (2, 10, 2, 600, 16, 2.0),
    ):
        keys = jax.random.split(jax.random.key(length), 4)
        cache = 2, rows, kv_heads, length, dim
        kept, values = (jax.random.normal(key, cache, jnp.bfloat16) for key in keys[:2])
        query = 3 * jax.random.normal(keys[2], (rows, heads, dim), jnp.bfloat16)
        stop = jnp.asarray([length, 1, 7][:rows], jnp.int32)
        start = jnp.asarray([length // 3, 0, 2][:rows], jnp.int32)
        sinks = None if softcap is None else jax.random.normal(keys[3], (heads,), jnp.float32)
        arguments = query, kept, values, jnp.int32(1), start, stop, sinks
        got = calls.attend_cache(*arguments, scale=0.3, softcap=softcap)
        want = attention_reference.attend_cache(*arguments, scale=0.3, softcap=softcap)
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


def check_cast():
    """Tiles that are not full; ties, subnormals, numbers beyond the range, NaN."""
    rng = np.random.default_rng(0)
    for m, n in ((16, 16), (144, 272), (256, 128)):
        numbers = np.exp2(rng.uniform(-20, 18, (m, n))) * rng.choice([-1, 1], (m, n))
        numbers.flat[:6] = 464, 61440, np.nan, np.inf, -np.inf, 1 + 2**-4
        for x in (jnp.asarray(numbers, jnp.bfloat16), jnp.asarray(numbers, jnp.float32)):
            for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
                got = calls.cast_transpose(x, jnp.float32(0.5), None, dtype=jnp.dtype(dtype))
                want = grouped_reference.cast_transpose(x, jnp.float32(0.5), None, dtype=jnp.dtype(dtype))
                assert got is not None
                for mine, theirs in zip(got, want, strict=True):
                    assert mine.dtype == theirs.dtype
                    np.testing.assert_array_equal(
                        np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
                    )


def check_columns():
    """Groups of no row, one row and several tiles; rows at an index, and rows of nobody."""
    rng = np.random.default_rng(0)
    sizes = jnp.asarray([1, 0, 130, 128], jnp.int32)
    for width in (16, 144):
        wide = jnp.asarray(rng.normal(size=(270, width)), jnp.bfloat16)
        x = wide.astype(jnp.float8_e4m3fn)
        index = jnp.asarray(rng.integers(0, 270, 262), jnp.int32)
        cases = {
            "grouped_columns": ((x, sizes, None), (x, sizes, index)),
            "gather_rows": ((wide, index), (x, index)),
            "cast_transpose": ((wide, jnp.float32(3), sizes),),
        }
        for name, every in cases.items():
            options = {"dtype": jnp.dtype(jnp.float8_e5m2)} if name == "cast_transpose" else {}
            for given in every:
                got, want = (getattr(one, name)(*given, **options) for one in (calls, grouped_reference))
                for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                    # The codes of rows of nobody are unspecified.
                    count = int(sizes.sum()) if mine.shape == wide.shape else None
                    own, wanted = (np.asarray(a[:count], np.float32) for a in (mine, theirs))
                    np.testing.assert_array_equal(own, wanted)


def check_grouped():
    """Sides that fill no tile, groups of no row, one row and several tiles; NaN in the rows of nobody."""
    for sizes, k, n, dtype in (
        ((1, 0, 65, 130), 192, 64, jnp.bfloat16),
        ((0, 40, 1), 100, 300, jnp.bfloat16),
        ((17, 0, 3), 50, 72, jnp.float32),
    ):
        rng = np.random.default_rng(k)
        rows = sum(sizes) + 9
        x, w, g = (rng.standard_normal(s) for s in ((rows, k), (len(sizes), k, n), (rows, n)))
        x[sum(sizes) :] = g[sum(sizes) :] = np.nan
        x, w, g = (jnp.asarray(a, dtype) for a in (x, w, g))
        of = jnp.asarray(sizes, jnp.int32)
        for name, arrays, options in (
            ("grouped_rows", (x, w), {"transposed": False}),
            ("grouped_rows", (g, w), {"transposed": True}),
            ("grouped_sums", (x, g), {}),
        ):
            got = np.asarray(getattr(calls, name)(*arrays, of, **options), np.float32)
            want = np.asarray(getattr(grouped_reference, name)(*arrays, of, **options), np.float32)
            assert got.shape == want.shape, name
            error = 2**-7 if dtype == jnp.bfloat16 else 1e-5  # sums in another order
            np.testing.assert_allclose(got, want, rtol=error, atol=error, err_msg=f"{name} {k} x {n}")


DELTA_KINDS = tuple(itertools.product((jnp.float32, jnp.bfloat16), (True, False), (False, True)))
"""(dtype, whether tokens remove what they write over, whether each channel decays at its own rate)."""
DELTA_ALWAYS = ((jnp.float32, True, False), (jnp.bfloat16, False, True))
"""Every value of each."""


def check_delta_chunks(kinds=DELTA_ALWAYS):
    """The delta rule, Mamba-2's and Kimi's, both passes, with several documents; 64 keys are the same."""
    for dtype, delta, channels in kinds:
        error = 1e-5 if dtype == jnp.float32 else 2e-2
        # Two rows in a batch once: the time is that of all programs of a grid.
        rows = 2 if (dtype, channels) == (jnp.float32, False) else 1
        args = delta_rows(*(rows, 128, 1, 2, 64, 32) if channels else (rows, 128, 1, 2, 32, 64), dtype)
        args = by_channel(args) if channels else args
        args = args if delta else (*args[:4], None, *args[5:])
        want = check_chunks("delta_rule", error, *args)
        check_chunks("delta_rule_backward", error, *args, want[1], want[0], want[2])


def check_chunks(name, error, *args):
    """Compare a function of chunks with the reference, and return the reference's results."""
    want = jax.jit(getattr(delta_chunks_reference, name))(*args)
    close(name, getattr(calls, name)(*args), want, error)
    return want


def close(name, got, want, error):
    """Compare arrays by the norm of their errors."""
    for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if theirs is None:
            assert mine is None, (name, number)
            continue
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), (name, number)
        mine, theirs = (np.asarray(x, np.float32) for x in (mine, theirs))
        off = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        assert off <= error, (name, number, off)


def main():
    """Check the formats named on the command line, or all."""
    interpreted.install(calls)
    for fmt in sys.argv[1:] or (*QUANTIZED, *STORED):
        others = {
            "nf4": check_nf4,
            "attention": check_attention,
            "cast": check_cast,
            "columns": check_columns,
            "grouped": check_grouped,
            "delta_chunks": check_delta_chunks,
            "delta_chunks of every kind": functools.partial(check_delta_chunks, DELTA_KINDS),
        }
        others[fmt]() if fmt in others else check_format(fmt)
        print(fmt, "agrees", flush=True)


if __name__ == "__main__":
    main()
