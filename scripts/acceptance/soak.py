#!/usr/bin/env python
"""Kill runs repeatedly, and check that they end like uninterrupted ones.

    scripts/acceptance/soak.py --kills 25 --runs zero3 zero++ delta local adapters experts host spread

For each kind of run it trains a tiny model twice with `zerojax launch`: once undisturbed, once with SIGKILL
at random moments, to one process or to all:

- start: while a process starts or compiles. It often replaces one that was killed;
- step, save, snapshot: in a step, in a save, and while a snapshot is written;
- twice: again within three seconds;
- standby: with the processes that stand by;
- link: no kill, but every connection of one process ends.

Then every step's metrics and the final parameters and optimizer have to be equal bit for bit. With --copy-to,
the disturbed run is the one that comes back from its copy in an object store. It prints a table. Exit code 0
if all are equal.
"""

import argparse
import ctypes
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from zerojax.cli.cluster import emulate_devices
from zerojax.run.checkpoints import restore
from zerojax.run.config import MeshSection, load_config
from zerojax.run.metrics.files import read_metrics

# What a step measures that is not time or memory.
MEASURED = ("loss", "validation_loss", "grad_norm", "learning_rate", "skipped", "skipped_total")
MOMENTS = ("start", "step", "save", "snapshot", "twice", "standby", "link")
RUNS = {
    "zero3": "--zero.preset zero3",
    "zero++": "--zero.preset zero++",
    "delta": "--zero.preset delta",
    "local": "--zero.preset local --zero.every 4",
    "adapters": "--zero.preset zero++ --lora.rank 2",
    "experts": "--zero.preset delta --model.experts 4 --model.mlp swiglu",
    "host": "--zero.preset zero3 --zero.host optimizer",
    "spread": "--zero.preset delta --zero.state-spread node",
}
"""The settings of each kind of run."""
_LIBC, _PIDFD_GETFD = ctypes.CDLL(None), 438

CONFIG = """
train = {{steps = {steps}, batch_size = 12, sequence_length = 16, eval_every = 500, eval_batches = 1}}
model = {{vocab_size = 256, layers = 1, d_model = 16, heads = 2, max_seq_len = 16, dropout = 0.1}}
data = {{source = "{text}", validation = 0.2}}
optimizer = {{learning_rate = 1e-2, warmup_steps = 10}}
zero = {{compute_dtype = "float32", remat = "none"}}
checkpoint = {{every = {save_every}}}
log = {{every = 1000, trackers = []}}
"""


COLUMNS = ("kills", "restarts", "from memory", "median, kill to new step", "losses and weights")


