#!/usr/bin/env python3
"""Measure the Python side of a training step: the time from the call of ``train_step`` to its return.

    scripts/bench/dispatch_time.py

One CPU device and a model so small that its execution, which is included, hardly counts: the figure is an
upper bound. The batch is placed beforehand.
"""

import os
import statistics
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import harness
import jax
import numpy as np
import optax

import zerojax
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.sharding.mesh import BY_ROWS
from zerojax.zero_config.config import Preset

STEPS = 200


def microseconds(preset: Preset) -> list[float]:
    """Microseconds of each call, without the first few."""
    config = GPTConfig(vocab_size=64, layers=2, d_model=16, heads=2, max_seq_len=8)
    state = zerojax.TrainState.create(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        lm_loss,
        mesh=zerojax.make_mesh(1, 1),
        zero=zerojax.ZeroConfig.preset(preset),
    )
    program = state.spec
    tokens = jax.device_put(np.zeros((1, 9), np.int32), program.sharding(BY_ROWS))
    calls = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        state, metrics = zerojax.train_step(state, {"tokens": tokens})
        calls.append(1e6 * (time.perf_counter() - begun))
        jax.block_until_ready((state, metrics))
    return calls[5:]


def main() -> None:
    """Measure every preset, print a table."""
    harness.table("preset", "median, us", "least")
    presets: tuple[Preset, ...] = ("zero3", "zero++", "delta")
    for preset in presets:
        calls = microseconds(preset)
        harness.row(preset, f"{statistics.median(calls):.0f}", f"{min(calls):.0f}")


if __name__ == "__main__":
    main()
