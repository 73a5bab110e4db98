#!/usr/bin/env python
"""Measure how long a job takes from the kill of a process to the end of the next new step.

    scripts/bench/restarts.py --kills 4 --launch "--devices-per-node 1" gpt-tiny --train.steps 9999

starts `zerojax launch --restarts N` with these options, waits for some steps, kills the last node's process,
and so on. It prints a table with the phases of each restart, as run.json has them. At the end it kills the
job. With --every it kills at equal intervals, and prints which part of the steps of a job without kills was
done in them. The seconds before the first kill say how many steps those are.
"""

import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import harness
import psutil

from zerojax.run.metrics.files import read_metrics
from zerojax.run.run_dir import RunFolder, sessions


def last_step(folder: RunFolder) -> int:
    """The last step in a run's metrics; 0 before the first."""
    lines = read_metrics(folder.metrics) if folder.metrics.exists() else []
    return int(lines[-1]["step"]) if lines else 0


def wait_for_step(job: subprocess.Popen[bytes], folder: RunFolder, step: int) -> None:
    """Wait until a step is logged; fail if the job ends before."""
    while last_step(folder) < step:
        if job.poll() is not None:
            raise SystemExit(f"the job ended with exit code {job.returncode}: see {folder.path}.log")
        time.sleep(0.02)


def kill_one(job: subprocess.Popen[bytes], nodes: int) -> None:
    """Kill the process of the last node. Processes that stand by are younger."""
    living = [p for p in psutil.Process(job.pid).children() if p.status() != psutil.STATUS_ZOMBIE]
    sorted(living, key=lambda process: process.pid)[nodes - 1].send_signal(signal.SIGKILL)


def recovery_after(job: subprocess.Popen[bytes], folder: RunFolder, count: int) -> dict[str, float]:
    """The phases of a restart, which run.json has at the first new step; ``count`` of them are awaited."""
    while job.poll() is None:
        found = [one["recovery"] for one in sessions(folder.read_summary()) if "recovery" in one]
        if len(found) >= count:
            return found[-1]
        time.sleep(0.02)
    raise SystemExit(f"the job ended with exit code {job.returncode}: see {folder.path}.log")


def main() -> None:
    """Start the job, kill it, and print the table."""
    parser = harness.parser(__doc__, kills=4, nodes=2)
    parser.add_argument("--steps", type=int, default=40, help="before the first kill")
    parser.add_argument("--seconds", type=float, default=12, help="from a new step to the next kill")
    parser.add_argument("--every", type=float, help="seconds from a kill to the next one")
    parser.add_argument("--launch", type=shlex.split, default=[], help="more options of zerojax launch")
    parser.add_argument("--folder", type=Path, help="of the run; by default a temporary one")
    options, train = parser.parse_known_args()
    place = options.folder or Path(tempfile.mkdtemp(prefix="zerojax-restarts-"))
    place.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(place / "run")
    command = [
        *(sys.executable, "-m", "zerojax", "launch", "--nodes", str(options.nodes)),
        *("--restarts", str(options.kills + 3), *options.launch),
        *(*train, "--run-dir", str(folder.path)),
    ]
    rows: list[dict[str, float]] = []
    with folder.path.with_suffix(".log").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for_step(job, folder, options.steps)
        first, began = last_step(folder), time.monotonic()
        if options.every:
            time.sleep(options.every / 2)
        reached = last_step(folder)
        rate = (reached - first) / (time.monotonic() - began)
        first, began = reached, time.monotonic()
        for kill in range(1, options.kills + 1):
            reached, killed = last_step(folder), time.monotonic()
            kill_one(job, options.nodes)
            phases = recovery_after(job, folder, kill)
            rows.append(phases | {"kill to new step": time.monotonic() - killed})
            print(f"killed at step {reached}: {rows[-1]}", flush=True)
            rest = began + kill * options.every - time.monotonic() if options.every else options.seconds
            time.sleep(max(rest, 0))
        if options.every:
            done, whole = last_step(folder) - first, rate * (time.monotonic() - began)
            print(f"{done} of {whole:.0f} steps without kills: {done / whole:.1%}", flush=True)
    finally:
        job.kill()
        job.wait()
        print_table(rows)


def print_table(rows: list[dict[str, float]]) -> None:
    """A row for each phase, with all restarts and their median. Repeated steps are one phase."""
    merged = [{"to repeat steps" if "repeat" in k else k: s for k, s in row.items()} for row in rows]
    harness.table("phase", *(str(i + 1) for i in range(len(rows))), "median")
    for phase in dict.fromkeys(name for row in merged for name in row):
        seconds = [row.get(phase, 0.0) for row in merged]
        harness.row(phase, *(f"{s:.1f}" for s in [*seconds, median(seconds)]))


if __name__ == "__main__":
    main()
