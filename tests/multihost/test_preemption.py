"""Stopping a run: by one signal, by two, and in one of several processes."""

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from environment import for_programs
from stopped_reader import full_pipe

from zerojax.errors import EXIT_STOPPED
from zerojax.multihost.preemption import ONE_REQUEST
from zerojax.run.checkpoints import newest_valid, read_manifest, step_dirs
from zerojax.run.metrics.files import read_metrics

CONFIG = """
[train]
steps = 100000
batch_size = 8
sequence_length = 16
eval_every = 0
[model]
vocab_size = 256
layers = 1
d_model = 16
heads = 2
max_seq_len = 16
biases = false
norm = "rms"
[data]
source = "{source}"
validation = 0.2
[zero]
compute_dtype = "float32"
[mesh]
nodes = 2
local = 2
emulate = true
[checkpoint]
every = 0
keep = 1
keep_minutes = 60
[log]
trackers = []
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i}: " + "all work and no play " * 30)
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(source=tmp_path / "text"))
    return path


@contextmanager
def started(
    *arguments: object, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
) -> Generator[subprocess.Popen[str]]:
    """A Python program, killed at the end if it has not ended by itself."""
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=for_programs(),
        text=True,
        stdout=stdout,
        stderr=stderr,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it did not get on"
        time.sleep(0.1)


def test_a_signal_saves_and_ends(config: Path, tmp_path: Path) -> None:
    """Also where nobody reads the standard output."""
    run = tmp_path / "run"
    command = ("-m", "zerojax", "train", config, "--run-dir", run)
    with full_pipe() as (_, writer), started(*command, stdout=writer) as process:
        wait_until(lambda: len(read_metrics(run / "metrics.jsonl")) > 5, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_STOPPED, err
    step = newest_valid(run / "checkpoints").step
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(range(1, (step or 0) + 1))
    assert f"stopped on request at step {step} of 100000" in err
    assert "Traceback" not in err
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes(config: Path, tmp_path: Path) -> None:
    """All save the same step and end, and ``zerojax launch`` does not see a crash; also saves by time."""
    run = tmp_path / "run"
    launch = ("-m", "zerojax", "launch", "--nodes", 2, "--devices-per-node", 2, "--restarts", 3)
    command = (*launch, config, "--run-dir", run)
    with started(*command, "--checkpoint.minutes", 0.01) as process:
        wait_until(lambda: len(step_dirs.steps(run / "checkpoints")) > 2, process)
        found = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "--process-id 1 " in " ".join(child.cmdline()) + " "
        ]
        # Processes that stand by are younger.
        min(found, key=psutil.Process.create_time).send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_STOPPED, out + err
    step = newest_valid(run / "checkpoints").step or 0
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(range(1, step + 1))
    for rank in range(2):
        assert f"[rank {rank}] zerojax: stopped on request at step {step}" in out
    assert "starting again" not in err
    manifests = [
        read_manifest(run / "checkpoints" / str(step)) for step in step_dirs.steps(run / "checkpoints")
    ]
    apart = [b.record.seconds - a.record.seconds for a, b in itertools.pairwise(manifests[:-1])]
    assert min(apart) >= 0.6
    with started(*command, "--train.steps", step + 2) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert f"resuming from step {step};" in out


HANGING = """
import atexit, sys, threading
from zerojax.cli import main
from zerojax.run.trackers import Trackers
from zerojax.run.trackers.clients import TensorBoard

def hang(*_, **__):
    threading.Event().wait()

TensorBoard.write = TensorBoard.close = hang
Trackers.__init__.__kwdefaults__["patience"] = 1.0
atexit.register(hang)  # as clients do that want to send what is left
sys.exit(main())
"""


@pytest.mark.slow
def test_a_hung_tracker_does_not_keep_the_process_alive(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(
        "-c", HANGING, "train", config, "--run-dir", run, "--log.trackers", "tensorboard"
    ) as process:
        wait_until(lambda: len(read_metrics(run / "metrics.jsonl")) > 5, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_STOPPED, out + err
    assert "log.trackers: tensorboard did not accept its last steps within 1 s" in out
    step = newest_valid(run / "checkpoints").step
    assert f"stopped on request at step {step} of 100000" in err


BUSY = """
import hashlib
from zerojax.multihost.preemption import StopRequest
with StopRequest():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in C, where Python runs no handler
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_request_ends_at_once(number: signal.Signals) -> None:
    """Not a signal that arrives twice, as from a terminal and from the parent process."""
    with started("-c", BUSY) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert (
            process.stderr.readline() == "zerojax: SIGTERM: saving after this step; once more ends at once\n"
        )
        process.send_signal(number)
        time.sleep(ONE_REQUEST)
        assert process.poll() is None
        process.send_signal(number)
        assert process.stderr.readline() == f"zerojax: {number.name} again: ending at once\n"
        assert process.wait(timeout=20) == 128 + number


ASKED = """
import os, time
from zerojax.multihost.preemption import JOIN, StopRequest
def ask():
    os.kill(os.getpid(), JOIN)
    time.sleep(0.3)
ask()  # while it starts
with StopRequest() as request:
    ask()
    print(request.received, flush=True)
    request._trains_until = 0.0
    ask()
    print(request.received, flush=True)
    time.sleep(60)
"""


def test_a_run_that_trains_ends_for_a_host_that_joins() -> None:
    """Before, the request does nothing. It does not count as a signal to stop."""
    with started("-c", ASKED) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["False\n", "True\n"]
        process.send_signal(signal.SIGTERM)
        time.sleep(2 * ONE_REQUEST)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.count("saving after this step") == 2


STUCK = """
import hashlib, sys
from zerojax.cli import main
from zerojax.run.loop import TrainLoop
TrainLoop.save = lambda self: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
sys.exit(main())
"""


def test_the_second_signal_is_recorded(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started("-c", STUCK, "train", config, "--run-dir", run) as process:
        wait_until(lambda: len(read_metrics(run / "metrics.jsonl")) > 2, process)
        process.send_signal(signal.SIGTERM)
        time.sleep(2 * ONE_REQUEST)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    summary = json.loads((run / "run.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["reason"] == "Stopped: SIGTERM again: ending at once"
    assert summary["step"] >= len(read_metrics(run / "metrics.jsonl")) - 1


@pytest.mark.slow
def test_two_signals_end_a_process_whose_output_nobody_reads() -> None:
    with full_pipe() as (_, writer), started("-c", BUSY, stderr=writer) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(2 * ONE_REQUEST)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
