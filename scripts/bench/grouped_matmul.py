#!/usr/bin/env python3
"""Measure grouped matmuls, the products of a mixture of experts, beside PyTorch's on one GPU.

    python3 scripts/bench/grouped_matmul.py            # about 100 s on an H100
    python3 scripts/bench/grouped_matmul.py --small    # what runs on a CPU, in small

Every product is measured by itself: forward (``out``), the gradient of the rows (``dx``) and the gradient of
the matrices (``dw``). "all" is the rate of the three. TFLOP/s count the rows that belong to a group. Groups
are drawn at random (each row's at once), or one expert takes half of the rows. Errors are relative to fp32,
in norm, over some of the results. "temp MB" is what the compiled program needs beside its inputs and outputs.
What fails prints its error, and the rest goes on; after ``--budget`` seconds the process ends. ``--triton``
measures Triton's kernels beside Pallas', which Hopper would take, and shapes that Pallas' do not support.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import attempt, milliseconds
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.mosaic import grouped
from pallas_kernels.mosaic.grouped import Tuning
from zerojax.matmul.grouped import grouped_matmul

ON_GPU = jax.default_backend() == "gpu"
PRODUCTS = ("out", "dx", "dw")


@dataclass(frozen=True)
class Case:
    """Shapes of a layer's experts."""

    groups: int
    k: int
    n: int
    rows: int

    def __str__(self) -> str:
        return f"{self.groups} x ({self.k} x {self.n}), {self.rows} rows"

    @property
    def flops(self) -> int:
        """Of one product."""
        return 2 * self.rows * self.k * self.n

    def sizes(self, skewed: bool, seed: int = 0) -> np.ndarray:
        """Rows of each group; int32, and their sum is ``rows``."""
        rng = np.random.default_rng(seed)
        taken = self.rows // 2 if skewed else 0
        sizes = rng.multinomial(self.rows - taken, np.full(self.groups, 1 / self.groups))
        sizes[self.groups // 2] += taken
        return sizes.astype(np.int32)

    def arrays(self) -> dict[str, Array]:
        """bf16, normal, with a deviation of 1."""
        shapes = {"x": (self.rows, self.k), "w": (self.groups, self.k, self.n), "g": (self.rows, self.n)}
        keys = jax.random.split(jax.random.key(1), 3)
        make = jax.jit(jax.random.normal, static_argnums=(1, 2))
        return {
            name: make(key, shape, jnp.bfloat16)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }


CASES = (
    Case(8, 4096, 14336, 16384),
    Case(128, 2048, 768, 131072),
    Case(64, 2048, 1408, 98304),
)
TRITON_CASES = (
    *CASES,
    Case(32, 2880, 5760, 65536),
    Case(5, 3072, 8192, 16384),
    Case(160, 5120, 1536, 98304),
    Case(64, 2048, 1388, 98304),
    Case(64, 2048, 100, 98304),
)
SMALL = (Case(4, 64, 192, 300),)

Product = Callable[[Array, Array, Array, Array], Array | None]
"""Of x, w, the gradient of the output, and sizes."""

Make = Callable[[], dict[str, Product]]


def by_zerojax() -> dict[str, Product]:
    """What zerojax computes, through its public function."""

    def out(x: Array, w: Array, g: Array, sizes: Array) -> Array:
        del g
        return grouped_matmul(x, w, sizes)

    def dx(x: Array, w: Array, g: Array, sizes: Array) -> Array:
        return jax.vjp(lambda x: grouped_matmul(x, w, sizes), x)[1](g)[0]

    def dw(x: Array, w: Array, g: Array, sizes: Array) -> Array:
        return jax.vjp(lambda w: grouped_matmul(x, w, sizes), w)[1](g)[0]

    return {"out": out, "dx": dx, "dw": dw}


def by_triton() -> dict[str, Product]:
    """Triton's kernels, also where Pallas' would run."""
    from pallas_kernels.triton import calls

    return {
        "out": lambda x, w, g, sizes: calls.grouped_rows(x, w, sizes, transposed=False),
        "dx": lambda x, w, g, sizes: calls.grouped_rows(g, w, sizes, transposed=True),
        "dw": lambda x, w, g, sizes: calls.grouped_sums(x, g, sizes),
    }


def by_kernels(tuning: Tuning) -> dict[str, Product]:
    """The kernels, tuned by hand."""

    def out(x: Array, w: Array, g: Array, sizes: Array) -> Array:
        del g
        return grouped.rows_product(x, w, grouped.rows_plan(sizes, len(x)), transposed=False, tuning=tuning)

    def dx(x: Array, w: Array, g: Array, sizes: Array) -> Array:
        del x
        return grouped.rows_product(g, w, grouped.rows_plan(sizes, len(g)), transposed=True, tuning=tuning)

    def dw(x: Array, w: Array, g: Array, sizes: Array) -> Array:
        del w
        plan = grouped.sums_plan(sizes, x.shape[1], g.shape[1], tuning)
        return grouped.sums_of_products(x, g, plan, groups=len(sizes), tuning=tuning)

    return {"out": out, "dx": dx, "dw": dw}


def by_jax() -> dict[str, Product]:
    """The kernel that comes with jax."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    blocks: Any = {
        "block_m": 128,
        "block_n": 128,
        "block_k": 64,
        "max_concurrent_steps": 5,
        "grid_block_n": 8,
    }

    def out(x: Array, w: Array, g: Array, sizes: Array) -> Array:
        del g
        return ragged_dot(x, w, group_sizes=sizes, **blocks)

    def dx(x: Array, w: Array, g: Array, sizes: Array) -> Array:
        del x
        return ragged_dot(g, w, group_sizes=sizes, transpose_rhs=True, **blocks)

    return {"out": out, "dx": dx}


BASE = Tuning()
TUNINGS = {
    "256 columns": BASE,
    "128 columns": replace(BASE, columns=128, stages=6),
}


def candidates(case: Case, kernels: bool, triton: bool) -> Iterator[tuple[str, Make]]:
    """What is compared, by name; what may never end comes last."""
    if not kernels:
        yield "zerojax", by_zerojax
        if triton:
            yield "Triton", by_triton
    elif ON_GPU:
        if case.groups <= 8:
            yield "jax ragged_dot_mgpu", by_jax
        for name, tuning in TUNINGS.items():
            if tuning.columns == BASE.columns or case.n % tuning.columns == 0:
                yield name, partial(by_kernels, tuning)


# --- checks


def expected(x: np.ndarray, w: np.ndarray, g: np.ndarray, sizes: np.ndarray) -> dict[str, np.ndarray]:
    """The three products, all fp32."""
    found = {"out": np.zeros_like(g), "dx": np.zeros_like(x), "dw": np.zeros_like(w)}
    stop = 0
    for group, size in enumerate(sizes):
        own = slice(stop, stop := stop + int(size))
        found["out"][own] = x[own] @ w[group]
        found["dx"][own] = g[own] @ w[group].T
        found["dw"][group] = x[own].T @ g[own]
    return found


@dataclass(frozen=True)
class Sample:
    """A part of the results, and what it is in fp32.

    Attributes:
        rows: which, ascending.
        columns: how many of the first ones.
        wanted: of each product.
    """

    rows: np.ndarray
    columns: int
    wanted: dict[str, np.ndarray]

    @classmethod
    def of(
        cls, arrays: Mapping[str, Array], sizes: np.ndarray, columns: int = 64, count: int = 512
    ) -> "Sample":
        """Rows at random, and the first columns."""
        rows = np.sort(np.random.default_rng(2).choice(int(sizes.sum()), count))
        counts = np.histogram(rows, np.concatenate([[0], np.cumsum(sizes)]))[0]
        x, w, g = (arrays[name] for name in ("x", "w", "g"))
        some_x, some_g = (as_numpy(array[rows]) for array in (x, g))
        out = expected(some_x, as_numpy(w[:, :, :columns]), some_g[:, :columns], counts)["out"]
        dx = expected(some_x[:, :columns], as_numpy(w[:, :columns]), some_g, counts)["dx"]
        narrow = np.zeros((len(sizes), columns, columns), np.float32)
        dw = expected(as_numpy(x[:, :columns]), narrow, as_numpy(g[:, :columns]), sizes)["dw"]
        return cls(rows, columns, {"out": out, "dx": dx, "dw": dw})

    def error(self, found: Array, product: str) -> float:
        """Of a product, relative, in norm."""
        c = self.columns
        own = as_numpy(found[:, :c, :c] if product == "dw" else found[self.rows, :c])
        wanted = self.wanted[product]
        return float(np.linalg.norm(own - wanted) / np.linalg.norm(wanted))


def as_numpy(array: Array) -> np.ndarray:
    """In fp32."""
    return np.asarray(array).astype(np.float32)


EDGES = (0, 1, 63, 64, 65, 0, 127, 128, 129, 700, 191)
"""Sizes that kernels may get wrong."""


def check(name: str, make: Make, k: int, n: int, **dtypes: DTypeLike) -> None:
    """Print the largest error over groups of awkward sizes, with NaN in the rows of nobody.

    ``dtypes`` are those of x, w and g that are not bf16.
    """
    sizes = np.array(EDGES, np.int32)
    total = int(sizes.sum())
    arrays = Case(len(sizes), k, n, total + 77).arrays()
    arrays |= {side: arrays[side].at[total:].set(jnp.nan) for side in "xg"}
    given = [arrays[side].astype(dtypes.get(side, jnp.bfloat16)) for side in "xwg"]
    texts: list[str] = []
    good = True
    x, w, g = map(as_numpy, given)
    wanted = expected(x, w, g, sizes)
    for product, function in make().items():
        found = as_numpy(jax.jit(function)(*given, jnp.asarray(sizes)))
        parts = (
            [(found[i], wanted[product][i]) for i in range(len(sizes))]
            if product == "dw"
            else [(found, wanted[product])]
        )
        error = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in parts)
        rest = 0.0 if product == "dw" else float(np.abs(found[total:]).max())
        good = good and error < 1e-2 and rest == 0
        texts.append(f"{product} {error:.1e}, rest {rest:.0e}")
    print(f"  check {k} x {n}: {name:<20} {'ok' if good else 'WRONG':<6} {'; '.join(texts)}", flush=True)


# --- rates


@dataclass(frozen=True)
class Compiled:
    """A product that is ready to run."""

    run: Callable[..., Array]
    temporary: int


def compile_product(function: Product, case: Case) -> Compiled:
    """For the shapes of a case; in a thread."""
    kinds = jax.eval_shape(case.arrays)
    sizes = jax.ShapeDtypeStruct((case.groups,), jnp.int32)
    compiled = jax.jit(function).lower(kinds["x"], kinds["w"], kinds["g"], sizes).compile()
    memory = compiled.memory_analysis()
    return Compiled(compiled, 0 if memory is None else memory.temp_size_in_bytes)


Compilations = dict[tuple[Case, str, str], "Future[Compiled]"]


def print_row(name: str, case: Case, times: Mapping[str, float], base: list[float], rest: str) -> None:
    """Rates of a candidate, and of all products relative to the first one."""
    rates = [f"{case.flops / times[p] / 1e9:7.1f}" if p in times else " " * 7 for p in PRODUCTS]
    whole = ""
    if len(times) == len(PRODUCTS):
        rate = len(PRODUCTS) * case.flops / sum(times.values()) / 1e9
        base.append(rate)
        whole = f"{rate:7.1f} {rate / base[0]:6.0%}"
    print(f"  {name:<22} {' '.join(rates)} {whole:>14} {rest}", flush=True)


def torch_arrays(case: Case) -> tuple[Any, Any, Any]:
    """What ``Case.arrays`` has, in PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    shapes = (case.rows, case.k), (case.groups, case.k, case.n), (case.rows, case.n)
    x, w, g = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    return x, w, g


def torch_milliseconds(run: Callable[[], object], seconds: float) -> float:
    """``milliseconds`` of PyTorch's products."""
    import torch  # pyright: ignore[reportMissingImports]

    return milliseconds(run, seconds, wait=lambda _: torch.cuda.synchronize())


def torch_times(case: Case, sizes: np.ndarray, seconds: float) -> dict[str, float]:
    """Of ``torch._grouped_mm``."""
    import torch  # pyright: ignore[reportMissingImports]

    x, w, g = torch_arrays(case)
    ends = torch.from_numpy(np.cumsum(sizes).astype(np.int32)).cuda()
    multiply: Any = torch._grouped_mm
    runs = {
        "out": lambda: multiply(x, w, offs=ends),
        "dx": lambda: multiply(g, w.transpose(-2, -1), offs=ends),
        "dw": lambda: multiply(x.t(), g, offs=ends),
    }
    times = {name: torch_milliseconds(run, seconds) for name, run in runs.items()}
    del x, w, g
    torch.cuda.empty_cache()
    return times


def quack_times(case: Case, sizes: np.ndarray, seconds: float) -> dict[str, float]:
    """Of quack-kernels (CuTe DSL), called from PyTorch with its own choice of tiles."""
    import torch  # pyright: ignore[reportMissingImports]
    from quack.gemm_interface import gemm  # pyright: ignore[reportMissingImports]

    x, w, g = torch_arrays(case)
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)).cuda()
    runs = {
        "out": lambda: gemm(x, w, cu_seqlens_m=bounds, tuned=False),
        "dx": lambda: gemm(g, w.transpose(-2, -1), cu_seqlens_m=bounds, tuned=False),
        "dw": lambda: gemm(x.t(), g, cu_seqlens_k=bounds, tuned=False),
    }
    return {name: torch_milliseconds(run, seconds) for name, run in runs.items()}


