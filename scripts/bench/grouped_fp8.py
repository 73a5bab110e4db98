#!/usr/bin/env python3
"""Measure the products of a mixture of experts in fp8 beside those in bf16, on one Hopper GPU.

    python3 scripts/bench/grouped_fp8.py            # about 100 s on an H100
    python3 scripts/bench/grouped_fp8.py --small    # what runs on a CPU, in small

Of each case: the forward product (``out``) and the gradient of the rows (``dx``), in bf16, in fp8 and by
``torch._scaled_grouped_mm`` (e4m3 alone, a scale for each row, matrices laid out as it reads them); ``out``
of matrices that were transposed before; transposing and casting by themselves; then the whole of a layer's
experts, forward and backward. Rates are TFLOP/s, errors relative to fp32 of the same codes, in norm. What
fails prints its error, and the rest goes on; after ``--budget`` seconds the process ends.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import grouped_matmul as bench
import harness
import jax
import jax.numpy as jnp
import numpy as np
from grouped_matmul import CASES, ON_GPU, SMALL, Case, Sample
from harness import attempt, milliseconds
from jax import Array

from pallas_kernels import grouped_rows, grouped_rows_fp8
from pallas_kernels.mosaic import grouped
from pallas_kernels.mosaic.grouped import Tuning
from zerojax.experts.mlp import ExpertWeights, Plan, mlp
from zerojax.experts.rows import rows_of
from zerojax.matmul import fp8
from zerojax.matmul.grouped import Matrices
from zerojax.matmul.operand import Fp8Operand

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SCALE = 0.25
"""The factor of the sums of fp8 products."""

PER_TOKEN = {8: 2, 128: 8, 64: 6}
"""Experts of a token, by their number."""


@dataclass(frozen=True)
class Run:
    """Something to compile and time.

    Attributes:
        name: in the table.
        function: of arrays.
        arrays: their names.
        flops: relative to one product; 0 where a rate would mean nothing.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[str, ...]
    flops: float = 1


def in_fp8(transposed: bool) -> Callable[..., Array]:
    """The public function."""

    def run(x: Array, w: Array, sizes: Array, scale: Array) -> Array:
        return grouped_rows_fp8(x, w, sizes, scale, transposed=transposed, dtype=jnp.bfloat16)

    return run


def tuned(tuning: Tuning) -> Callable[..., Array]:
    """The kernel by itself."""

    def run(x: Array, w: Array, sizes: Array, scale: Array) -> Array:
        plan = grouped.rows_plan(sizes, len(x))
        return grouped.rows_product(x, w, plan, scale.reshape(1), transposed=True, tuning=tuning)

    return run


def layer(codes: bool, per_token: int, count: int) -> Callable[..., Any]:
    """Value and gradients of a layer's experts."""

    def loss(own: ExpertWeights, x: Array, weights: Array, experts: Array) -> Array:
        rows = rows_of(experts, 0, count, experts.size)
        out = mlp(Plan("swiglu", experts.size, 1, True), x, weights, own, rows)
        return jnp.sum(jnp.square(jnp.asarray(out, jnp.float32)))

    def run(gate: Array, up: Array, down: Array, x: Array, experts: Array) -> Any:
        scale = jnp.float32(64)

        def matrices(w: Array) -> Matrices:
            return Fp8Operand(w, jnp.zeros(w.shape, jnp.bfloat16), scale, "w") if codes else w

        own = ExpertWeights(matrices(gate), matrices(up), matrices(down))
        weights = jnp.full(experts.shape, 1 / per_token, jnp.float32)
        found, of_x = jax.grad(loss, (0, 1), allow_int=True)(own, x, weights, experts)
        return [w.gradient if codes else w for w in found[:3]], of_x

    return run


def cast_rows(x: Array) -> tuple[Array, Array]:
    """Rows in e4m3."""
    scale = fp8.scale_of(x, E4M3)
    return fp8.cast(x, scale, E4M3), scale


