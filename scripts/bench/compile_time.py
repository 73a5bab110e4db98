#!/usr/bin/env python3
"""Measure the time to trace, lower and compile a training step over the depth of a Stack.

    scripts/bench/compile_time.py --layers 12 48 --preset zero++

For an absent cluster of 2 x 4 H100s (scripts/install_cuda_compiler.sh). Reports seconds of CPU time, which
other load on the machine hardly changes; the least of several repetitions.
"""

import argparse
import dataclasses
import time

import jax
import numpy as np
import optax

import zerojax
from zerojax import aot
from zerojax.models import GPT, lm_loss
from zerojax.run.config import find_config, load_config
from zerojax.zero_config.config import PRESETS, Preset


def seconds(layers: int, preset: Preset, config: str) -> dict[str, float]:
    """CPU seconds of each stage for a model with the given number of layers."""
    settings = load_config(find_config(config))
    model = dataclasses.replace(settings.model, layers=layers, attention="cudnn")
    begun = time.process_time()
    state = zerojax.TrainState.abstract(
        lambda rngs: GPT(model, rngs=rngs),
        optax.adamw(1e-3),
        lm_loss,
        mesh=zerojax.make_mesh(2, 4, devices=aot.topology(2, 4, gpu="h100")),
        zero=zerojax.ZeroConfig.preset(preset),
    )
    rows = jax.ShapeDtypeStruct((8, settings.train.sequence_length + 1), np.int32)
    made = time.process_time()
    with aot.cudnn_assumed():
        lowered = zerojax.lower_train_step(state, {"tokens": rows})
    lowered_at = time.process_time()
    lowered.compile(dict(aot.COMPILER_OPTIONS))
    done = time.process_time()
    return {"model": made - begun, "trace and lower": lowered_at - made, "compile": done - lowered_at}


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=["zero3"])
    parser.add_argument("--config", default="gpt-350m")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    seconds(2, "zero3", options.config)  # imports, and the compiler's own start
    print("| preset | layers | model | trace and lower | compile | together | growth |")
    print("|---|---|---|---|---|---|---|")
    for preset in options.preset:
        first = None
        for layers in options.layers:
            runs = [seconds(layers, preset, options.config) for _ in range(options.repeat)]
            best = min(runs, key=lambda run: sum(run.values()))
            total = sum(best.values())
            first = first or total
            stages = " | ".join(f"{value:.2f}" for value in best.values())
            print(f"| {preset} | {layers} | {stages} | {total:.2f} | {total / first - 1:+.0%} |", flush=True)


if __name__ == "__main__":
    main()
