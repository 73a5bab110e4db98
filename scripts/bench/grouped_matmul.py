#!/usr/bin/env python3
"""Measure grouped matmuls, the products of a mixture of experts, beside PyTorch's on one GPU.

    python3 scripts/bench/grouped_matmul.py            # about 100 s on an H100
    python3 scripts/bench/grouped_matmul.py --small    # what runs on a CPU, in small

Every product is measured by itself: forward (``out``), the gradient of the rows (``dx``) and the gradient of
the matrices (``dw``). TFLOP/s count the rows that belong to a group. Groups are drawn at random (each row's
at once), or one expert takes half of the rows. Errors are relative to fp32, in norm, over a sample.
"temp MB" is what the compiled program needs beside its inputs and outputs. What fails prints its error, and
the rest goes on; after ``--budget`` seconds the process ends. ``--triton`` measures Triton's kernels beside
Pallas', which Hopper would take, and shapes that Pallas' do not support.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import attempt, milliseconds
from jax import Array

from zerojax.matmul.grouped import grouped_matmul

ON_GPU = jax.default_backend() == "gpu"


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

    def sizes(self, skewed: bool) -> np.ndarray:
        """Rows of each group; int32, and their sum is ``rows``."""
        taken = self.rows // 2 if skewed else 0
        sizes = np.random.default_rng(0).multinomial(self.rows - taken, np.full(self.groups, 1 / self.groups))
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
SMALL = (Case(4, 64, 192, 640),)


@dataclass(frozen=True)
class Run:
    """Something to compile and time.

    Attributes:
        name: in the table.
        function: of arrays.
        arrays: their names.
        product: "out", "dx" or "dw", whose error is measured; "" for none.
        flops: relative to one product; 0 where a rate would mean nothing.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[str, ...]
    product: str = ""
    flops: float = 1


def runs_of(case: Case, *, triton: bool = False) -> list[Run]:
    """The products by zerojax's public function, and by Triton's kernels also where Pallas' would run."""
    del case

    def gradient(number: int, x: Array, w: Array, sizes: Array, g: Array) -> Array:
        return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)[1](g)[number]

    both = ("x", "w", "sizes", "g")
    runs = [
        Run("zerojax out", grouped_matmul, both[:3], "out"),
        Run("zerojax dx", partial(gradient, 0), both, "dx"),
        Run("zerojax dw", partial(gradient, 1), both, "dw"),
    ]
    if not triton:
        return runs
    from pallas_kernels.triton import calls

    return [
        *runs,
        Run("Triton out", partial(calls.grouped_rows, transposed=False), ("x", "w", "sizes"), "out"),
        Run("Triton dx", partial(calls.grouped_rows, transposed=True), ("g", "w", "sizes"), "dx"),
        Run("Triton dw", calls.grouped_sums, ("x", "g", "sizes"), "dw"),
    ]


def arrays_of(case: Case, sizes: np.ndarray) -> dict[str, Array]:
    """The arrays of a case and the sizes of its groups."""
    return case.arrays() | {"sizes": jnp.asarray(sizes)}


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


def torch_arrays(case: Case) -> tuple[Any, Any, Any]:
    """What ``Case.arrays`` has, in PyTorch."""
    import torch

    shapes = (case.rows, case.k), (case.groups, case.k, case.n), (case.rows, case.n)
    x, w, g = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    return x, w, g


def torch_runs(case: Case, sizes: np.ndarray) -> dict[str, Callable[[], Any]]:
    """The products by ``torch._grouped_mm``."""
    import torch

    x, w, g = torch_arrays(case)
    ends = torch.from_numpy(np.cumsum(sizes).astype(np.int32)).cuda()
    multiply: Any = torch._grouped_mm
    return {
        "torch out": lambda: multiply(x, w, offs=ends),
        "torch dx": lambda: multiply(g, w.transpose(-2, -1), offs=ends),
        "torch dw": lambda: multiply(x.t(), g, offs=ends),
    }


