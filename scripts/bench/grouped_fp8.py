#!/usr/bin/env python3
"""Measure the products of a mixture of experts in fp8 beside those in bf16, on one Hopper GPU.

    python3 scripts/bench/grouped_fp8.py            # about 100 s on an H100
    python3 scripts/bench/grouped_fp8.py --small    # what runs on a CPU, in small

Of each case: the forward product (``out``) and the gradient of the rows (``dx``), in bf16, in fp8 and by
``torch._scaled_grouped_mm`` (e4m3 alone, a scale for each row, matrices laid out as it reads them);
transposing and casting by themselves; then the whole of a layer's experts, forward and backward. Errors are
relative to fp32 of the same codes. The options are those of ``grouped_matmul.py``.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grouped_matmul as bench
import jax
import jax.numpy as jnp
import numpy as np
from grouped_matmul import CASES, SMALL, Case, Run, Sample
from jax import Array

from pallas_kernels import grouped_rows, grouped_rows_fp8
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
    """What is measured; a layer's gate has the codes of its up matrix."""
    in_fp8 = partial(grouped_rows_fp8, dtype=jnp.bfloat16)
    whole = partial(layer, per_token=PER_TOKEN.get(case.groups, 2), count=case.groups)
    return [
        Run("bf16 out", partial(grouped_rows, transposed=False), ("x", "w", "sizes"), "out"),
        Run("bf16 dx", partial(grouped_rows, transposed=True), ("g", "w", "sizes"), "dx"),
        Run("fp8 out", partial(in_fp8, transposed=False), ("x8", "w8", "sizes", "scale"), "out"),
        Run("fp8 dx", partial(in_fp8, transposed=True), ("g8", "w8", "sizes", "scale"), "dx"),
        Run("  transposing the matrices", lambda w: jnp.swapaxes(w, 1, 2), ("w8",), flops=0),
        Run("  casting rows to e4m3", cast_rows, ("x",), flops=0),
        Run("layer in bf16", whole(False), ("u", "u", "d", "tokens", "experts"), flops=9),
        Run("layer in fp8", whole(True), ("u8", "u8", "d8", "tokens", "experts"), flops=9),
    ]


def arrays_of(case: Case, sizes: np.ndarray) -> dict[str, Array]:
    """The operands in bf16 and as fp8 codes; ``sizes`` are the groups' sizes."""
    found = bench.arrays_of(case, sizes)
    cast = jax.jit(lambda a, dtype: a.astype(dtype), static_argnums=1)
    found |= {"x8": cast(found["x"], E4M3), "g8": cast(found["g"], E5M2), "w8": cast(found["w"], E4M3)}
    per_token = PER_TOKEN.get(case.groups, 2)
    tokens = case.rows // per_token
    rng = np.random.default_rng(4)
    experts = np.argsort(rng.random((tokens, case.groups)), axis=1)[:, :per_token].astype(np.int32)
    small = jax.jit(lambda w: (w / 64).astype(jnp.bfloat16))
    found |= {"u": small(found["w"]), "d": small(jnp.swapaxes(found["w"], 1, 2))}
    found |= {"tokens": found["x"][:tokens], "experts": jnp.asarray(experts), "scale": jnp.float32(SCALE)}
    as_codes = jax.jit(lambda w: jax.lax.bitcast_convert_type((w * 64).astype(E4M3), jnp.uint8))
    return found | {"u8": as_codes(found["u"]), "d8": as_codes(found["d"])}


def error_of(run: Run, found: Any, arrays: Mapping[str, Array], sizes: np.ndarray) -> float:
    """The error of a product, in fp8 against the same codes."""
    if not run.name.startswith("fp8"):
        return bench.error_of(run, found, arrays, sizes)
    codes = {side: arrays[f"{side}8"] for side in "xwg"}
    return Sample.of(codes, sizes).error(found / SCALE, run.product)


def torch_runs(case: Case, sizes: np.ndarray) -> dict[str, Callable[[], Any]]:
    """The products by ``torch._grouped_mm`` and ``torch._scaled_grouped_mm``."""
    import torch

    ends = torch.from_numpy(np.cumsum(sizes).astype(np.int32)).cuda()
    x, w, g = bench.torch_arrays(case)
    x8, g8, w8 = (a.to(torch.float8_e4m3fn) for a in (x, g, w))
    t8 = w8.transpose(-2, -1).contiguous().transpose(-2, -1)
    ones = torch.ones(case.rows, device="cuda")
    by_n, by_k = (torch.ones((case.groups, m), device="cuda") for m in (case.n, case.k))
    options: dict[str, Any] = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return {
        "torch bf16 out": lambda: torch._grouped_mm(x, w, offs=ends),
        "torch bf16 dx": lambda: torch._grouped_mm(g, w.transpose(-2, -1), offs=ends),
        "torch fp8 out": lambda: torch._scaled_grouped_mm(x8, t8, ones, by_n, **options),
        "torch fp8 dx": lambda: torch._scaled_grouped_mm(g8, w8.transpose(-2, -1), ones, by_k, **options),
    }


def main() -> None:
    """Measure and print."""
    options = bench.parser(__doc__).parse_args()
    contest = bench.Contest(runs_of, arrays_of, error_of, torch_runs)
    contest.race(SMALL if options.small else CASES, options)


if __name__ == "__main__":
    main()
