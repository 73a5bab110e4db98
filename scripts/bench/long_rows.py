#!/usr/bin/env python3
"""Measure training steps whose rows are shared by the GPUs of one host (``ZeroConfig.sequence_parallel``).

    python3 scripts/bench/long_rows.py                        # about 2 minutes on two H100
    python3 scripts/bench/long_rows.py 32768:1:2 524288:2:1   # TOKENS:GPUS A ROW:ROWS, one after another
    python3 scripts/bench/long_rows.py --small                # small shapes, for a CPU
    python3 scripts/bench/long_rows.py 131072:1:1 --adapters --layers 8   # on one H100

Blocks of LLaMA 3 8B, few of them, with AdamW and stage 3, on random tokens. The second case has the rows of
the first, each on all GPUs. The losses are equal within rounding, and the difference of the times is the cost
of exchanging heads. For each case: the first loss, milliseconds of a step, tokens/s of all GPUs, the share of
their peak that model FLOPs take (causal attention counts half of the square, and nothing twice), and peak
memory of the process so far. A case that fails prints its error, and the others run.

With --adapters, weights are frozen beside adapters of rank 16, and activations are in host memory. --host
names other parts to have there; with "optimizer" the backward pass updates. With either the vocabulary is
LLaMA 3's. For each GPU JAX page-locks as much memory as XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says.

With --steps 0 the first step is timed, including its compilation. --compile-first compiles it before, by
JAX's compilation cache, so that the first step only traces. Use it for steps that take minutes.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import get_args

import harness
import jax
import numpy as np
import optax

import zerojax
from zerojax.analysis.gpus import find_gpu
from zerojax.analysis.plan import predict_memory
from zerojax.analysis.plan.work import sequences_of, work_of
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.models.options import AttentionKernel
from zerojax.schedule.tiles import TILE
from zerojax.zero_config.options import HOST_STORES, Moments, Remat

DEFAULT = ("32768:1:N", "32768:N:N", "131072:N:1", "262144:N:1")
SMALL = ("64:1:N", "64:N:N", "256:N:1")


def shape(length: int, options: argparse.Namespace) -> GPTConfig:
    """The model, for rows of a length."""
    small = options.small
    return GPTConfig(
        vocab_size=512 if small else 128256 if options.adapters or options.host else 32000,
        layers=options.layers,
        d_model=64 if small else 4096,
        heads=8 if small else 32,
        kv_heads=2 if small else 8,
        ffn=128 if small else 14336,
        norm="rms",
        positions="rope",
        mlp="swiglu",
        tied=False,
        biases=False,
        max_seq_len=length,
        token_tile=TILE,
        attention=options.attention,
    )


def measure(config: GPTConfig, sharing: int, rows: int, options: argparse.Namespace) -> None:
    """Print one case."""
    length, devices, adapters = config.max_seq_len, jax.device_count(), options.adapters
    zero = zerojax.ZeroConfig(
        sequence_parallel=sharing,
        remat=options.remat,
        frozen=("*",) if adapters else (),
        matmul_dtype="fp8" if options.fp8 else "compute",
        host=tuple(options.host) or (("activations",) if adapters else ()),
        host_activations=options.host_activations,
        update_in_backward="optimizer" in options.host,
        moments=options.moments,
    )

    def make(create: Callable[..., zerojax.TrainState]) -> zerojax.TrainState:
        return create(
            lambda rngs: GPT(config, rngs=rngs),
            optax.adamw(1e-4),
            lm_loss,
            mesh=zerojax.make_mesh(1, devices),
            zero=zero,
            lora=zerojax.LoRA(rank=16) if adapters else None,
        )

    abstract = make(zerojax.TrainState.abstract)
    spec = abstract.spec
    if options.compile_first:
        rows_of_tokens = jax.ShapeDtypeStruct((rows, length + 1), np.int32)
        zerojax.lower_train_step(abstract, {"tokens": rows_of_tokens}).compile()
    work = work_of(spec, config, sequences=sequences_of(rows, devices, zero), length=length)
    zerojax.reserve_host_memory(predict_memory(spec, work).host_total)
    state = make(zerojax.TrainState.create)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length + 1), np.int32)
    seconds, losses = [], []
    for _ in range(options.steps + 1):
        start = time.perf_counter()
        state, metrics = zerojax.train_step(state, {"tokens": tokens})
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
    step, every = statistics.median(seconds[1:] or seconds), rows * length
    used = f"{work.model_flops / step / find_gpu(options.gpu).flops:.1%}"
    stats = jax.devices()[0].memory_stats() or {}
    figures = f"{losses[0]:.5f}", f"{1e3 * step:,.1f}", f"{every / step:,.0f}", used
    peak = stats.get("peak_bytes_in_use", 0) / 1e9
    harness.row(f"{length:,}", rows, sharing, *figures, f"{peak:.1f}", f"{seconds[0]:.0f}")


def main() -> None:
    """Parse the command line, and print a table."""
    parser = harness.parser(__doc__)
    parser.add_argument("cases", nargs="*", help="tokens of a row, GPUs that share it, rows: 131072:2:1")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="timed, after one that compiles; 0: that one")
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--host", nargs="*", default=(), choices=HOST_STORES, help="ZeroConfig.host")
    parser.add_argument("--host-activations", type=float, default=1.0, help="the share there")
    parser.add_argument("--moments", choices=get_args(Moments), default="float32")
    parser.add_argument("--remat", choices=get_args(Remat), default="full")
    parser.add_argument("--attention", choices=get_args(AttentionKernel), default="auto")
    parser.add_argument("--fp8", action="store_true", help="matmuls in fp8; attention stays in bfloat16")
    parser.add_argument("--gpu", default="h100", help="whose peak counts")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile-first", action="store_true", help="before the first step")
    options = parser.parse_args()
    if options.compile_first:
        cache = tempfile.TemporaryDirectory()
        jax.config.update("jax_compilation_cache_dir", cache.name)
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, {options.layers} layers")
    names = "tokens of a row", "rows", "GPUs a row", "first loss", "step, ms", "tokens/s", "of the peak", "GB"
    harness.table(*names, "first step, s")
    for case in options.cases or (SMALL if options.small else DEFAULT):
        length, sharing, rows = map(int, case.replace("N", str(jax.device_count())).split(":"))
        try:
            config = shape(length, options)
            measure(config, sharing, rows, options)
        except Exception as error:  # a case that does not fit must not cost the others
            harness.row(length, "-", sharing, f"{type(error).__name__}: {str(error)[:200]}")


if __name__ == "__main__":
    main()
