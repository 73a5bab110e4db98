#!/usr/bin/env python
"""Measure the cost of a save: stretches of training with one save each, in turn with stretches without.

    scripts/bench/checkpoints.py gpt-tiny --steps 50 --pairs 4

The last lines are the seconds of each pair, of wall time and of CPU time over all cores (which other work on
the machine disturbs less), the cost of saving (median over the pairs), how long the training loop was
blocked, and by how much the longest step exceeded a typical one.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import harness

from zerojax.cli.cluster import emulate_devices
from zerojax.run.config import find_config, load_config
from zerojax.run.run_dir import RunFolder


@dataclass(frozen=True)
class Stretch:
    """Seconds of a stretch of training.

    Attributes:
        clock: until the last step and the save are done.
        cores: of CPU time, over all cores.
        trained: until the last step is done.
        stood: of the call to save.
        late: by which the longest step exceeds the median.
    """

    clock: float
    cores: float
    trained: float
    stood: float
    late: float


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("config", help="a TOML file, or the name of one in configs/")
    parser.add_argument("--steps", type=int, default=50, help="steps of a stretch, between saves")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of stretches")
    options = parser.parse_args()
    config = load_config(find_config(options.config))
    emulate_devices(config.mesh)
    import jax

    import zerojax
    from zerojax.run.train_run import TrainRun

    def stretch(trainer: TrainRun, *, save: bool) -> Stretch:
        """Train, with the background work of a save or without a save."""
        begun, worked = time.perf_counter(), time.process_time()
        stood, steps = 0.0, []
        if save:
            trainer.save()
            stood = time.perf_counter() - begun
        for _ in range(options.steps):
            step = time.perf_counter()
            trainer.state, metrics = zerojax.train_step(trainer.state, next(trainer.batches))
            trainer.step += 1
            trainer.log.step(trainer.step, metrics)
            steps.append(time.perf_counter() - step)
        trainer.log.drain()
        jax.block_until_ready(trainer.state)
        trained = time.perf_counter() - begun
        trainer.checkpoints.wait()
        late = max(steps) - statistics.median(steps)
        clock = time.perf_counter() - begun
        return Stretch(clock, time.process_time() - worked, trained, stood, late)

    with tempfile.TemporaryDirectory() as folder:
        total = 2 * options.steps * (options.pairs + 1)
        config = replace(config, train=replace(config.train, steps=total))
        with TrainRun.open(config, RunFolder(Path(folder) / "run")) as trainer:
            stretch(trainer, save=True)  # compiles
            pairs = [
                (stretch(trainer, save=False), stretch(trainer, save=True)) for _ in range(options.pairs)
            ]
    for plain, saving in pairs:
        print(
            f"{options.steps} steps: {plain.clock:.1f} s without a save, {saving.clock:.1f} s with one; "
            f"processor {plain.cores:.1f} s and {saving.cores:.1f} s; "
            f"longest step {1000 * plain.late:.0f} and {1000 * saving.late:.0f} ms over the median"
        )
    clock = statistics.median(1 - plain.clock / saving.clock for plain, saving in pairs)
    cores = statistics.median(1 - plain.cores / saving.cores for plain, saving in pairs)
    lost = statistics.median(saving.trained - plain.trained for plain, saving in pairs)
    stood = statistics.median(saving.stood for _, saving in pairs)
    print(
        f"saving costs {clock:.1%} of throughput until its files are written, {cores:.1%} of processor time; "
        f"the loop stands still for {1000 * stood:.0f} ms; "
        f"{lost:.2f} s of training are lost by a save, {lost / 60:.1%} at one a minute"
    )


if __name__ == "__main__":
    main()
