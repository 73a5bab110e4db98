#!/usr/bin/env python3
"""Measure the time to trace, lower and compile a training step, or to the end of the first one.

    scripts/bench/compile_time.py --layers 12 48 --preset zero++     # for an absent cluster of 2 x 4 H100s
    scripts/bench/compile_time.py --first-step                       # on one GPU: three minutes
    scripts/bench/compile_time.py --first-step --small               # the same programs in small, on a CPU

The first form needs scripts/install_cuda_compiler.sh. It reports seconds of CPU time, which other load on the
machine hardly changes; the least of several repetitions.

--first-step runs each case in new processes, twice: first with an empty compilation cache, then with the
cache of the first run. "mixture x 2" is two processes, as two nodes, which share a GPU if there is only one.
Seconds are measured in process 0: "state" creates the state. "first step" is the first call of `train_step`
until its result is ready, with tracing, lowering and compiling (or loading) the program.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from train import BlockStack, loss_fn

import zerojax
from zerojax import aot
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.multihost.distributed import VARIABLES, free_port, joined
from zerojax.run.config import find_config, load_config
from zerojax.zero_config.config import PRESETS, Preset

LLAMA: dict[str, Any] = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False}
DENSE = GPTConfig(vocab_size=256, layers=12, d_model=4096, heads=32, ffn=11008, max_seq_len=2048, **LLAMA)
MIXTURE = GPTConfig(
    vocab_size=256, layers=4, d_model=2048, heads=32, kv_heads=4, head_width=128, ffn=1408, experts=64,
    experts_per_token=8, qk_norm=True, max_seq_len=2048, **LLAMA,
)  # fmt: skip
SMALL: dict[str, Any] = {"d_model": 64, "heads": 4, "ffn": 128, "max_seq_len": 32}
STAGES = {
    "jaxpr_trace_duration": "trace",
    "jaxpr_to_mlir_module_duration": "lower",
    "backend_compile_duration": "compile",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a preset, and how many processes train."""

    config: GPTConfig
    preset: Preset
    nodes: int = 1

    def small(self) -> "Case":
        """The same model, in small."""
        config = self.config
        changes = dict(SMALL)
        if config.experts:
            changes |= {"kv_heads": 2, "head_width": 16, "experts": 8}
        return dataclasses.replace(self, config=dataclasses.replace(config, **changes))


CASES = {
    "dense": Case(DENSE, "zero3"),
    "mixture": Case(MIXTURE, "zero3"),
    "mixture x 2": Case(MIXTURE, "delta", nodes=2),
}


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


def ahead_of_time(options: argparse.Namespace) -> None:
    """Print the table of CPU seconds for an absent cluster."""
    seconds(2, "zero3", options.config)  # imports, and the compiler's own start
    harness.table("preset", "layers", "model", "trace and lower", "compile", "together", "growth")
    for preset in options.preset:
        first = None
        for layers in options.layers:
            runs = [seconds(layers, preset, options.config) for _ in range(3)]
            best = min(runs, key=lambda run: sum(run.values()))
            total = sum(best.values())
            first = first or total
            stages = [f"{value:.2f}" for value in (*best.values(), total)]
            harness.row(preset, layers, *stages, f"{total / first - 1:+.0%}")


def first_steps(options: argparse.Namespace) -> None:
    """Print the table of seconds to the end of the first step."""
    harness.table("case", "cache", "state", "trace", "lower", "compile", "rest", "first step", "loss")
    for name in options.cases:
        folder = Path(tempfile.mkdtemp())
        try:
            for cache in ("empty", "filled"):
                found = run_case(name, folder, small=options.small)
                loss = found.pop("loss")
                harness.row(name, cache, *(f"{value:.2f}" for value in found.values()), repr(loss))
        finally:
            shutil.rmtree(folder)


def gpu_count() -> int:
    """The number of this machine's GPUs. JAX would occupy them."""
    try:
        return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    except FileNotFoundError:
        return 0


def run_case(name: str, folder: Path, *, small: bool) -> dict[str, float]:
    """Run a case in new processes. Return process 0's measurements."""
    nodes, port, gpus = CASES[name].nodes, free_port(), gpu_count()
    command = [sys.executable, __file__, "--one", name, "--cache", str(folder)]
    command += ["--small"] if small else []
    processes: list[subprocess.Popen[str]] = []
    for rank in range(nodes):
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if nodes > 1:  # NCCL refuses two processes with one GPU, unless they seem to be on two hosts
            place = dict(zip(VARIABLES, (f"127.0.0.1:{port}", str(rank), str(nodes)), strict=True))
            env |= place | {"NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            env |= {"CUDA_VISIBLE_DEVICES": str(rank % gpus)} if gpus else {}
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(texts))
    return json.loads(texts[0].splitlines()[-1])


def one(case: Case, folder: str) -> None:
    """Make a state and take a step on it; print the seconds of the stages as JSON."""
    zerojax.use_compilation_cache(folder)
    spent: dict[str, list[float]] = defaultdict(list)

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        spent[STAGES.get(event.rpartition("/")[2], "")].append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    with joined():
        begun = time.perf_counter()
        state = zerojax.TrainState.create(
            partial(_model, case.config),
            optax.adamw(1e-4),
            loss_fn,
            mesh=zerojax.make_mesh(case.nodes, 1),
            zero=zerojax.ZeroConfig.preset(case.preset),
        )
        shape = (1, case.config.max_seq_len, case.config.d_model)
        rng = np.random.default_rng(jax.process_index())
        batch = {name: rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for name in "xy"}
        jax.block_until_ready(state)
        made = time.perf_counter()
        spent.clear()
        state, metrics = zerojax.train_step(state, batch)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        total = time.perf_counter() - made
        # The longest tracing contains the others, which are of functions within the step.
        stages = {
            "trace": max(spent["trace"]),
            "lower": sum(spent["lower"]),
            "compile": sum(spent["compile"]),
        }
        rest = total - sum(stages.values())
        print(json.dumps({"state": made - begun, **stages, "rest": rest, "first step": total, "loss": loss}))


def _model(config: GPTConfig, rngs: Any) -> BlockStack:
    return BlockStack(config, rngs=rngs)


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = harness.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=["zero3"])
    parser.add_argument("--config", default="gpt-350m")
    parser.add_argument("--first-step", action="store_true", help="time to the end of the first step, here")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="with --first-step")
    parser.add_argument("--small", action="store_true", help="likewise: small models")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(CASES[options.one].small() if options.small else CASES[options.one], options.cache)
    elif options.first_step:
        first_steps(options)
    else:
        ahead_of_time(options)


if __name__ == "__main__":
    main()
