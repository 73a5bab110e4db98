#!/usr/bin/env python3
"""Measure where the time of a mixture of experts goes, on one GPU: Qwen3-30B-A3B's layer by default.

    python3 scripts/bench/experts.py             # about a minute on an H100
    python3 scripts/bench/experts.py --tokens 64 --width 32 --hidden 16 --experts 16   # in small, on a CPU

"alone" has all experts on this device. "of 8" is what a device of a node of eight does between collectives:
with an eighth of the experts, for the tokens of all eight. GB/s count what has to be read and written once.
"the rest" is the layer without its products: what a faster router, order, gather or sum could save.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import cast

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import gather_rows
from zerojax.experts import ExpertWeights, RouterConfig, mix_experts, route
from zerojax.experts.exchange import CAPACITY
from zerojax.experts.mlp import ACTIVATIONS
from zerojax.experts.rows import Window, rows_of, to_tokens
from zerojax.matmul.grouped import grouped_matmul

BF16 = jnp.bfloat16


def milliseconds(run: Callable[..., object], *args: object) -> float:
    """Milliseconds of a call."""
    return harness.milliseconds(lambda: run(*args), seconds=0.2)


def random(seed: int, *shape: int, dtype: DTypeLike = BF16) -> Array:
    """Normal, with a deviation of 0.1."""
    return (0.1 * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def parts(
    tokens: int, width: int, count: int, per_token: int, devices: int
) -> Iterator[tuple[str, float, float]]:
    """Name, milliseconds and bytes of the operations that move tokens to rows and back."""
    rng = np.random.default_rng(0)
    all_experts = count * devices
    chosen = np.argsort(rng.random((tokens, all_experts)), axis=1)[:, :per_token]
    experts = jnp.asarray(chosen, jnp.int32)
    length = tokens * per_token if devices == 1 else int(CAPACITY * tokens * per_token / devices)

    @jax.jit
    def tables(experts: Array) -> tuple[Array, ...]:
        rows = rows_of(experts, 0, count, 2 * tokens * per_token)
        found = rows.all if devices == 1 else rows.window(0, length)
        return found.tokens[:length], found.order[:length], found.places, found.sizes

    def window(tokens: Array, order: Array, places: Array, sizes: Array) -> Window:
        return Window(tokens, order, places, devices == 1, sizes)

    yield "order of rows", milliseconds(tables, experts), 8 * experts.size
    found = tables(experts)
    x, rows = random(1, tokens, width), random(2, length, width)
    read = rows.dtype.itemsize * int(found[-1].sum()) * width
    gather = jax.jit(lambda x, *found: gather_rows(x, window(*found).tokens))
    yield "tokens to rows", milliseconds(gather, x, *found), 2 * read
    one = jax.jit(lambda rows, *found: to_tokens([rows], window(*found)))
    yield "rows to tokens", milliseconds(one, rows, *found), read + x.nbytes
    two = jax.jit(lambda rows, others, *found: to_tokens([rows, others], window(*found)))
    both = milliseconds(two, rows, random(3, length, width), *found)
    yield "two rows to tokens", both, 2 * read + x.nbytes


def layer(args: argparse.Namespace) -> Iterator[tuple[str, float, float]]:
    """The same of the whole layer and of its products."""
    tokens, d, f, count, k = args.tokens, args.width, args.hidden, args.experts, args.per_token
    x, cotangent, router = random(1, tokens, d), random(2, tokens, d), random(3, d, count)
    own = ExpertWeights(random(4, count, d, f), random(5, count, d, f), random(6, count, f, d))

    def mixed(x: Array, router: Array, own: ExpertWeights) -> Array:
        return mix_experts(x, router, own, k, RouterConfig())[0]

    @jax.jit
    def both(x: Array, router: Array, own: ExpertWeights, cotangent: Array) -> object:
        out, pull = jax.vjp(mixed, x, router, own)
        return out, pull(cotangent)

    choose = jax.jit(lambda logits: route(logits, k, RouterConfig()))
    yield "router, forward", milliseconds(choose, random(7, tokens, count, dtype=jnp.float32)), 0
    sizes = jnp.asarray(
        np.random.default_rng(0).multinomial(tokens * k, np.full(count, 1 / count)), jnp.int32
    )
    rows = random(8, tokens * k, d)

    def products(rows: Array, own: ExpertWeights) -> Array:
        gate, up = (grouped_matmul(rows, cast(Array, w), sizes) for w in own[:2])
        return grouped_matmul(ACTIVATIONS["swiglu"](gate, up), cast(Array, own.down), sizes)

    @jax.jit
    def both_products(rows: Array, own: ExpertWeights, cotangent: Array) -> object:
        out, pull = jax.vjp(products, rows, own)
        return out, pull(cotangent)

    forward, whole = (
        milliseconds(jax.jit(mixed), x, router, own),
        milliseconds(both, x, router, own, cotangent),
    )
    first = milliseconds(jax.jit(products), rows, own)
    every = milliseconds(both_products, rows, own, random(9, tokens * k, d))
    yield "layer, forward", forward, 0
    yield "layer, both passes", whole, 0
    yield "products and activation, forward", first, 0
    yield "products and activation, both passes", every, 0
    yield "the rest, forward", forward - first, 0
    yield "the rest, both passes", whole - every, 0
    flops = 18 * tokens * k * d * f
    print(f"{flops / whole / 1e9:.0f} TFLOP/s in both passes, {flops / every / 1e9:.0f} in products alone")


def main() -> None:
    """Print a table."""
    sizes = {"tokens": 16384, "width": 2048, "hidden": 768, "experts": 128, "per_token": 8}
    args = harness.parser(__doc__, **sizes).parse_args()
    print(f"{jax.devices()[0].device_kind}: {vars(args)}")
    spread = (args.tokens * 8, args.width, args.experts // 8, args.per_token, 8)
    every = {
        "alone": parts(args.tokens, args.width, args.experts, args.per_token, 1),
        "of 8": parts(*spread),
        "": layer(args),
    }
    for where, rows in every.items():
        for name, took, moved in rows:
            rate = f"{moved / took / 1e6:8.0f} GB/s" if moved else ""
            print(f"{where:6} {name:38} {took:9.3f} ms {rate}", flush=True)


if __name__ == "__main__":
    main()
