#!/usr/bin/env python
"""What saving costs: stretches of training with one save each beside stretches without, in one process.

    scripts/bench_checkpoints.py gpt-tiny --steps 50 --pairs 4

The last lines are the seconds of each pair, by the clock and of all processor cores together (which other
work on the machine disturbs less), what saving cost (the median over the pairs), and for how long the
training loop itself stood still.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from zerojax.cli.cluster import emulate_devices
from zerojax.config import find_config, load_config
from zerojax.run_folder import RunFolder


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a TOML file, or the name of one in configs/")
    parser.add_argument("--steps", type=int, default=50, help="steps of a stretch, and so between saves")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of stretches")
    options = parser.parse_args()
    config = load_config(find_config(options.config))
    emulate_devices(config.mesh)
    import jax

    import zerojax
    from zerojax.trainer import Trainer

    def stretch(trainer: Trainer, *, save: bool) -> tuple[float, float, float]:
        """Seconds with the background work: clock, processor; and the clock's of the call to save."""
        begun, worked = time.perf_counter(), time.process_time()
        stood = 0.0
        if save:
            trainer.save()
            stood = time.perf_counter() - begun
        for _ in range(options.steps):
            trainer.state, metrics = zerojax.train_step(trainer.state, next(trainer.batches))
            trainer.step += 1
            trainer.log.step(trainer.step, metrics)
        trainer.log.drain()
        jax.block_until_ready(trainer.state)
        trainer.checkpoints.wait()
        return time.perf_counter() - begun, time.process_time() - worked, stood

    with tempfile.TemporaryDirectory() as folder:
        total = 2 * options.steps * (options.pairs + 1)
        config = replace(config, train=replace(config.train, steps=total))
        with Trainer.open(config, RunFolder(Path(folder) / "run")) as trainer:
            stretch(trainer, save=True)  # compiles
            pairs = [
                (stretch(trainer, save=False), stretch(trainer, save=True)) for _ in range(options.pairs)
            ]
    for (clock, cores, _), (clock_saving, cores_saving, _) in pairs:
        print(
            f"{options.steps} steps: {clock:.1f} s without a save, {clock_saving:.1f} s with one; "
            f"processor {cores:.1f} s and {cores_saving:.1f} s"
        )
    clock, cores = (statistics.median(1 - a[i] / b[i] for a, b in pairs) for i in (0, 1))
    stood = statistics.median(with_save[2] for _, with_save in pairs)
    print(
        f"saving costs {clock:.1%} of throughput, {cores:.1%} of processor time; "
        f"the loop stands still for {1000 * stood:.0f} ms"
    )


if __name__ == "__main__":
    main()