class Soak:
    """A run whose processes are killed at random moments."""

    def __init__(self, folder: Path, command: list[str], seed: int, processes: int) -> None:
        """Prepare; `kill_often` begins."""
        self.processes = processes
        self.run = folder / "disturbed"
        self.command = [*command, "--run-dir", str(self.run)]
        self.random = random.Random(seed)
        self.hits: Counter[str] = Counter()
        self.log = folder / "disturbed.log"
        self.seconds: list[float] = []

    def kill_often(self, kills: int) -> int:
        """Run to the end with ``kills`` kills on the way; return the launcher's exit code."""
        with self.log.open("wb") as log:
            launcher = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)
        done = 0
        while done < kills and launcher.poll() is None:
            moment = self._wait_for(MOMENTS[done % len(MOMENTS)], launcher)
            if moment is None:
                break
            everyone = self.random.random() < 0.3
            before = last_step(self.run)
            if moment == "link":
                everyone = False
                cut = self._processes(launcher.pid)[0]
                if not (cut and cut_links(self.random.choice(cut).pid)):
                    continue
            elif not self._kill(launcher.pid, everyone=everyone, standby=moment == "standby"):
                continue
            if moment == "twice":
                time.sleep(self.random.uniform(0, 3))
                self._kill(launcher.pid, everyone=everyone)
            killed = time.monotonic()
            done += 1
            self.hits[moment] += 1
            print(f"kill {done}: {moment}, {'all' if everyone else 'one'}, at step {before}", flush=True)
            if MOMENTS[done % len(MOMENTS)] != "start":  # the next kill is after a new step
                while launcher.poll() is None and last_step(self.run) <= before:
                    if time.monotonic() > killed + 300:
                        raise SystemExit(f"no new step in five minutes: see {self.log}")
                    time.sleep(0.02)
                self.seconds.append(time.monotonic() - killed)
        return launcher.wait()

    def _kill(self, launcher: int, *, everyone: bool, standby: bool = False) -> bool:
        """Kill one process or all; with ``standby`` also those that stand by. False if there is none."""
        victims, waiting = self._processes(launcher)
        if not victims:
            return False
        for victim in (victims if everyone else [self.random.choice(victims)]) + waiting * standby:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        return True

    def _wait_for(self, moment: str, launcher: subprocess.Popen[bytes]) -> str | None:
        """Wait for a moment of that kind, and return its kind; None if the run ends first.

        If no snapshot is seen within two seconds, it is "step".
        """
        step = last_step(self.run)
        seen = {path.name for path in self.run.glob("checkpoints/*")}
        while launcher.poll() is None:
            if moment == "start" and self._processes(launcher.pid)[0]:
                time.sleep(self.random.uniform(0, 8))
                return moment
            if moment == "snapshot" and last_step(self.run) > step:
                return moment if is_writing(launcher.pid) else "step"
            if moment in ("step", "twice", "standby", "link") and last_step(self.run) > step:
                time.sleep(self.random.uniform(0, 0.3))
                return moment
            new = {path.name for path in self.run.glob("checkpoints/*")} - seen
            if moment == "save" and any(not name.isdigit() for name in new):
                time.sleep(self.random.uniform(0, 0.03))
                return moment
            time.sleep(0.001)
        return None

    def _processes(self, launcher: int) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """The launcher's trainers that are alive, and the processes that stand by, which are younger."""
        with suppress(psutil.NoSuchProcess):
            living = sorted(filter(_is_alive, psutil.Process(launcher).children()), key=lambda p: p.pid)
            return living[: self.processes], living[self.processes :]
        return [], []


def last_step(run: Path) -> int:
    """The last step in a run's metrics; 0 before the first."""
    lines = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    return int(lines[-1]["step"]) if lines else 0


def is_writing(launcher: int) -> bool:
    """Whether a process is writing a snapshot: a generation has no header. Waits for that, up to 2 s."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        for file in Path(f"/proc/{launcher}/fd").glob("*"):
            with suppress(OSError):
                if "zerojax-snapshot" not in os.readlink(file):
                    continue
                with file.open("rb") as memory:
                    half = os.fstat(memory.fileno()).st_size // 2
                    if half and any(os.pread(memory.fileno(), 8, at) == bytes(8) for at in (0, half)):
                        return True
    return False


def cut_links(process: int) -> int:
    """End all TCP connections of a process, as a broken link does; returns their number."""
    count = 0
    with suppress(OSError):
        found = os.pidfd_open(process)
        for file in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                if (copy := _LIBC.syscall(_PIDFD_GETFD, found, int(file.name), 0)) < 0:
                    continue
                if not os.readlink(file).startswith("socket:"):
                    os.close(copy)
                    continue
                with socket.socket(fileno=copy) as link:
                    if link.family in (socket.AF_INET, socket.AF_INET6):
                        link.shutdown(socket.SHUT_RDWR)
                        count += 1
        os.close(found)
    return count


def write_text(folder: Path) -> None:
    """Something to learn."""
    folder.mkdir(parents=True)
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "all work and no play " * (i + 20))


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def differences(one: Path, other: Path, steps: int) -> list[str]:
    """The differences between two finished runs, one per line."""
    found = []
    a, b = (read_metrics(folder / "metrics.jsonl") for folder in (one, other))
    if [line["step"] for line in b] != list(range(1, steps + 1)):
        found.append("the steps in metrics.jsonl are not 1, 2, 3 and so on")
    for line, theirs in zip(a, b, strict=False):
        found += [
            f"step {line['step']}: {name} is {line.get(name)} and {theirs.get(name)}"
            for name in MEASURED
            if line.get(name) != theirs.get(name)
        ]
    arrays = [_arrays(folder, steps) for folder in (one, other)]
    found += [name for name, x in arrays[0].items() if x.tobytes() != arrays[1][name].tobytes()]
    return found


def _arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """The parameters, optimizer and error feedback of a run's last checkpoint, by name."""
    import jax

    from zerojax.run.build import RunSetup
    from zerojax.run.checkpoints.canonical import to_canonical

    state = restore(
        folder / "checkpoints" / str(step), RunSetup(load_config(folder / "config.toml")).abstract_state
    )
    flat, _ = jax.tree_util.tree_flatten_with_path(to_canonical(state))
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for path, x in flat
    }


