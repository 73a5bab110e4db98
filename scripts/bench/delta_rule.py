#!/usr/bin/env python3
"""Time the gated delta rule on this GPU in bf16, with the 16 key and 32 value heads of 128 of Qwen3.5-9B.

    python3 scripts/bench/delta_rule.py --tokens 8192 32768
    python3 scripts/bench/delta_rule.py --tokens 8192 32768 --peer      # flash-linear-attention, forward

Run the two one after the other: PyTorch's Triton and jax-triton do not share a process.
"""

# pyright: reportMissingImports=false
# PyTorch and flash-linear-attention are not dependencies of zerojax.
import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

KEY_HEADS, HEADS, DIM = 16, 32, 128


def milliseconds(run: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[float, float]:
    """The median of five times ten calls, and (max - min) / median."""
    wait(run())  # compiles
    times = []
    for _ in range(5):
        start = time.perf_counter()
        wait([run() for _ in range(10)])
        times.append((time.perf_counter() - start) * 100)
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median


def ours(tokens: int) -> dict[str, tuple[float, float]]:
    """Forward, and forward and backward."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import pallas_kernels

    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, tokens, KEY_HEADS, DIM), np.float32)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value, seen = rng.standard_normal((2, 1, tokens, HEADS, DIM), np.float32)
    rows = [jnp.asarray(x, jnp.bfloat16) for x in (query / DIM, key, value)]
    rows.append(jnp.asarray(-0.1 * rng.exponential(size=(1, tokens, HEADS)), jnp.float32))
    rows.append(jnp.asarray(rng.uniform(size=(1, tokens, HEADS)), jnp.float32))
    others = jnp.zeros((1, tokens), jnp.int32), jnp.zeros((1, HEADS, DIM, DIM), jnp.float32)

    def forward(*rows: jax.Array) -> jax.Array:
        query, key, value, log_decay, beta = rows
        return pallas_kernels.delta_rule(query, key, value, log_decay, beta, *others)[0]

    def loss(*rows: jax.Array) -> jax.Array:
        return jnp.sum(forward(*rows).astype(jnp.float32) * seen)

    programs = {"forward": jax.jit(forward), "with gradients": jax.jit(jax.grad(loss, range(5)))}
    return {
        name: milliseconds(lambda run=run: run(*rows), jax.block_until_ready)
        for name, run in programs.items()
    }


def peers(tokens: int) -> dict[str, tuple[float, float]]:
    """Forward by flash-linear-attention, which has no fewer key heads than value heads."""
    import torch
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens of a row")
    parser.add_argument("--peer", action="store_true", help="time flash-linear-attention instead")
    options = parser.parse_args()
    for tokens in options.tokens:
        for name, (median, spread) in (peers if options.peer else ours)(tokens).items():
            print(f"{tokens} tokens, {name}: {median:.3f} ms (spread {100 * spread:.0f}%)", flush=True)


if __name__ == "__main__":
    main()