def measure_quack(case: Case, seconds: float) -> None:
    """Print a row for quack-kernels."""
    print_row("quack", case, quack_times(case, case.sizes(False), seconds), [], "")


def measure(case: Case, skewed: bool, names: list[str], compilations: Compilations, seconds: float) -> None:
    """Print a table of one case and one distribution of rows."""
    sizes = case.sizes(skewed)
    print(f"\n{case}, {'one takes half' if skewed else 'at random'}: {sizes.min()} to {sizes.max()} a group")
    columns = " ".join(f"{name:>7}" for name in (*PRODUCTS, "all"))
    print(f"  {'':<22} {columns} {'':>6} errors; temp MB")
    base: list[float] = []
    if ON_GPU:
        attempt(
            "torch._grouped_mm",
            lambda: print_row("torch._grouped_mm", case, torch_times(case, sizes, seconds), base, ""),
        )
    arrays = case.arrays()
    given = (arrays["x"], arrays["w"], arrays["g"], jnp.asarray(sizes))
    sample = Sample.of(arrays, sizes)

    def one(name: str) -> None:
        times: dict[str, float] = {}
        errors: list[str] = []
        temporary = 0
        for product in PRODUCTS:
            future = compilations.get((case, name, product))
            if future is None:
                continue
            compiled = future.result()
            errors.append(f"{sample.error(compiled.run(*given), product):.0e}")
            times[product] = milliseconds(lambda run=compiled.run: run(*given), seconds)
            temporary = max(temporary, compiled.temporary)
        print_row(name, case, times, base, f"{' '.join(errors)}; {temporary / 1e6:.2f}")

    for name in names:
        attempt(name, partial(one, name))


