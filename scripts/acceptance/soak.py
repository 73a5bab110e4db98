#!/usr/bin/env python
"""Kill a run repeatedly, and check that it ends like an uninterrupted one.

    scripts/acceptance/soak.py --kills 30 --processes 3

trains a tiny model twice with `zerojax launch`: once undisturbed, once with SIGKILL at random moments, while
starting, in a step and in a save, to one process or to all. Then every step's metrics and the final
parameters and optimizer have to be equal bit for bit. Exit code 0 if they are.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil

from zerojax.cli.cluster import emulate_devices
from zerojax.run.checkpoints import restore
from zerojax.run.config import MeshSection, load_config
from zerojax.run.metrics.files import read_metrics

# What a step measures that is not time or memory.
MEASURED = ("loss", "validation_loss", "grad_norm", "learning_rate", "skipped", "skipped_total")
MOMENTS = ("start", "step", "save")

CONFIG = """
train = {{steps = {steps}, batch_size = 12, sequence_length = 16, eval_every = 500, eval_batches = 1}}
model = {{vocab_size = 256, layers = 1, d_model = 16, heads = 2, max_seq_len = 16, dropout = 0.1}}
data = {{source = "{text}", validation = 0.2}}
optimizer = {{learning_rate = 1e-2, warmup_steps = 10}}
zero = {{preset = "{preset}", compute_dtype = "float32", remat = "none"}}
checkpoint = {{every = 10}}
log = {{every = 1000, trackers = []}}
"""


class Soak:
    """A run whose processes are killed at random moments."""

    def __init__(self, folder: Path, command: list[str], seed: int) -> None:
        """Prepare; `kill_often` begins."""
        self.run = folder / "disturbed"
        self.command = [*command, "--run-dir", str(self.run)]
        self.random = random.Random(seed)
        self.hits: Counter[str] = Counter()
        self.log = (folder / "disturbed.log").open("wb")

    def kill_often(self, kills: int) -> int:
        """Run to the end with ``kills`` kills on the way; return the launcher's exit code."""
        launcher = subprocess.Popen(self.command, stdout=self.log, stderr=subprocess.STDOUT)
        done = 0
        while done < kills and launcher.poll() is None:
            moment = MOMENTS[done % len(MOMENTS)]
            if not self._wait_for(moment, launcher):
                break
            victims = self._processes(launcher.pid)
            everyone = self.random.random() < 0.3
            if not victims:
                continue
            for victim in victims if everyone else [self.random.choice(victims)]:
                victim.kill()
            done += 1
            self.hits[f"{moment}, {'all' if everyone else 'one'}"] += 1
            print(
                f"kill {done}: {moment}, {'all' if everyone else 'one'}, at step {last_step(self.run)}",
                flush=True,
            )
            if psutil.wait_procs(victims, timeout=60)[1]:  # those that were not killed end by themselves
                raise SystemExit("a process has outlived its peer by a minute")
        return launcher.wait()

    def _wait_for(self, moment: str, launcher: subprocess.Popen[bytes]) -> bool:
        """Wait for a moment of that kind; False if the run ends first."""
        step = last_step(self.run)
        seen = {path.name for path in self.run.glob("checkpoints/*")}
        while launcher.poll() is None:
            if moment == "start" and self._processes(launcher.pid):
                time.sleep(self.random.uniform(0, 8))
                return True
            if moment == "step" and last_step(self.run) > step:
                time.sleep(self.random.uniform(0, 0.3))
                return True
            new = {path.name for path in self.run.glob("checkpoints/*")} - seen
            if moment == "save" and any(not name.isdigit() for name in new):
                time.sleep(self.random.uniform(0, 0.03))
                return True
            time.sleep(0.001)
        return False

    def _processes(self, launcher: int) -> list[psutil.Process]:
        """The launcher's trainers that are alive."""
        return [child for child in psutil.Process(launcher).children() if _is_alive(child)]


def last_step(run: Path) -> int:
    """The last step in a run's metrics; 0 before the first."""
    lines = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    return int(lines[-1]["step"]) if lines else 0


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
        folder / "checkpoints" / str(step), RunSetup(load_config(folder / "config.toml")).abstract_state()
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
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--processes", type=int, default=3, help="2 to 4, or 6 or 12: the batch is of 12")
    parser.add_argument("--steps", type=int, default=3000, help="enough for the kills: some 50 for each")
    parser.add_argument("--preset", default="zero3")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--folder", type=Path, help="for both runs; by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zerojax-soak-") as temporary:
        sys.exit(soak(options, options.folder or Path(temporary)))


def soak(options: argparse.Namespace, folder: Path) -> int:
    """Both runs and their comparison; returns the exit code."""
    write_text(folder / "text")
    config = folder / "soak.toml"
    config.write_text(CONFIG.format(steps=options.steps, preset=options.preset, text=folder / "text"))
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
        "--devices-per-node", "1", "--platform", "cpu", "--restarts", str(10 * options.kills), str(config),
    ]  # fmt: skip
    start = time.monotonic()
    with (folder / "peaceful.log").open("wb") as log:
        subprocess.run([*command, "--run-dir", str(folder / "peaceful")], check=True, stdout=log, stderr=log)
    peace = time.monotonic() - start
    disturbed = Soak(folder, command, options.seed)
    code = disturbed.kill_often(options.kills)
    total = time.monotonic() - start - peace
    if code != 0:
        print(f"the disturbed run ended with exit code {code}; its end:")
        print(b"\n".join((folder / "disturbed.log").read_bytes().splitlines()[-20:]).decode())
        return 1
    emulate_devices(MeshSection(nodes=options.processes, local=1, emulate=True), processes=1)
    found = differences(folder / "peaceful", disturbed.run, options.steps)
    hits = ", ".join(f"{name}: {count}" for name, count in sorted(disturbed.hits.items()))
    print(f"{sum(disturbed.hits.values())} kills ({hits}) in {total:.0f} s; undisturbed {peace:.0f} s")
    print("\n".join(found[:20]) or f"all {options.steps} steps and the final state are equal, bit for bit")
    return 1 if found or sum(disturbed.hits.values()) < options.kills else 0


if __name__ == "__main__":
    main()
