#!/usr/bin/env python3
"""Measure causal attention within packed documents, forward and backward, on one GPU.

    python3 scripts/bench/packed_attention.py            # about 80 s on an H100
    python3 scripts/bench/packed_attention.py --small    # what runs on a CPU, in small

Rows of 8k to 128k tokens hold documents of 512 to 8192 tokens (log-uniform). Each candidate is first
compared with an fp32 reference in a small case, gradients included, and asked whether a document's gradients
reach another's. Then the rates: TFLOP/s count the pairs of tokens that attend to each other, 14 FLOPs for
each pair, head and dimension (4 forward, 10 backward). "of row" is relative to cuDNN's causal attention over
one document as long as the row, "of equal" to cuDNN's over a batch of equal documents with about as many
pairs. A candidate that fails prints its error, and the others go on.

cuDNN's packed layout is JAX's private API. dew-flash-attn (FlashAttention-3 as XLA FFI calls) and fa4-jax
(FlashAttention-4 in the CuTe DSL) are not dependencies of zerojax, and are measured where they are installed.
"""

# pyright: reportMissingImports=false
# The packages that are compared are not dependencies of zerojax.
import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zerojax.models.attention import causal_attention

SHORTEST, LONGEST = 512, 8192
"""Of the documents, in tokens."""

ROW_FLOPS = 14
"""Of a pair of tokens, forward and backward, per head and dimension."""

TOLERANCE = 2e-2
"""Of the relative error of bf16 results, in norm."""

TRITON = "Pallas Triton"
"""On GPUs measured only when asked for: it compiles slowly, and its time grows with the row's square."""


@dataclass(frozen=True)
class Case:
    """A shape to measure.

    Attributes:
        lengths: of the documents of each row; all rows have the same.
        width: dimensions of a head.
        window: positions that one attends to, itself included; None for all of its document.
    """

    lengths: tuple[int, ...]
    width: int
    heads: int
    kv_heads: int
    window: int | None = None
    rows: int = 1

    @property
    def tokens(self) -> int:
        """Of a row."""
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Pairs of tokens that attend to each other, in all rows."""
        return self.rows * sum(causal_pairs(n, self.window) for n in self.lengths)

    @property
    def segments(self) -> Array:
        """The document of each position, int32 [rows, tokens]."""
        row = np.repeat(np.arange(1, len(self.lengths) + 1, dtype=np.int32), self.lengths)
        return jnp.asarray(np.tile(row, (self.rows, 1)))

    def describe(self) -> str:
        """One line."""
        window = "" if self.window is None else f", window {self.window}"
        return (
            f"{self.rows} x {self.tokens} tokens, {len(self.lengths)} documents of {min(self.lengths)} to "
            f"{max(self.lengths)}, {self.heads} heads ({self.kv_heads} of keys) of {self.width}{window}"
        )


def causal_pairs(length: int, window: int | None) -> int:
    """Pairs of a position and one that it attends to, in one document."""
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def documents(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths that fill a row, log-uniform; the last is cut."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        lengths.append(min(length, left))
    return tuple(lengths)


Attend = Callable[[Array, Array, Array, Array], Array]
"""Attention of queries, keys, values [rows, tokens, heads, width] and segments [rows, tokens]."""


# --- candidates


def one_document(case: Case, kernel: Literal["cudnn", "xla"]) -> Attend:
    """A document as long as the row."""

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        del segments
        return causal_attention(q, k, v, kernel, window=case.window)

    return attend


def equal_documents(case: Case, kernel: Literal["cudnn", "xla"]) -> tuple[Attend, int]:
    """A batch of equal documents; also their length, at which they have about as many pairs."""
    mean = sum(n * n for n in case.lengths) / case.tokens
    length = min(2 ** round(math.log2(mean)), case.tokens)
    while case.tokens % length:
        length //= 2

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        del segments
        split = [x.reshape(-1, length, *x.shape[2:]) for x in (q, k, v)]
        return causal_attention(split[0], split[1], split[2], kernel, window=case.window).reshape(q.shape)

    return attend, length


def present(case: Case, kernel: Literal["cudnn", "xla"]) -> Attend:
    """zerojax's: with cuDNN the mask is a bias."""

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        return causal_attention(q, k, v, kernel, segments, window=case.window)

    return attend