def common_options(description: str | None) -> argparse.ArgumentParser:
    """The options of this script and of ``grouped_fp8.py``."""
    parser = harness.parser(description)
    parser.add_argument("--small", action="store_true", help="few rows")
    parser.add_argument("--budget", type=float, default=110, help="seconds after which the process ends")
    parser.add_argument("--each", type=float, default=0.1, help="seconds of runs of each measurement")
    return parser


def main() -> None:
    """Check, measure and print."""
    begin = time.monotonic()
    parser = common_options(__doc__)
    parser.add_argument("--kernels", action="store_true", help="measure the kernels as tuned otherwise")
    parser.add_argument(
        "--triton", action="store_true", help="also measure Triton's kernels, and more shapes"
    )
    parser.add_argument("--quack", action="store_true", help="also measure quack-kernels")
    options = parser.parse_args()

    harness.end_after(options.budget)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    cases = SMALL if options.small else TRITON_CASES if options.triton else CASES
    compilations: Compilations = {}
    names: dict[Case, list[str]] = {}
    with ThreadPoolExecutor(12) as pool:
        for case in cases:
            for name, make in candidates(case, options.kernels, options.triton):
                names.setdefault(case, []).append(name)

                def submit(name: str = name, make: Make = make, case: Case = case) -> None:
                    for product, function in make().items():
                        compilations[case, name, product] = pool.submit(compile_product, function, case)

                attempt(name, submit)
        for case in cases:
            for (own, _, _), future in compilations.items():
                if own is case:
                    future.exception()  # waits, so that nothing compiles beside what is measured
            for name, make in candidates(case, options.kernels, options.triton):
                if case is cases[-1]:
                    attempt(name, partial(check, name, make, 256 if ON_GPU else 64, 384 if ON_GPU else 72))
            for skewed in (False, True):
                measure(case, skewed, names[case], compilations, options.each)
            print(f"[{time.monotonic() - begin:.0f} s]", flush=True)
    for case in cases if options.quack else ():
        print(f"\n{case}, at random")
        attempt("quack", partial(measure_quack, case, options.each))
    print(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
