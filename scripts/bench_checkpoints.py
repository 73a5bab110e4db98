#!/usr/bin/env python
"""What saving costs: stretches of training with one save each beside stretches without, in one process.

    scripts/bench_checkpoints.py gpt-tiny --steps 50 --pairs 4

The last lines are the seconds of each pair, the part of throughput that saving cost (the median over the
pairs), and for how long the training loop itself stood still.
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

    def stretch(trainer: Trainer, *, save: bool) -> tuple[float, float]:
        """Seconds of the stretch, the background work included, and of the call that begins to save."""
        begun = time.perf_counter()
        stood = 0.0
        if save:
            trainer.save()
            stood = time.perf_counter() - begun
        for _ in range(options.steps):
            trainer.state, metrics = zerojax.train_step(trainer.state, next(trainer.batches))
            trainer.step += 1
            trainer.log.step(trainer.step, metrics)
        jax.block_until_ready(trainer.state)
        trainer.checkpoints.wait()
        return time.perf_counter() - begun, stood

    with tempfile.TemporaryDirectory() as folder:
        total = 2 * options.steps * (options.pairs + 1)
        config = replace(config, train=replace(config.train, steps=total))
        with Trainer.open(config, RunFolder(Path(folder) / "run")) as trainer:
            stretch(trainer, save=True)  # compiles
            pairs = [
                (stretch(trainer, save=False)[0], *stretch(trainer, save=True)) for _ in range(options.pairs)
            ]
    for without, with_save, _ in pairs:
        print(f"{options.steps} steps: {without:.2f} s without, {with_save:.2f} s with a save")
    cost = statistics.median(1 - without / with_save for without, with_save, _ in pairs)
    print(f"saving costs {cost:.1%} of throughput; the loop stands still for "
          f"{1000 * statistics.median(stood for *_, stood in pairs):.0f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
