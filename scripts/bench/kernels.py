"""Measure every kernel of pallas_kernels on this GPU against a device copy and against XLA.

    python scripts/bench/kernels.py                      # the roofline table, 256 MB
    python scripts/bench/kernels.py --megabytes 1 4 256 2048 --out bench_kernels

GB/s count the bytes that must move: what a kernel has to read and write once. Prints a table and
writes OUT.json and OUT.png. The copy is measured again between kernels, and a ratio is taken with
the mean of the copies before and after.

Up to 64 MB a kernel takes less time than its launch. There the time is what the device spent in kernels, from
a trace: what a caller that launches them one by one and waits would see is not measured.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import harness

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
# Kernels launched one by one, as traces show them.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from pallas_kernels import nf4_reference, reference
from pallas_kernels.formats import nf4_sections
from zerojax.analysis.profile import read_events

BLOCK = 256
NF4_BLOCK = 64
PEERS = (4, 8)
LOCAL, NODES, CHUNKS = 8, 2, 4
DECODED = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
SMALL = 64 << 20
"""Bytes of a call's arguments up to which its time is taken from a trace."""


@dataclass(frozen=True)
class Case:
    """One kernel on one kind of data: what to run, on what, and the bytes that must move."""

    kernel: str
    fmt: str
    run: Callable
    xla: Callable
    inputs: Callable
    bytes_moved: int


@dataclass(frozen=True)
class Result:
    """A measured case; times in seconds, rates in GB/s, the spread relative to the median."""

    kernel: str
    fmt: str
    megabytes: int
    gb_per_s: float
    of_copy: float
    spread: float
    xla_gb_per_s: float | None
    copy_gb_per_s: float


def data(index: int, n: int) -> jax.Array:
    """bf16[1, n] of normal numbers, another for each index."""
    return jax.random.normal(jax.random.key(index), (1, n), jnp.bfloat16)