@dataclass(frozen=True)
class Contest:
    """What is compared; ``race`` compiles and times it.

    Attributes:
        runs: of a case.
        arrays: of a case and the sizes of its groups; its arrays by name.
        error: of a run, relative; gets the run's result, the arrays and the sizes.
        torch: PyTorch's runs by name, of a case and the sizes.
    """

    runs: Callable[[Case], Sequence[Run]]
    arrays: Callable[[Case, np.ndarray], dict[str, Array]]
    error: Callable[[Run, Any, Mapping[str, Array], np.ndarray], float]
    torch: Callable[[Case, np.ndarray], dict[str, Callable[[], Any]]]

    def race(self, cases: Sequence[Case], options: argparse.Namespace) -> None:
        """Compile all runs of all cases at once, then time them one after another, and print a table."""
        begin = time.monotonic()
        harness.end_after(options.budget)
        print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
        with ThreadPoolExecutor(12) as pool:
            compiling = {
                (case, run.name): pool.submit(self._compiled, case, run)
                for case in cases
                for run in self.runs(case)
            }
        print(f"[{time.monotonic() - begin:.0f} s]", flush=True)
        for case in cases:
            compiled = {name: future.result for (own, name), future in compiling.items() if own is case}
            for skewed in (False, True):
                self._measure(case, skewed, compiled, options.each)
            print(f"[{time.monotonic() - begin:.0f} s]", flush=True)

    def _compiled(self, case: Case, run: Run) -> Any:
        kinds = jax.eval_shape(partial(self.arrays, case, case.sizes(skewed=False)))
        return jax.jit(run.function).lower(*(kinds[name] for name in run.arrays)).compile()

    def _measure(
        self, case: Case, skewed: bool, compiled: Mapping[str, Callable[[], Any]], seconds: float
    ) -> None:
        sizes = case.sizes(skewed)
        spread = "one takes half" if skewed else f"at random: {sizes.min()} to {sizes.max()} a group"
        print(f"\n{case}, {spread}")
        print(f"  {'':<34} {'ms':>8} {'TFLOP/s':>9} {'error':>6} {'temp MB':>8}", flush=True)
        if ON_GPU:
            attempt("torch", partial(self._measure_torch, case, sizes, seconds))
        arrays = self.arrays(case, sizes)

        def one(run: Run) -> None:
            program, given = compiled[run.name](), [arrays[name] for name in run.arrays]
            found = program(*given)
            error = f"{self.error(run, found, arrays, sizes):.0e}" if run.product else ""
            del found
            memory = program.memory_analysis()
            temporary = "" if memory is None else f"{memory.temp_size_in_bytes / 1e6:8.2f}"
            print_row(run, case, milliseconds(lambda: program(*given), seconds), f"{error:>6} {temporary}")

        for run in self.runs(case):
            attempt(run.name, partial(one, run))

    def _measure_torch(self, case: Case, sizes: np.ndarray, seconds: float) -> None:
        import torch

        for name, run in self.torch(case, sizes).items():
            ms = milliseconds(run, seconds, wait=lambda _: torch.cuda.synchronize())
            print_row(Run(name, run, ()), case, ms, "")
        torch.cuda.empty_cache()


def print_row(run: Run, case: Case, ms: float, rest: str) -> None:
    """Milliseconds and rate of a run, and further figures."""
    rate = f"{run.flops * case.flops / ms / 1e9:9.1f}" if run.flops else " " * 9
    print(f"  {run.name:<34} {ms:8.3f} {rate} {rest}", flush=True)


def error_of(run: Run, found: Any, arrays: Mapping[str, Array], sizes: np.ndarray) -> float:
    """The error of a product of bf16 arrays."""
    return Sample.of(arrays, sizes).error(found, run.product)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of this script and of ``grouped_fp8.py``."""
    made = harness.parser(description, budget=110.0, each=0.1)
    made.add_argument("--small", action="store_true", help="few rows")
    return made


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--triton", action="store_true", help="also measure Triton's kernels, and more shapes")
    options = made.parse_args()
    contest = Contest(partial(runs_of, triton=options.triton), arrays_of, error_of, torch_runs)
    contest.race(SMALL if options.small else TRITON_CASES if options.triton else CASES, options)


if __name__ == "__main__":
    main()