def starts_of(segments: Array, most: int) -> Array:
    """Where each document of each row starts, ascending, int32 [rows, most]; -1 beyond the last."""
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.vmap(lambda row: jnp.nonzero(row, size=most, fill_value=-1)[0])(first).astype(jnp.int32)


def offsets_of(segments: Array, most: int) -> Array:
    """Where each document of the flattened rows starts, and where it ends, int32 [most + 1]."""
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    flat = first.reshape(-1)
    starts = jnp.nonzero(flat, size=most, fill_value=flat.size)[0]
    return jnp.append(starts, flat.size).astype(jnp.int32)


def cudnn_packed(case: Case, most: int) -> Attend:
    """cuDNN's ragged layout, by JAX's private API, for at most ``most`` documents in a row."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        starts = starts_of(segments, most)
        ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        ends = jnp.where(ends < 0, q.shape[1], ends)
        sizes = jnp.where(starts < 0, -1, ends - starts)
        offsets = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
        out = cudnn.dot_product_attention(
            *(q, k, v, None, None, sizes, sizes, offsets, offsets),
            scale=case.width**-0.5,
            mask_type=cudnn.MaskType.PADDING_CAUSAL,
            sliding_window_length=case.window,
        )
        assert isinstance(out, Array)
        return out

    return attend


def flash_3(case: Case, most: int, longest: int) -> Attend:
    """FlashAttention-3 for at most ``most`` documents in all rows, none longer than ``longest``."""
    from dew_flash_attn import flash_mha_varlen

    window = (-1, -1) if case.window is None else (case.window - 1, 0)

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        offsets = offsets_of(segments, most)
        out = flash_mha_varlen(*flat, offsets, longest, is_causal=True, window_size=window)
        return out.reshape(q.shape)

    return attend


def flash_4(case: Case, most: int) -> Attend:
    """FlashAttention-4's kernels for Hopper, in the CuTe DSL, for at most ``most`` documents in all rows."""
    from fa4_jax import flash_attn_varlen

    window = None if case.window is None else (case.window - 1, 0)

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        offsets = offsets_of(segments, most)
        return flash_attn_varlen(*flat, offsets, offsets, causal=True, window_size=window).reshape(q.shape)

    return attend