def payload(index: int, fmt: str, peers: int, n: int) -> jax.Array:
    """A random payload uint8[peers, ...] with scales near 0.01."""
    codes = jax.random.bits(
        jax.random.key(index), (peers, pk.nbytes(fmt, n, BLOCK) - 2 * (n // BLOCK)), jnp.uint8
    )
    scales = jnp.full((peers, n // BLOCK), 0.0117, jnp.bfloat16)
    raw = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(peers, -1)
    # 0x7f and 0xff are not codes of fp8.
    return jnp.concatenate([codes & 0xF7 if fmt == "fp8" else codes, raw], axis=1)


def bound(kernel: Callable, xla: Callable, **options: Any) -> tuple[Callable, Callable]:
    """A kernel and its reference with their options, which have the same names."""
    return partial(kernel, **options), partial(xla, **options)


def encode_cases(n: int) -> list[Case]:
    """Encoders of n bf16 elements, plain, reordered, and with their options."""

    def plain(name: str, fmt: str, rounding: str = "nearest", rotation: int = 0) -> Case:
        seed = jnp.uint32(1) if rounding == "stochastic" else None
        options = {"fmt": fmt, "block": BLOCK, "rounding": rounding, "rotation": rotation, "seed": seed}
        pair = bound(pk.encode, reference.encode, **options)
        return Case(name, fmt, *pair, lambda i: (data(i, n),), 2 * n + pk.nbytes(fmt, n, BLOCK))

    def reordered(fmt: str) -> Case:
        order = {"local": LOCAL, "nodes": NODES, "chunks": CHUNKS}
        options = {"fmt": fmt, "block": BLOCK, "rounding": "nearest", "rotation": 0, "seed": None}
        pair = bound(pk.encode_reordered, reference.encode_reordered, **order, **options)
        moved = 2 * n + pk.nbytes(fmt, n, BLOCK)
        return Case("reorder + encode", fmt, *pair, lambda i: (data(i, n)[0],), moved)

    def subtracted(fmt: str) -> Case:
        options = {"fmt": fmt, "block": BLOCK, "rounding": "nearest", "seed": None}
        pair = bound(pk.encode_delta, reference.encode_delta, **options)
        moved = 6 * n + pk.nbytes(fmt, n, BLOCK)
        return Case(
            "subtract + encode", fmt, *pair, lambda i: (data(i, n).astype(jnp.float32), data(i + 1, n)), moved
        )

    def others(fmt: str) -> list[Case]:
        return [
            plain("encode, stochastic", fmt, "stochastic"),
            plain("encode, rotated", fmt, rotation=32),
            plain("encode, both", fmt, "stochastic", 32),
            subtracted(fmt),
        ]

    formats = pk.QUANTIZED
    return [
        *(plain("encode", fmt) for fmt in formats),
        *map(reordered, formats),
        *chain.from_iterable(map(others, formats)),
    ]


def decode_cases(n: int) -> list[Case]:
    """Decoders of n elements."""

    def plain(fmt: str, dtype: jnp.dtype) -> Case:
        pair = bound(pk.decode, reference.decode, fmt=fmt, n=n, block=BLOCK, dtype=dtype)
        moved = dtype.itemsize * n + pk.nbytes(fmt, n, BLOCK)
        return Case(f"decode to {dtype.name}", fmt, *pair, lambda i: (payload(i, fmt, 1, n),), moved)

    def added(fmt: str) -> Case:
        pair = bound(pk.decode_add, reference.decode_add, fmt=fmt, block=BLOCK)
        moved = 4 * n + pk.nbytes(fmt, n, BLOCK)
        return Case("decode + add", fmt, *pair, lambda i: (payload(i, fmt, 1, n), data(i, n)), moved)

    return [case for fmt in pk.QUANTIZED for case in (*(plain(fmt, dtype) for dtype in DECODED), added(fmt))]


def nf4_payload(index: int, n: int) -> jax.Array:
    """A random nf4 payload uint8[1, ...] with scales near 0.01."""
    scales, units, end = nf4_sections(n, NF4_BLOCK)
    key = jax.random.key(index)
    raw = jax.random.randint(key, (1, units - scales), 150, 255, jnp.uint8)
    unit = jnp.full((1, (end - units) // 4), 0.0117 / 200**3, jnp.float32)
    words = jax.lax.bitcast_convert_type(unit, jnp.uint8).reshape(1, -1)
    return jnp.concatenate([jax.random.bits(key, (1, scales), jnp.uint8), raw, words], axis=1)


def nf4_cases(n: int) -> list[Case]:
    """The decoder of the storage format, in blocks of 64. XLA encodes it."""
    size = pk.nf4_bytes(n, NF4_BLOCK)

    def decode(dtype: jnp.dtype) -> Case:
        pair = bound(pk.decode_nf4, nf4_reference.decode_nf4, n=n, block=NF4_BLOCK, dtype=dtype)
        moved = dtype.itemsize * n + size
        return Case(f"decode to {dtype.name}", "nf4", *pair, lambda i: (nf4_payload(i, n),), moved)

    return list(map(decode, DECODED))


def sum_cases(n: int) -> list[Case]:
    """The fused reductions; their payloads together are as large as n bf16 elements."""

    def encoded(peers: int, fmt: str, out: str) -> Case:
        width = 2 * n * 8 // (pk.BITS[fmt] * peers) // (NODES * BLOCK) * BLOCK
        total = NODES * width
        options = {"rows_out": NODES, "n": width, "block": BLOCK, "rounding": "nearest", "seed": None}
        pair = bound(pk.decode_sum_encode, reference.decode_sum_encode, fmt_in=fmt, fmt_out=out, **options)
        moved = peers * pk.nbytes(fmt, total, BLOCK) + NODES * pk.nbytes(out, width, BLOCK)
        name = fmt if fmt == out else f"{fmt} to {out}"
        kernel = f"decode + sum of {peers} + encode"
        return Case(kernel, name, *pair, lambda i: (payload(i, fmt, peers, total),), moved)

    def whole(rotation: int, fmt: str) -> Case:
        m = 2 * n * 8 // (pk.BITS[fmt] * 8) // BLOCK * BLOCK
        options = {"fmt": fmt, "n": m, "block": BLOCK, "rotation": rotation, "scale": 0.125}
        pair = bound(pk.decode_sum, reference.decode_sum, **options)
        name = "decode + sum of 8" + ", rotated" * bool(rotation)
        return Case(
            name, fmt, *pair, lambda i: (payload(i, fmt, 8, m),), 8 * pk.nbytes(fmt, m, BLOCK) + 4 * m
        )

    pairs = [*zip(pk.QUANTIZED, pk.QUANTIZED, strict=True), ("int8", "int4")]
    return [
        *(encoded(peers, fmt, out) for peers in PEERS for fmt, out in pairs),
        *(whole(rotation, fmt) for rotation in (0, 32) for fmt in pk.QUANTIZED),
    ]


def program(fn: Callable, sets: list[tuple]) -> Callable:
    """The compiled program that applies `fn` to each of several argument tuples."""
    return jax.jit(lambda sets: [fn(*args) for args in sets]).lower(sets).compile()


def seconds(compiled: Callable, sets: list[tuple], rounds: int = 7) -> tuple[float, float]:
    """Median time of one call of a compiled program's function, and (max - min) / median."""
    jax.block_until_ready(compiled(sets))
    if sum(array.nbytes for array in sets[0]) <= SMALL:
        times = [_device_seconds(compiled, sets) for _ in range(3)]
    else:
        found = harness.rounds_of(lambda: compiled(sets), 0.02 * rounds, rounds=rounds)
        times = [seconds / len(sets) for seconds in found]
    return harness.relative_spread(times)


def _device_seconds(compiled: Callable, sets: list[tuple]) -> float:
    """Kernel time of one call of a compiled program's function, from a trace."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(sets))
        (path,) = Path(folder).glob("**/*.xplane.pb")
        spent = sum(event.end - event.start for event in read_events(path))
    return spent / 1e9 / len(sets)


@cache
def copy_program(n: int) -> tuple[Callable, list[tuple]]:
    """A compiled device copy of n bf16 elements, and its arguments."""
    sets = [(data(i, n),) for i in range(copies(2 * n))]
    return program(jnp.copy, sets), sets


def copy_rate(n: int) -> float:
    """Bytes per second, read and written, of a device copy of n bf16 elements."""
    return 4 * n / seconds(*copy_program(n))[0]


def copies(size: int) -> int:
    """The number of inputs of `size` bytes to rotate among, so that no call finds its own in the cache."""
    return max(3, min(32, (256 << 20) // size))


def measure(case: Case, n: int, megabytes: int, with_xla: bool) -> Result:
    """Run one case next to the copy and, if asked, to XLA's code for the reference."""
    sets = [case.inputs(i) for i in range(copies(2 * n))]
    before = copy_rate(n)
    time_kernel, spread = seconds(program(case.run, sets), sets)
    after = copy_rate(n)
    xla = None
    if with_xla:
        xla = case.bytes_moved / seconds(program(case.xla, sets), sets, rounds=3)[0] / 1e9
    rate, copy = case.bytes_moved / time_kernel, (before + after) / 2
    return Result(case.kernel, case.fmt, megabytes, rate / 1e9, rate / copy, spread, xla, copy / 1e9)


def draw(results: list[Result], path: Path) -> None:
    """Bars of every kernel's share of the copy rate, at the largest size measured."""
    from matplotlib.figure import Figure

    size = max(result.megabytes for result in results)
    rows = [result for result in results if result.megabytes == size]
    figure = Figure(figsize=(8, 0.22 * len(rows) + 1), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    axes.barh(places, [100 * row.of_copy for row in rows], label="kernel")
    shares = [100 * (row.xla_gb_per_s or 0) / row.copy_gb_per_s for row in rows]
    axes.barh(places, shares, height=0.4, label="XLA")
    axes.set_yticks(places, [f"{row.kernel}, {row.fmt}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel(f"% of the copy rate, {size} MB")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Parse the command line, measure, report."""
    parser = harness.parser(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[256], help="bf16 bytes of the data")
    parser.add_argument("--formats", nargs="+", default=[*pk.QUANTIZED, *pk.STORED, "int8 to int4"])
    parser.add_argument("--no-xla", action="store_true", help="do not measure XLA's version")
    parser.add_argument("--out", type=Path, default=Path("bench_kernels"))
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit("this measures CUDA kernels: run it on a machine with a GPU")
    print(f"{device.device_kind}, jax {jax.__version__}, {pk.backend_report()['cuda']}")
    results = []
    for megabytes in options.megabytes:
        n = megabytes << 19
        copy_program.cache_clear()
        for case in [*encode_cases(n), *decode_cases(n), *nf4_cases(n), *sum_cases(n)]:
            if case.fmt not in options.formats:
                continue
            result = measure(case, n, megabytes, not options.no_xla)
            results.append(result)
            xla = f"{result.xla_gb_per_s:6.0f}" if result.xla_gb_per_s else "     -"
            print(
                f"{megabytes:5d} MB  {result.kernel:28s} {result.fmt:12s} {result.gb_per_s:6.0f} GB/s"
                f"  {100 * result.of_copy:5.1f}% of copy {result.copy_gb_per_s:5.0f}"
                f"  XLA {xla}  spread {100 * result.spread:.1f}%",
                flush=True,
            )
    report = {"device": device.device_kind, "jax": jax.__version__, "block": BLOCK, "nf4 block": NF4_BLOCK}
    harness.write(options.out.with_suffix(".json"), report | {"results": results})
    draw(results, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
