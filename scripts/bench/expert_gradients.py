#!/usr/bin/env python3
"""Compare gradients of experts' matrices in fp8 with exact ones, in paired runs of a small mixture, on a CPU.

    python3 scripts/bench/expert_gradients.py            # three seeds: 15 minutes on two busy cores
    python3 scripts/bench/expert_gradients.py --steps 20 --seeds 1

The model predicts a byte of Python's standard library from the twelve before it: an embedding, two residual
mixtures of 16 experts with two for each byte, and a projection. 2.0M parameters, trained by Adam on 1024
bytes a step. Three variants see the same bytes in the same order: "exact" computes in fp32; "fp8" computes
the experts' products as zerojax does; "fp8, exact gradients" is "fp8", but the gradients of matrices are
products of rows that were not cast. The emulation on a CPU rounds as a GPU does, and sums in fp32.
"""

import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from pallas_kernels import grouped_sums
from zerojax.experts import ExpertWeights, RouterConfig, balance_loss, mix_experts, mlp
from zerojax.matmul import fp8, grouped
from zerojax.matmul.operand import Fp8Operand

WIDTH, HIDDEN, EXPERTS, CONTEXT, BATCH, LAYERS = 128, 128, 16, 12, 1024, 2
VARIANTS = ("fp8, exact gradients", "fp8", "exact")


def text() -> np.ndarray:
    """The bytes of the standard library's modules, by name."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch(data: np.ndarray, rng: np.random.Generator, count: int = BATCH) -> np.ndarray:
    """Windows of CONTEXT bytes and the byte to predict."""
    starts = rng.integers(0, len(data) - CONTEXT - 1, count)
    return data[starts[:, None] + np.arange(CONTEXT + 1)]


def initial(seed: int) -> dict[str, Any]:
    """Weights."""
    draw = partial(np.random.default_rng(seed).normal, 0.0)

    def normal(fan_in: int, *shape: int) -> Array:
        return jnp.asarray(draw(fan_in**-0.5, shape), jnp.float32)

    def layer() -> dict[str, Array]:
        wide, narrow = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
        own = {"gate": normal(WIDTH, *wide), "up": normal(WIDTH, *wide), "down": normal(4 * HIDDEN, *narrow)}
        return {"router": normal(WIDTH, WIDTH, EXPERTS), **own}

    return {
        "bytes": normal(1, CONTEXT, 256, WIDTH) / CONTEXT**0.5,
        "layers": [layer() for _ in range(LAYERS)],
        "head": normal(WIDTH, WIDTH, 256),
    }


@jax.custom_vjp
def operand(w: Array) -> Fp8Operand:
    """A matrix as codes, whose gradient is the matrix's."""
    scale = fp8.scale_for(jnp.max(jnp.abs(w)), fp8.E4M3)
    return Fp8Operand(fp8.encode(w, scale), jnp.zeros_like(w), scale, "w")


operand.defvjp(lambda w: (operand(w), None), lambda _, cotangent: (cotangent.gradient,))


def loss(weights: dict[str, Any], windows: Array, *, in_fp8: bool, balance: float = 0.01) -> Array:
    """The mean cross-entropy in nats a byte, plus the loss of balance."""
    x = jnp.sum(weights["bytes"][jnp.arange(CONTEXT), windows[:, :CONTEXT]], axis=1)
    total = jnp.float32(0)
    for layer in weights["layers"]:
        gate, up, down = (operand(layer[name]) if in_fp8 else layer[name] for name in ("gate", "up", "down"))
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        out, stats = mix_experts(normed, layer["router"], ExpertWeights(gate, up, down), 2, RouterConfig())
        x, total = x + out, total + balance_loss(stats)
    logits = x @ weights["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean() + balance * total


def exact_gradients(x: Any, w: Any, cotangent: Any, sizes: Array) -> tuple[Array, Array]:
    """``zerojax.matmul.grouped.gradients``, with the gradient of the matrices from what was not cast."""
    of_x = grouped.product(cotangent, w, sizes, transposed=True)
    return of_x, grouped_sums(x.rows, cotangent.rows, sizes)


def stepper(variant: str, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """A compiled step of a variant."""

    @jax.jit
    def step(weights: Any, state: Any, windows: Array) -> Any:
        value, grads = jax.value_and_grad(partial(loss, in_fp8=variant != "exact"))(weights, windows)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    def run(*args: Any) -> Any:
        replaced = exact_gradients if variant == "fp8, exact gradients" else grouped.gradients
        with mock.patch.object(mlp, "gradients", replaced):
            return step(*args)

    return run


def main() -> None:
    """Train and print a table."""
    options = harness.parser(__doc__, steps=200, seeds=3).parse_args()
    data = text()
    train, held = data[: -len(data) // 10], data[-len(data) // 10 :]
    validation = jnp.asarray(batch(held, np.random.default_rng(99), 8192), jnp.int32)
    tx = optax.adam(optax.warmup_cosine_decay_schedule(0, 3e-3, options.steps // 10, options.steps, 1e-4))
    found: dict[str, list[float]] = {}
    harness.table("variant", "seed", "validation loss", "seconds")
    for variant in VARIANTS:
        jax.clear_caches()  # JAX would reuse the other variant's backward pass
        step, evaluate = stepper(variant, tx), jax.jit(partial(loss, in_fp8=False, balance=0))
        for seed in range(options.seeds):
            begun, rng, weights = time.monotonic(), np.random.default_rng(1000 + seed), initial(seed)
            state = tx.init(weights)
            for _ in range(options.steps):
                weights, state, _ = step(weights, state, jnp.asarray(batch(train, rng), jnp.int32))
            found.setdefault(variant, []).append(float(evaluate(weights, validation)))
            harness.row(variant, seed, f"{found[variant][-1]:.4f}", f"{time.monotonic() - begun:.0f}")
    for variant in VARIANTS[1:]:
        apart = [f"{a / b - 1:+.2%}" for a, b in zip(found[variant], found[VARIANTS[0]], strict=True)]
        print(f"{variant} from {VARIANTS[0]}: {', '.join(apart)}")


if __name__ == "__main__":
    main()
