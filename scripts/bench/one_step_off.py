#!/usr/bin/env python3
"""Compare GRPO one rollout ahead with GRPO on the current policy, several seeds, on one machine's CPU.

    scripts/bench/one_step_off.py arithmetic-grpo --init-from runs/rough --seeds 0 1 2

Each run generates on its own devices when it would ask an engine, with the weights that the engine would
have. Prints a line of JSON for each run: the reward of held-out prompts after each evaluation.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness

from zerojax.cli import main
from zerojax.posttrain.engines.rollouts import EngineRollouts
from zerojax.posttrain.rollout.generator import OwnGenerator
from zerojax.run.metrics.files import read_metrics
from zerojax.train.state import TrainState


@dataclass(frozen=True)
class Versioned(OwnGenerator):
    """Generates on this run's devices, and names the weights' step as an engine does."""

    version: int = field(default=0)  # pyrefly: ignore[bad-override]


class OwnEngine:
    """``EngineRollouts`` whose engine is this run: it has finished a rollout when ``start`` returns."""

    stops = False

    def start(self, state: TrainState, step: int, make: Callable[..., Any]) -> Future[Any]:
        """Generate with the weights of ``step``."""
        future = Future[Any]()
        future.set_result(make(Versioned(state, step), lambda: self.stops))
        return future

    def wait(self, pending: Future[Any], *_: object) -> Any:
        """The rollout."""
        return pending.result()

    def close(self) -> None:
        """Nothing is left to do."""


def run(arguments: Sequence[str]) -> None:
    """One run in this process."""
    with patch.object(EngineRollouts, "open", lambda *_: (OwnEngine(), [])):
        sys.exit(main(["posttrain", *arguments]))


def compare(config: str, seeds: Sequence[int], options: Sequence[str]) -> None:
    """Run each seed on the policy and one rollout ahead, and print the rewards."""
    for seed in seeds:
        for ahead in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                command = [
                    *(sys.executable, __file__, "--run", config, *options),
                    *("--run-dir", str(out), "--train.seed", str(seed)),
                    *("--posttrain.engines", "http://own:1", "--posttrain.rollouts-ahead", str(ahead)),
                ]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                lines = read_metrics(out / "metrics.jsonl")
                found = {
                    line["step"]: round(line["validation_reward"], 4)
                    for line in lines
                    if "validation_reward" in line
                }
            print(json.dumps({"seed": seed, "ahead": ahead, "held out": found}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    parser = harness.parser(__doc__)
    parser.add_argument("config")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen, others = parser.parse_known_args()
    compare(chosen.config, chosen.seeds, others)