def pallas_triton(case: Case) -> Attend:
    """The Triton kernel of Pallas' examples, which computes masked blocks too."""
    from jax.experimental.pallas.ops.gpu import attention as pallas

    if case.window is not None:
        raise NotImplementedError("it has no window")
    sizes = pallas.BlockSizes(64, 64, 64, 64, 64, 64)

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        k, v = (jnp.repeat(x, case.heads // case.kv_heads, axis=2) for x in (k, v))
        mha = partial(pallas.mha, causal=True, block_sizes=sizes, sm_scale=case.width**-0.5)
        interpret = jax.default_backend() == "cpu"
        return mha(q, k, v, segments, num_warps=4, interpret=interpret)

    return attend


def candidates(case: Case) -> Iterator[tuple[str, Callable[[], Attend]]]:
    """What is compared, by name, made when asked for."""
    documents_in_all = case.rows * len(case.lengths)
    exact = -(-documents_in_all // 16) * 16
    longest = 2 ** math.ceil(math.log2(max(case.lengths)))
    loose = max(case.rows * case.tokens // 256, documents_in_all)
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    yield "cuDNN packed", lambda: cudnn_packed(case, -(-len(case.lengths) // 16) * 16)
    yield "FlashAttention-3", lambda: flash_3(case, exact, min(longest, case.tokens))
    yield f"FA-3, {loose} documents, row", lambda: flash_3(case, loose, case.tokens)
    yield "FlashAttention-4", lambda: flash_4(case, exact)
    yield f"FA-4, {loose} documents", lambda: flash_4(case, loose)
    yield "present", lambda: present(case, kernel)
    yield TRITON, lambda: pallas_triton(case)


# --- checks


def arrays(case: Case, seed: int = 1) -> tuple[Array, Array, Array, Array]:
    """Queries, keys, values, and the gradient of the output; bf16, normal."""
    keys = jax.random.split(jax.random.key(seed), 4)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, g = (
        jax.random.normal(key, (case.rows, case.tokens, n, case.width), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )
    return q, k, v, g


Step = Callable[[Array, Array, Array, Array, Array], tuple[Array, Array, Array, Array]]


def step_of(attend: Attend) -> Step:
    """Output and the gradients of q, k and v, of (q, k, v, gradient of the output, segments)."""

    def step(q: Array, k: Array, v: Array, g: Array, segments: Array) -> tuple[Array, Array, Array, Array]:
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
        dq, dk, dv = pullback(g)
        return out, dq, dk, dv

    return step


def reference(case: Case, segments: Array) -> Attend:
    """fp32, from the definition."""
    index = jnp.arange(case.tokens)
    distance = index[:, None] - index
    seen = (distance >= 0) & (distance < (case.window or case.tokens))
    mask = seen & (segments[:, :, None] == segments[:, None, :])

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        del segments
        k, v = (jnp.repeat(x, case.heads // case.kv_heads, axis=2) for x in (k, v))
        exact = partial(jnp.einsum, precision="highest")
        scores = exact("bthd,bshd->bhts", q, k) * case.width**-0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
        return exact("bhts,bshd->bthd", weights, v)

    return attend


def check(case: Case, wanted: Callable[[str], bool]) -> None:
    """Print the errors of each candidate, and whether gradients cross from one document to another."""
    print(f"\ncheck: {case.describe()}")
    segments = case.segments
    given = arrays(case)
    wide = [x.astype(jnp.float32) for x in given]
    q, k, v, g = wide
    exact = jax.jit(step_of(reference(case, segments)))(q, k, v, g, segments)
    one = (segments == 2)[:, :, None, None]
    for name, make in candidates(case):
        if not wanted(name):
            continue
        try:
            step = jax.jit(step_of(make()))
            found = step(*given, segments)
            errors = [
                float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))
                for a, b in zip(found, exact, strict=True)
            ]
            q, k, v, g = given
            alone = step(q, k, v, jnp.where(one, g, 0), segments)[1:]
            leaked = max(float(jnp.max(jnp.abs(jnp.where(one, 0, x.astype(jnp.float32))))) for x in alone)
            good = all(e < TOLERANCE for e in errors) and leaked == 0
            texts = ", ".join(f"{n} {e:.1e}" for n, e in zip(("out", "dq", "dk", "dv"), errors, strict=True))
            print(f"  {name:<28} {'ok' if good else 'WRONG':<6} {texts}; leaked {leaked:.1e}", flush=True)
        except Exception as error:
            report(name, error)


# --- rates


def milliseconds(run: Callable[[], object], seconds: float) -> float:
    """Median over five rounds of calls that follow each other without waiting."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    once = time.perf_counter() - start
    calls = max(1, min(20, int(seconds / 5 / once)))
    rounds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls - 1):
            run()
        jax.block_until_ready(run())
        rounds.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(rounds)


def measure(case: Case, wanted: Callable[[str], bool], deadline: float, seconds: float) -> None:
    """Print a table of one case."""
    print(f"\n{case.describe()}: {case.pairs / 1e6:.1f} M pairs")
    columns = ("ms", 8), ("TFLOP/s", 8), ("of row", 7), ("of equal", 8), ("temp GB", 8), ("peak GB", 8)
    print(" " * 30, *(f"{title:>{width}}" for title, width in columns), "compile s")
    segments = case.segments
    given = arrays(case)
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    equal, length = equal_documents(case, kernel)
    row = replace(case, lengths=(case.tokens,)).pairs
    batch = replace(case, lengths=(length,) * (case.tokens // length)).pairs
    bases: list[float] = []
    base_rows: list[tuple[str, Callable[[], Attend], int]] = [
        ("cuDNN, one document", lambda: one_document(case, kernel), row),
        (f"cuDNN, equal ({length})", lambda: equal, batch),
    ]
    for name, make, pairs in [*base_rows, *((n, m, case.pairs) for n, m in candidates(case))]:
        if len(bases) == len(base_rows) and not wanted(name):
            continue
        if time.monotonic() > deadline:
            print(f"  {name:<28} not measured: no time left")
            continue
        bias = 2 * case.rows * case.tokens**2
        if name == "present" and bias > 1 << 33:
            print(f"  {name:<28} not measured: its bias has {bias / 1e9:.0f} GB")
            continue
        try:
            start = time.monotonic()
            compiled = jax.jit(step_of(make())).lower(*given, segments).compile()
            took = time.monotonic() - start
            ms = milliseconds(lambda compiled=compiled: compiled(*given, segments), seconds)
            rate = ROW_FLOPS * pairs * case.heads * case.width / ms / 1e9
            if len(bases) < len(base_rows):
                bases.append(rate)
            shares = [f"{rate / base:.0%}" for base in bases] + [""] * (2 - len(bases))
            memory = compiled.memory_analysis()
            temp = 0 if memory is None else memory.temp_size_in_bytes / 1e9
            # Of all so far. Unlike XLA's figure it has what a kernel allocates when it runs.
            peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
            print(
                f"  {name:<28} {ms:8.2f} {rate:8.1f} {shares[0]:>7} {shares[1]:>8} {temp:8.2f} {peak:8.2f} "
                f"{took:9.1f}",
                flush=True,
            )
        except Exception as error:
            if len(bases) < len(base_rows):
                bases.append(math.nan)
            report(name, error)


def report(name: str, error: Exception) -> None:
    """Print the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    print(f"  {name:<28} failed: {type(error).__name__}: {lines[0][:300]}", flush=True)


def main() -> None:
    """Check, measure and print."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short rows")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--budget", type=float, default=80, help="seconds after which no case begins")
    parser.add_argument("--each", type=float, default=0.25, help="seconds of runs of each measurement")
    parser.add_argument("--only", nargs="*", default=[], help="candidates whose names begin so")
    parser.add_argument("--without", nargs="*", default=[], help="all but those whose names begin so")
    options = parser.parse_args()

    def wanted(name: str) -> bool:
        if options.only:
            return name.startswith(tuple(options.only))
        slow = name == TRITON and jax.default_backend() == "gpu"
        return not slow and not name.startswith(tuple(options.without))

    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}")
    check_case = Case((1, 37, 300, 129, 256, 45), 128, heads=8, kv_heads=2, rows=2)
    check(check_case, wanted)
    check(replace(check_case, width=64, window=100), wanted)
    case = partial(Case, heads=options.heads, kv_heads=options.kv_heads)
    if options.small:
        cases = [case(documents(1024), 64), case(documents(1024), 64, window=100)]
    else:
        k = 1024
        cases = [
            case(documents(32 * k), 128),
            case(documents(8 * k), 128),
            case(documents(128 * k), 128),
            case(documents(32 * k), 128, window=k),
            case(documents(32 * k), 64),
            case(documents(128 * k), 64, window=k),
            # What many short documents, and one that fills the row, cost.
            case((128,) * 256, 128),
            case((32 * k,), 128),
        ]
    for one in cases:
        measure(one, wanted, begin + options.budget, options.each)
    print(f"\n{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