def main() -> None:
    """Parse the command line, run and compare both runs; exit with the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=25, help="in each run")
    parser.add_argument("--processes", type=int, default=2, help="2 to 4, or 6 or 12: the batch is of 12")
    parser.add_argument("--steps", type=int, default=3000, help="enough for the kills: some 50 for each")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["zero3"], help="kinds of runs")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--snapshot-seconds", type=float, default=0.5)
    parser.add_argument(
        "--copy-to", help="URL of a store for copies of the disturbed runs, such as s3://bucket/x"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--folder", type=Path, help="for all runs; by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zerojax-soak-") as temporary:
        folder = options.folder or Path(temporary)
        write_text(folder / "text")
        print("| run | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
        results = [soak(options, kind, folder) for kind in options.runs]
    sys.exit(0 if all(results) else 1)


def soak(options: argparse.Namespace, kind: str, folder: Path) -> bool:
    """Both runs of a kind and their comparison: whether they are equal. Prints a row of the table."""
    runs = folder / kind
    runs.mkdir()
    config = runs / "soak.toml"
    every = options.save_every
    config.write_text(CONFIG.format(steps=options.steps, text=folder / "text", save_every=every))
    # Most of a start is compiling, and there are many: rank 0 finds its programs in the cache (JAX writes no
    # other rank's), and none is optimized.
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    }
    command = [
        sys.executable, "-m", "zerojax", "launch", "--nodes", str(options.processes),
        "--devices-per-node", "1", "--platform", "cpu", "--restarts", str(10 * options.kills),
        "--snapshot-seconds", str(options.snapshot_seconds), str(config), *RUNS[kind].split(),
    ]  # fmt: skip
    with (runs / "peaceful.log").open("wb") as log:
        subprocess.run([*command, "--run-dir", str(runs / "peaceful")], check=True, stdout=log, stderr=log)
    url = f"{options.copy_to}/{kind}"
    if options.copy_to is not None:
        command += ["--checkpoint.copy-to", url]
    disturbed = Soak(runs, command, options.seed, options.processes)
    code = disturbed.kill_often(options.kills)
    lines = disturbed.log.read_text(errors="replace")
    if code != 0:
        print(f"the disturbed run ended with exit code {code}; its end:", *lines.splitlines()[-20:], sep="\n")
        return False
    if options.copy_to is not None:
        disturbed.run.rename(runs / "copied")
        fetch = [sys.executable, "-m", "zerojax", "checkpoints", str(disturbed.run), "--fetch", url]
        subprocess.run(fetch, check=True, stdout=subprocess.DEVNULL)
    emulate_devices(MeshSection(nodes=options.processes, local=1, emulate=True), processes=1)
    found = differences(runs / "peaceful", disturbed.run, options.steps)
    memory = lines.count(", which is in memory")
    starts = lines.count("restarting with")
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(disturbed.hits.items()))
    kills = sum(disturbed.hits.values())
    print(
        f"| {kind} | {kills} ({kinds}) | {starts} | {memory} | {median(disturbed.seconds or [0]):.1f} s | "
        f"{found[0] if found else 'equal'} |",
        flush=True,
    )
    return not found and kills == options.kills


if __name__ == "__main__":
    main()
