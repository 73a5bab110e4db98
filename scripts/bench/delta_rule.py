#!/usr/bin/env python3
"""Time the gated delta rule on this GPU in bf16, with the 16 key and 32 value heads of 128 of Qwen3.5-9B.

With --errors it prints the relative errors of bf16 against the specification in fp32: of the output, and of
the gradients for queries, keys, values, decays and betas.

    python3 scripts/bench/delta_rule.py --tokens 8192 32768
    python3 scripts/bench/delta_rule.py --tokens 8192 32768 --peer      # flash-linear-attention, forward

Run the two one after the other: PyTorch's Triton and jax-triton do not share a process.
"""

# pyright: reportMissingImports=false
# PyTorch and flash-linear-attention are not dependencies of zerojax.
import sys
from collections.abc import Callable
from typing import Any

import harness

KEY_HEADS, HEADS, DIM = 16, 32, 128


def milliseconds(run: Callable[[], Any], wait: Callable[[Any], Any] | None = None) -> tuple[float, float]:
    """The median of five rounds, and (max - min) / median."""
    return harness.relative_spread([1e3 * s for s in harness.rounds_of(run, 0.5, wait=wait)])


def ours(tokens: int, *, errors: bool) -> dict[str, tuple[float, float]]:
    """Times forward, and forward and backward; or prints the errors."""
    import jax
    import jax.numpy as jnp

    import pallas_kernels
    from pallas_kernels import delta_chunks_reference

    keys = jax.random.split(jax.random.key(0), 6)
    each = 1, tokens, HEADS
    query, key = (jax.random.normal(of, (1, tokens, KEY_HEADS, DIM)) for of in keys[:2])
    key /= jnp.linalg.norm(key, axis=-1, keepdims=True)
    value, seen = (jax.random.normal(of, (*each, DIM), jnp.bfloat16) for of in keys[2:4])
    decays = -0.1 * jax.random.exponential(keys[4], each), jax.random.uniform(keys[5], each)
    rows = [*(x.astype(jnp.bfloat16) for x in (query / DIM, key, value)), *decays]
    del query, key, value
    others = jnp.zeros((1, tokens), jnp.int32), jnp.zeros((1, HEADS, DIM, DIM), jnp.float32)

    def programs(rule: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        def forward(*rows: jax.Array) -> jax.Array:
            return rule(*rows, *others)[0]

        def loss(*rows: jax.Array) -> jax.Array:
            return jnp.sum(forward(*rows).astype(jnp.float32) * seen)

        return {"forward": jax.jit(forward), "with gradients": jax.jit(jax.grad(loss, range(5)))}

    def error(x: jax.Array, exact: jax.Array) -> jax.Array:
        return jnp.linalg.norm((x.astype(jnp.float32) - exact).ravel()) / jnp.linalg.norm(exact.ravel())

    kernels = programs(pallas_kernels.delta_rule)
    if not errors:
        return {name: milliseconds(lambda run=run: run(*rows)) for name, run in kernels.items()}
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in rows]
        for name, run in programs(delta_chunks_reference.delta_rule).items():
            both = jax.tree.leaves(kernels[name](*rows)), jax.tree.leaves(run(*wide))
            found = [f"{jax.jit(error)(*pair):.1e}" for pair in zip(*both, strict=True)]
            print(f"{tokens} tokens, {name}: errors {', '.join(found)}", flush=True)
    return {}


def peers(tokens: int) -> dict[str, tuple[float, float]]:
    """Forward by flash-linear-attention, which has no fewer key heads than value heads."""
    import torch

    sys.modules.setdefault("transformers", None)  # pyright: ignore[reportArgumentType]  (fla does without)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, HEADS, *shape, device="cuda")

    query, key, value = (numbers(DIM).bfloat16() for _ in range(3))
    key = torch.nn.functional.normalize(key, dim=-1)
    decay, beta = -0.1 * numbers().abs(), numbers().sigmoid().bfloat16()
    with torch.no_grad():
        return {
            "flash-linear-attention, forward": milliseconds(
                lambda: chunk_gated_delta_rule(query, key, value, decay, beta, scale=1 / DIM),
                lambda _: torch.cuda.synchronize(),
            )
        }


def main() -> None:
    """Print the times."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens of a row")
    parser.add_argument("--peer", action="store_true", help="time flash-linear-attention instead")
    parser.add_argument("--errors", action="store_true", help="print errors instead of times")
    options = parser.parse_args()
    for tokens in options.tokens:
        found = peers(tokens) if options.peer else ours(tokens, errors=options.errors)
        for name, (median, spread) in found.items():
            print(f"{tokens} tokens, {name}: {median:.3f} ms (spread {100 * spread:.0f}%)", flush=True)


if __name__ == "__main__":
    main()
