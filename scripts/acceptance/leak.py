#!/usr/bin/env python
"""Train for a long time, and check that host memory, open files and threads do not grow.

    scripts/acceptance/leak.py --steps 10000

trains a tiny model in two processes with `zerojax launch`, with evaluations and checkpoints, and samples
/proc. Exit code 1 if, after the first fifth, either process gains more files or threads than a save briefly
uses, or more than 5% of memory.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

import psutil
from soak import CONFIG, last_step, write_text

# Files and threads that a save opens and closes again.
_MOMENTARY = 8


@dataclass(frozen=True)
class Sample:
    """The resources of a process."""

    step: int
    megabytes: float
    files: int
    threads: int

    def text(self) -> str:
        """The sample in words."""
        held = f"{self.megabytes:.0f} MB, {self.files:.0f} files, {self.threads:.0f} threads"
        return f"{held} around step {self.step:.0f}"


def watch(command: list[str], run: Path, log: Path) -> dict[int, list[Sample]]:
    """Run to the end; returns samples of each process, twice a second, by process id."""
    samples: dict[int, list[Sample]] = {}
    with log.open("wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=output)
        while launcher.poll() is None:
            time.sleep(0.5)
            step = last_step(run)
            for process in psutil.Process(launcher.pid).children():
                try:
                    memory = process.memory_info().rss / 1e6
                    held = Sample(step, memory, process.num_fds(), process.num_threads())
                except psutil.Error:  # it has just ended
                    continue
                if step:
                    samples.setdefault(process.pid, []).append(held)
    if launcher.returncode != 0:
        raise SystemExit(f"the run failed:\n{log.read_text()[-2000:]}")
    return samples


def fifths(samples: list[Sample], steps: int) -> list[Sample]:
    """The medians of the second and of each later fifth of a run."""

    def middle(fifth: int) -> Sample:
        rows = [astuple(x) for x in samples if fifth * steps < 5 * x.step <= (fifth + 1) * steps]
        return Sample(*(median(column) for column in zip(*rows, strict=True)))

    return [middle(fifth) for fifth in range(1, 5)]


def main() -> None:
    """Run, print the figures, and compare them with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--preset", default="zero3")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zerojax-leak-") as temporary:
        folder = Path(temporary)
        write_text(folder / "text")
        config = folder / "leak.toml"
        config.write_text(
            CONFIG.format(
                steps=options.steps, preset=options.preset, text=folder / "text", more="", save_every=10
            )
        )
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        command = [
            sys.executable, "-m", "zerojax", "launch", "--nodes", "2", "--devices-per-node", "1",
            "--platform", "cpu", str(config), "--run-dir", str(folder / "run"),
            "--checkpoint.every", str(max(1, options.steps // 50)),
        ]  # fmt: skip
        samples = watch(command, folder / "run", folder / "log")
    grown = False
    for rank, held in enumerate(samples.values()):
        early, *middle, late = fifths(held, options.steps)
        print(f"rank {rank}", *(x.text() for x in (early, *middle, late)), sep="\n  ")
        grown |= late.megabytes > 1.05 * early.megabytes
        grown |= max(late.files - early.files, late.threads - early.threads) > _MOMENTARY
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
