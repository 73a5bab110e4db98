"""A run small enough to train in seconds."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import zerojax
from zerojax.posttrain.methods.grpo import GRPOTrainer
from zerojax.posttrain.methods.ppo import PPOTrainer
from zerojax.posttrain.methods.preferences import PreferenceTrainer
from zerojax.posttrain.roles import critic
from zerojax.run import loop
from zerojax.run import train_run as run_module
from zerojax.run.config import RunConfig, config_from_dict
from zerojax.run.data.batches import Batch, TrainBatches
from zerojax.run.metrics.files import MetricsFile, read_metrics
from zerojax.run.run_dir import RunFolder
from zerojax.run.train_run import TrainRun

MICRO: dict[str, dict[str, Any]] = {
    "train": {
        "steps": 8,
        "batch_size": 8,
        "sequence_length": 16,
        "eval_every": 4,
        "eval_batches": 2,
        "max_skips": 3,
    },
    # Two thirds of the work of GPT-2's defaults: there are fewer leaves.
    "model": {
        "vocab_size": 256,
        "layers": 1,
        "d_model": 16,
        "heads": 2,
        "max_seq_len": 32,
        "biases": False,
        "norm": "rms",
    },
    "data": {"validation": 0.2},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
    "zero": {"compute_dtype": "float32"},
    "mesh": {"nodes": 2, "local": 4},
    "checkpoint": {"every": 3},
    "log": {"trackers": []},
}


ROLLOUTS: dict[str, dict[str, Any]] = {
    "train": {"batch_size": 16, "sequence_length": 16, "eval_every": 0},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0, "schedule": "constant"},
    "mesh": {"nodes": 1, "local": 2},
    "posttrain": {"max_new_tokens": 4, "eval_prompts": 0},
}
"""Settings of a run that generates what it trains on; the method and its rewards are missing."""


def micro_config(text: Path, **sections: dict[str, Any]) -> RunConfig:
    """The settings of a micro run, with some overridden."""
    return config_from_dict(merged(MICRO, {"data": {"source": str(text)}}, sections))


def merged(*settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings by section, of which later ones override earlier ones."""
    names = dict.fromkeys(name for given in settings for name in given)
    return {name: {k: x for given in settings for k, x in given.get(name, {}).items()} for name in names}


def post_train[T: (GRPOTrainer, PPOTrainer, PreferenceTrainer)](
    kind: type[T], settings: RunConfig, folder: Path, start: RunFolder, **options: Any
) -> T:
    """Train by a method, from the weights of another run."""
    with kind.open(settings, RunFolder(folder), init_from=start.path, **options) as trainer:
        trainer.train()
    return trainer


def train(config: RunConfig, folder: Path, **options: Any) -> TrainRun:
    with TrainRun.open(config, RunFolder(folder), **options) as trainer:
        trainer.train()
    return trainer


def losses(folder: Path) -> list[tuple[int, float, float | None]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [(line["step"], line["loss"], line.get("validation_loss")) for line in lines]


class Stop(Exception):
    """A process that dies."""


def die_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the process die instead of taking this step."""
    real, done = zerojax.train_step, iter(range(1, step))

    def train_step(state: Any, batch: Any) -> Any:
        if next(done, None) is None:
            raise Stop
        return real(state, batch)

    for module in (loop, critic):
        monkeypatch.setattr(module, "train_step", train_step)


class Poisoned(Iterator[Batch]):
    """Batches with a token outside the vocabulary in some steps, which makes the loss NaN."""

    def __init__(self, batches: TrainBatches, steps: set[int]) -> None:
        self.batches, self.steps, self.step = batches, steps, 0
        self.get_state, self.rounds, self.close = batches.get_state, batches.rounds, batches.close

    def __next__(self) -> Batch:
        self.step += 1
        batch = next(self.batches)
        return {"tokens": batch["tokens"] + 1000} if self.step in self.steps else batch


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    real = run_module.make_batches

    def make_batches(*arguments: Any) -> Any:
        batches, validation = real(*arguments)
        return Poisoned(batches, steps), validation

    monkeypatch.setattr(run_module, "make_batches", make_batches)


def hang(files: MetricsFile) -> None:
    """Replace a file by a full pipe that nobody reads."""
    _, end = os.pipe()
    os.write(end, bytes(fcntl.fcntl(end, fcntl.F_GETPIPE_SZ)))
    os.dup2(end, files._file)


def lines(folder: Path) -> list[dict[str, Any]]:
    """What a run logged, without what depends on the clock and the machine."""
    clock = ("step_seconds", "tokens_per_second", "memory_bytes")
    return [
        {name: value for name, value in line.items() if name not in clock}
        for line in read_metrics(folder / "metrics.jsonl")
    ]