def runs_of(case: Case) -> list[Run]:
    """What is measured."""
    runs = [
        Run("bf16 out", partial(grouped_rows, transposed=False), ("x", "w", "sizes")),
        Run("bf16 dx", partial(grouped_rows, transposed=True), ("g", "w", "sizes")),
        Run("fp8 out", in_fp8(False), ("x8", "w8", "sizes", "scale")),
        Run("fp8 dx", in_fp8(True), ("g8", "w8", "sizes", "scale")),
        Run("fp8 out, transposed before", in_fp8(True), ("x8", "t8", "sizes", "scale")),
        Run("  transposing the matrices", lambda w: jnp.swapaxes(w, 1, 2), ("w8",), 0),
        Run("  casting rows to e4m3", cast_rows, ("x",), 0),
        Run("layer in bf16", layer(False, PER_TOKEN.get(case.groups, 2), case.groups),
            ("w", "u", "d", "tokens", "experts"), 9),
        Run("layer in fp8", layer(True, PER_TOKEN.get(case.groups, 2), case.groups),
            ("w8", "u8", "d8", "tokens", "experts"), 9),
    ]  # fmt: skip
    if ON_GPU:
        tunings = (
            Tuning(band=4),
            Tuning(band=16),
            Tuning(columns=128, stages=6),
            Tuning(columns=192, stages=5),
        )
        for tuning in tunings:
            if case.n % tuning.columns == 0 or tuning.columns == 256:
                name = f"  {tuning.columns} columns, {tuning.stages} stages, band {tuning.band}"
                runs.append(Run(name, tuned(tuning), ("x8", "t8", "sizes", "scale")))
    return runs


def arrays_of(case: Case, sizes: np.ndarray) -> dict[str, Array]:
    """The operands in bf16 and as fp8 codes; ``sizes`` are the groups' sizes."""
    found = case.arrays()
    cast = jax.jit(lambda a, dtype: a.astype(dtype), static_argnums=1)
    found |= {"x8": cast(found["x"], E4M3), "g8": cast(found["g"], E5M2), "w8": cast(found["w"], E4M3)}
    found["t8"] = jax.jit(lambda w: jnp.swapaxes(w, 1, 2))(found["w8"])
    per_token = PER_TOKEN.get(case.groups, 2)
    tokens = case.rows // per_token
    rng = np.random.default_rng(4)
    experts = np.argsort(rng.random((tokens, case.groups)), axis=1)[:, :per_token].astype(np.int32)
    small = jax.jit(lambda w: (w / 64).astype(jnp.bfloat16))
    found |= {"u": small(found["w"]), "d": small(jnp.swapaxes(found["w"], 1, 2))}
    found |= {"tokens": found["x"][:tokens], "experts": jnp.asarray(experts), "scale": jnp.float32(SCALE)}
    found["sizes"] = jnp.asarray(sizes)
    as_codes = jax.jit(lambda w: jax.lax.bitcast_convert_type((w * 64).astype(E4M3), jnp.uint8))
    return found | {"u8": as_codes(found["u"]), "d8": as_codes(found["d"])}


def of_layer(run: Run, arrays: dict[str, Any]) -> list[Any]:
    """The arguments of a run: a layer's gate has the scale of the others."""
    given = [arrays[name] for name in run.arrays]
    if run.name.startswith("layer"):
        given[0] = arrays["u8" if "fp8" in run.name else "u"]
    return given


def products() -> dict[str, bench.Product]:
    """The public function's forward product and gradient of the rows, as if it had no scale."""
    scale = jnp.float32(SCALE)
    return {
        "out": lambda x, w, g, sizes: in_fp8(False)(x, w, sizes, scale) / SCALE,
        "dx": lambda x, w, g, sizes: in_fp8(True)(g, w, sizes, scale) / SCALE,
    }


