#!/usr/bin/env python3
"""Time `zerojax.generate` on a decoder of LLaMA's shape or GPT's, frozen and drawn at random.

    scripts/bench/generate.py --layers 32 --d-model 4096 --rows 64 --prompt 128 --new 256
    scripts/bench/generate.py --gpt --layers 24 --d-model 2048 --ffn 8192 --vocab 50304

Rows of equal length decode greedily. A token's time is the difference of a long and a short generation, over
the difference of their lengths: the copy of the weights and the prompts' prefill cancel out. The least time
is the time to read each weight, and the keys and values so far, once at the rate of a copy on this device
(bytes read and written). The script generate_transformers.py does the same with transformers.
"""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from generation_rows import Generated, Shape, add_options, report

import zerojax
from zerojax.models import GPT, GPTConfig, lm_loss

_COPIES = 10


def main() -> None:
    """Parse the command line, time each form of the weights, print a line for each, write JSON."""
    parser = harness.parser(__doc__)
    add_options(parser)
    parser.add_argument("--forms", nargs="+", default=["compute"], help="of the weights: compute int8 fp8")
    parser.add_argument("--gpt", action="store_true", help="blocks of GPT: biases, GELU, learned positions")
    parser.add_argument("--profile", type=Path, help="write a trace of one generation here")
    options = parser.parse_args()
    shape = Shape.of(options)
    family: Any = {} if shape.gpt else {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False}
    config = GPTConfig(
        vocab_size=shape.vocab, layers=shape.layers, d_model=shape.d_model, heads=shape.heads,
        kv_heads=shape.kv_heads, ffn=shape.ffn, tied=False, max_seq_len=shape.prompt + shape.new, **family,
    )  # fmt: skip
    zero = zerojax.ZeroConfig.preset("zero3", frozen=("*", "!norm/*"))
    state = zerojax.TrainState.create(
        lambda rngs: GPT(config, rngs=rngs),
        optax.identity(),
        lm_loss,
        mesh=zerojax.make_mesh(1, 1),
        zero=zero,
    )
    rate, rows = copy_rate(), []
    for form in options.forms:
        made = partial(_generate, state, shape, form)
        times = {
            new: harness.seconds_of(partial(made, new), options.repeats) for new in (shape.short, shape.new)
        }
        if options.profile:
            with jax.profiler.trace(str(options.profile / form)):
                made(shape.short)
        rows.append(Generated.of(f"zerojax {form}", shape, times))
    report(rows, shape, rate, options.json)


def _generate(state: Any, shape: Shape, form: Any, new: int) -> None:
    rng = np.random.default_rng(0)
    prompts = list(rng.integers(0, shape.vocab, (shape.rows, shape.prompt)).astype(np.int32))
    zerojax.generate(state, prompts, new, temperature=0.0, weights=form, slots=shape.rows)


def copy_rate() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB on the device."""
    size = 2 << 30 if jax.default_backend() == "gpu" else 64 << 20
    x = jnp.ones(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)

    def copies() -> None:
        jax.block_until_ready([copy(x) for _ in range(_COPIES)])

    return 2 * size * _COPIES / statistics.median(harness.seconds_of(copies, 3))


if __name__ == "__main__":
    main()
