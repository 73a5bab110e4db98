#!/usr/bin/env python3
"""Time the gated delta rule on this GPU in bf16, with the 16 key and 32 value heads of 128 of Qwen3.5-9B.

With --channels it times Kimi's delta rule, with 32 key heads. With --errors it prints the relative errors of
bf16 against the specification in fp32: of the output, and of the gradients for queries, keys, values, decays
and betas.

    python3 scripts/bench/delta_rule.py --tokens 8192 32768
    python3 scripts/bench/delta_rule.py --tokens 8192 32768 --peer      # flash-linear-attention

Run the two one after the other: PyTorch's Triton and jax-triton do not share a process. The peer runs forward
only, unless --gradients asks for its backward pass, too. fla 0.6 refuses that of the gated rule on Hopper
with Triton 3.4 to 3.7, which compiles it to wrong results (its issue 640). Here it runs, for its time only.
"""

# PyTorch and flash-linear-attention are not dependencies of zerojax.
from collections.abc import Callable
from typing import Any

import harness

HEADS, DIM = 32, 128


def milliseconds(run: Callable[[], Any], wait: Callable[[Any], Any] | None = None) -> tuple[float, float]:
    """The median of five rounds, and (max - min) / median."""
    return harness.relative_spread([1e3 * s for s in harness.rounds_of(run, 0.5, wait=wait)])


def ours(tokens: int, *, channels: bool, errors: bool, by_xla: bool) -> dict[str, tuple[float, float]]:
    """Times forward, and forward and backward; or prints the errors. XLA compiles the specification."""
    import jax
    import jax.numpy as jnp

    import pallas_kernels
    from pallas_kernels import delta_chunks_reference

    keys = jax.random.split(jax.random.key(0), 6)
    each, key_heads = (1, tokens, HEADS), HEADS if channels else HEADS // 2
    query, key = (jax.random.normal(of, (1, tokens, key_heads, DIM)) for of in keys[:2])
    key /= jnp.linalg.norm(key, axis=-1, keepdims=True)
    value, seen = (jax.random.normal(of, (*each, DIM), jnp.bfloat16) for of in keys[2:4])
    decay = -0.1 * jax.random.exponential(keys[4], (*each, DIM) if channels else each)
    beta = jax.random.uniform(keys[5], each)
    rows = [*(x.astype(jnp.bfloat16) for x in (query / DIM, key, value)), decay, beta]
    del query, key, value, decay
    others = jnp.zeros((1, tokens), jnp.int32), jnp.zeros((1, HEADS, DIM, DIM), jnp.float32)

    def programs(rule: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        def forward(*rows: jax.Array) -> jax.Array:
            return rule(*rows, *others)[0]

        def loss(*rows: jax.Array) -> jax.Array:
            return jnp.sum(forward(*rows).astype(jnp.float32) * seen)

        return {"forward": jax.jit(forward), "with gradients": jax.jit(jax.grad(loss, range(5)))}

    def error(x: jax.Array, exact: jax.Array) -> jax.Array:
        return jnp.linalg.norm((x.astype(jnp.float32) - exact).ravel()) / jnp.linalg.norm(exact.ravel())

    kernels = programs(delta_chunks_reference.delta_rule if by_xla else pallas_kernels.delta_rule)
    if not errors:
        return {name: milliseconds(lambda run=run: run(*rows)) for name, run in kernels.items()}
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in rows]
        for name, run in programs(delta_chunks_reference.delta_rule).items():
            both = jax.tree.leaves(kernels[name](*rows)), jax.tree.leaves(run(*wide))
            found = [f"{jax.jit(error)(*pair):.1e}" for pair in zip(*both, strict=True)]
            print(f"{tokens} tokens, {name}: errors {', '.join(found)}", flush=True)
    return {}


def peers(tokens: int, *, channels: bool, gradients: bool) -> dict[str, tuple[float, float]]:
    """Times of flash-linear-attention, which has no fewer key heads than value heads."""
    import peer_blocks
    import torch

    if gradients:
        peer_blocks.tune_less(4)
    peer_blocks.prepare_fla()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, HEADS, *shape, device="cuda")

    query, key, value = (numbers(DIM).bfloat16() for _ in range(3))
    key = torch.nn.functional.normalize(key, dim=-1)
    decay, beta = -0.1 * numbers(*[DIM][:channels]).abs(), numbers().sigmoid().bfloat16()
    rows, seen = (query, key, value, decay, beta), numbers(DIM).bfloat16()

    def forward() -> torch.Tensor:
        rule = chunk_kda if channels else chunk_gated_delta_rule
        return rule(*rows, scale=1 / DIM)[0]

    def wait(_: object) -> None:
        torch.cuda.synchronize()

    with torch.no_grad():
        found = {"flash-linear-attention, forward": milliseconds(forward, wait)}
    if gradients:
        rows = tuple(x.detach().requires_grad_() for x in rows)
        both = milliseconds(lambda: torch.autograd.grad(forward(), rows, seen), wait)
        found["flash-linear-attention, with gradients"] = both
    return found


def main() -> None:
    """Print the times."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens of a row")
    parser.add_argument("--peer", action="store_true", help="time flash-linear-attention instead")
    parser.add_argument(
        "--gradients", action="store_true",
        help="with --peer: also backward; Triton tries at most four configurations of each kernel",
    )  # fmt: skip
    parser.add_argument("--errors", action="store_true", help="print errors instead of times")
    parser.add_argument("--channels", action="store_true", help="Kimi's rule: channels decay at own rates")
    parser.add_argument("--xla", action="store_true", help="the specification, compiled by XLA")
    options = parser.parse_args()
    for tokens in options.tokens:
        if options.peer:
            found = peers(tokens, channels=options.channels, gradients=options.gradients)
        else:
            found = ours(tokens, channels=options.channels, errors=options.errors, by_xla=options.xla)
        for name, (median, spread) in found.items():
            print(f"{tokens} tokens, {name}: {median:.3f} ms (spread {100 * spread:.0f}%)", flush=True)


if __name__ == "__main__":
    main()