def torch_runs(case: Case, sizes: np.ndarray, seconds: float) -> None:
    """Of ``torch._grouped_mm`` and ``torch._scaled_grouped_mm``."""
    import torch  # pyright: ignore[reportMissingImports]

    ends = torch.from_numpy(np.cumsum(sizes).astype(np.int32)).cuda()
    x, w, g = bench.torch_arrays(case)
    x8, g8, w8 = (a.to(torch.float8_e4m3fn) for a in (x, g, w))
    t8 = w8.transpose(-2, -1).contiguous().transpose(-2, -1)
    ones = torch.ones(case.rows, device="cuda")
    by_n, by_k = (torch.ones((case.groups, m), device="cuda") for m in (case.n, case.k))
    options: dict[str, Any] = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    runs = {
        "torch bf16 out": lambda: torch._grouped_mm(x, w, offs=ends),
        "torch bf16 dx": lambda: torch._grouped_mm(g, w.transpose(-2, -1), offs=ends),
        "torch fp8 out": lambda: torch._scaled_grouped_mm(x8, t8, ones, by_n, **options),
        "torch fp8 dx": lambda: torch._scaled_grouped_mm(g8, w8.transpose(-2, -1), ones, by_k, **options),
    }

    def one(name: str, run: Callable[[], Any]) -> None:
        took = bench.torch_milliseconds(run, seconds)
        print(f"  {name:<34} {took:8.3f} ms {case.flops / took / 1e9:8.1f}", flush=True)

    for name, run in runs.items():
        attempt(name, partial(one, name, run))
    del x, w, g, x8, g8, w8, t8
    torch.cuda.empty_cache()


def measure(case: Case, futures: dict[tuple[Case, str], "Future[Any]"], skewed: bool, seconds: float) -> None:
    """Print a table."""
    sizes = case.sizes(skewed)
    print(f"\n{case}, {'one takes half' if skewed else 'at random'}", flush=True)
    if ON_GPU and not skewed:
        attempt("torch", partial(torch_runs, case, sizes, seconds))
    arrays = arrays_of(case, sizes)
    exact = Sample.of(arrays, sizes)
    of_codes = Sample.of({side: arrays[f"{side}8"] for side in "xwg"}, sizes)

    def error(name: str, found: Array) -> str:
        product = "dx" if "dx" in name else "out"
        if "fp8" in name or "columns" in name:
            return f"{of_codes.error(found / SCALE, product):.0e}"
        return f"{exact.error(found, product):.0e}"

    def one(run: Run) -> None:
        compiled = futures[case, run.name].result()
        given = of_layer(run, arrays)
        found = compiled(*given)
        wrong = error(run.name, found) if run.flops == 1 else ""
        if run.flops == 9 and not all(bool(jnp.isfinite(a.astype(jnp.float32)).all()) for a in found[0]):
            wrong = "NOT FINITE"
        del found
        took = milliseconds(lambda: compiled(*given), seconds)
        rate = f"{run.flops * case.flops / took / 1e9:8.1f}" if run.flops else " " * 8
        print(f"  {run.name:<34} {took:8.3f} ms {rate} {wrong}", flush=True)

    for run in runs_of(case):
        if not skewed or (run.flops == 1 and not run.name.startswith(" ")):
            attempt(run.name, partial(one, run))


def main() -> None:
    """Check, measure and print."""
    begin = time.monotonic()
    parser = bench.common_options(__doc__)
    options = parser.parse_args()

    harness.end_after(options.budget)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for sides in ((256, 384), (384, 320)):  # sides of 64: decoded, where there is a kernel at all
        bench.check("fp8", products, *sides, x=E4M3, w=E4M3, g=E5M2)
    cases = SMALL if options.small else CASES
    with ThreadPoolExecutor(12) as pool:
        futures: dict[tuple[Case, str], Future[Any]] = {}
        for case in cases:
            kinds = jax.eval_shape(partial(arrays_of, case, case.sizes(skewed=False)))
            for run in runs_of(case):
                given = of_layer(run, kinds)
                futures[case, run.name] = pool.submit(
                    lambda run, given: jax.jit(run.function).lower(*given).compile(), run, given
                )
        for future in futures.values():
            future.exception()  # waits, so that nothing compiles beside what is measured
        print(f"[{time.monotonic() - begin:.0f} s]", flush=True)
        for case in cases:
            for skewed in (False, True):
                measure(case, futures, skewed, options.each)
            print(f"[{time.monotonic() - begin:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
