"""Two processes keep the same checkpoints, and start from the same weights, as one."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
from environment import for_programs, zerojax
from micro_run import lines, micro_config

from zerojax.multihost.distributed import free_port
from zerojax.run.checkpoints import step_dirs
from zerojax.run.config import dump_config
from zerojax.run.metrics.files import read_metrics
from zerojax.run.run_dir import RunFolder, sessions

pytestmark = pytest.mark.alone

LAUNCH = ("launch", "--nodes", 2, "--devices-per-node", 1)
STEPS = 300
IN_EVERY_NODE = {"preset": "zero3", "state_spread": "node"}
DELTA = {"preset": "delta", "error_feedback": True}
CHECKPOINT = {"every": 1, "keep": 1, "keep_every": 4, "keep_best": 1}


@pytest.fixture
def config(text: Path, tmp_path: Path) -> Path:
    path = tmp_path / "micro.toml"
    mesh = {"nodes": 2, "local": 1, "emulate": True}
    train = {"steps": 6, "eval_every": 1}
    path.write_text(dump_config(micro_config(text, mesh=mesh, train=train, checkpoint=CHECKPOINT)))
    return path


def run_through(*arguments: object) -> None:
    done = zerojax(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[Gloo]" not in done.stdout, "only zerojax's own output is on the terminal"


@pytest.mark.slow
def test_retention_and_another_runs_weights(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_through(*LAUNCH, config, "--run-dir", run)
    lines = read_metrics(run / "metrics.jsonl")
    best = min(lines, key=lambda line: line["validation_loss"])["step"]
    assert step_dirs.steps(run / "checkpoints") == sorted({4, 5, 6, best})

    weights = ("--init-from", run / "checkpoints" / "4")
    options = (config, *weights, "--train.steps", 2, "--zero.preset", "zero++")
    run_through(*LAUNCH, *options, "--run-dir", tmp_path / "two")
    run_through("train", *options, "--run-dir", tmp_path / "one")
    two, one = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    for name in ("loss", "grad_norm", "validation_loss"):
        np.testing.assert_allclose([x[name] for x in two], [x[name] for x in one], rtol=1e-5)
    assert two[0]["loss"] < lines[0]["loss"], "trained weights"


@pytest.mark.slow
def test_local_updates_paused_killed_and_resumed(text: Path, tmp_path: Path) -> None:
    """A node that stands still for a while, and a job that dies, change no bit; one process trains as two."""
    config, torn = tmp_path / "local.toml", tmp_path / "torn"
    settings = micro_config(
        text,
        mesh={"nodes": 2, "local": 1, "emulate": True},
        train={"steps": 40, "eval_every": 20},
        checkpoint={"every": 10},
        zero={"preset": "local", "every": 4, "block_size": 64},
    )
    config.write_text(dump_config(settings))
    run_through("train", config, "--run-dir", tmp_path / "one")
    command = [sys.executable, "-m", "zerojax", *LAUNCH, config, "--run-dir", torn]
    with subprocess.Popen([*map(str, command)], env=for_programs(), stdout=subprocess.DEVNULL) as launcher:
        wait_until(lambda: len(read_metrics(torn / "metrics.jsonl")) > 4, launcher)
        workers = psutil.Process(launcher.pid).children()
        assert len(workers) == 2
        workers[1].suspend()
        time.sleep(3)
        workers[1].resume()
        wait_until(lambda: bool(step_dirs.steps(torn / "checkpoints")), launcher)
        for worker in workers:
            worker.kill()
    run_through(*LAUNCH, config, "--run-dir", torn, "--resume", "must")
    assert lines(torn) == lines(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["world", "node"])
def test_after_a_node_is_lost_a_job_trains_like_a_fresh_start(
    text: Path, tmp_path: Path, spread: Literal["world", "node"]
) -> None:
    """Two nodes continue with the batch of three, from a checkpoint or from memory."""
    config, torn, fresh = tmp_path / "micro.toml", tmp_path / "torn", tmp_path / "fresh"
    settings = micro_config(
        text,
        mesh={"nodes": 3, "local": 1, "emulate": True},
        train={"steps": STEPS, "batch_size": 12, "eval_every": STEPS},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 2, "schedule": "constant"},
        checkpoint={"every": 20 if spread == "world" else 0},
        zero={"preset": "delta", "block_size": 64, "state_spread": spread},
    )
    config.write_text(dump_config(settings))
    job = ("launch", "--devices-per-node", 1, "--nodes")
    survives = (3, "--min-nodes", 2, "--restarts", 1, "--snapshot-seconds", 0.2)
    command = [sys.executable, "-m", "zerojax", *job, *survives, config, "--run-dir", torn]
    with subprocess.Popen([*map(str, command)], env=for_programs(), stdout=subprocess.DEVNULL) as launcher:
        wait_until(lambda: len(read_metrics(torn / "metrics.jsonl")) > 30, launcher)
        workers = sorted(psutil.Process(launcher.pid).children(), key=lambda process: process.pid)
        workers[2].kill()
        assert launcher.wait() == 0
    before, after = sessions(RunFolder(torn).read_summary())
    assert (before["devices"], after["devices"]) == (3, 2)
    assert after["step"] > 0
    run_through(*job, 3, config, "--run-dir", fresh, "--train.steps", after["step"])
    run_through(*job, 2, config, "--run-dir", fresh, "--resume", "must")
    assert lines(torn)[after["step"] :] == lines(fresh)[after["step"] :]


@pytest.mark.slow
def test_fewer_nodes_find_their_program(text: Path, tmp_path: Path) -> None:
    """Other processes have compiled it while more nodes trained."""
    config, run = tmp_path / "micro.toml", tmp_path / "run"
    mesh, train = {"nodes": 3, "local": 1, "emulate": True}, {"steps": 10**6, "batch_size": 12}
    config.write_text(dump_config(micro_config(text, mesh=mesh, train=train)))
    words = (*("launch", "--devices-per-node", 1, "--nodes", 3, "--restarts", 1, "--min-nodes", 2),)
    command = [sys.executable, "-m", "zerojax", *words, "--compile-ahead", config, "--run-dir", run]
    env = for_programs() | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}

    def steps() -> set[Path]:
        return {*(tmp_path / "compiled").glob("jit__train-*")}

    with subprocess.Popen([*map(str, command)], env=env, stdout=subprocess.DEVNULL) as launcher:
        wait_until(lambda: len(steps()) == 3 + 2, launcher)  # on CPUs one for each process
        before = steps()
        workers = sorted(psutil.Process(launcher.pid).children(), key=lambda process: process.pid)
        workers[2].kill()
        wait_until(lambda: len(sessions(RunFolder(run).read_summary())) == 2, launcher)
        start = read_metrics(run / "metrics.jsonl")[-1]["step"]
        wait_until(lambda: read_metrics(run / "metrics.jsonl")[-1]["step"] > start + 5, launcher)
        assert steps() == before
        launcher.terminate()


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "zero"), [(1, IN_EVERY_NODE), (0, IN_EVERY_NODE), (1, DELTA)])
def test_a_host_that_is_lost_and_replaced_changes_no_bit(
    text: Path, tmp_path: Path, lost: int, zero: dict[str, Any]
) -> None:
    """Its launcher and its snapshot are lost with it; another host has its state, or a copy of it."""
    config, torn = tmp_path / "micro.toml", tmp_path / "torn"
    settings = micro_config(
        text,
        mesh={"nodes": 2, "local": 2, "emulate": True},
        train={"steps": 100, "eval_every": 100},
        checkpoint={"every": 0},
        zero={"block_size": 64, **zero},
    )
    config.write_text(dump_config(settings))
    meeting = ("--hosts", 2, "--coordinator", f"127.0.0.1:{free_port()}", "--host")
    job = ("--devices-per-node", 2, "--nodes", 1, "--restarts", 1, "--snapshot-seconds", 0.2)
    copies = () if zero == IN_EVERY_NODE else ("--copy-seconds", 0.5)

    def start(host: int) -> subprocess.Popen[bytes]:
        words = ("launch", *meeting, host, *job, *copies, config, "--run-dir", torn)
        command = [sys.executable, "-m", "zerojax", *map(str, words)]
        with (tmp_path / f"{host}.log").open("ab") as log:
            return subprocess.Popen(command, env=for_programs(), stdout=log, stderr=log)

    launchers = [start(0), start(1)]
    wait_until(lambda: len(read_metrics(torn / "metrics.jsonl")) > 30, launchers[0])
    launchers[lost].kill()
    launchers[lost].wait()
    launchers[lost] = start(lost)
    assert [launcher.wait(timeout=300) for launcher in launchers] == [0, 0]
    _, after = sessions(RunFolder(torn).read_summary())
    assert after["step"] > 0
    assert any(f"host {lost} was lost" in note for note in after["notes"])
    run_through("launch", "--nodes", 2, *job[:2], config, "--run-dir", tmp_path / "whole")
    assert lines(torn) == lines(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("disks", "nodes"), [("shared", 2), ("own", 1)])
def test_a_host_that_comes_back_joins_a_job_that_goes_on_without_it(
    text: Path, tmp_path: Path, disks: str, nodes: int
) -> None:
    """Twice, with one restart: a host that joins gives back the one that its loss has used."""
    config, zero = tmp_path / "micro.toml", {"preset": "delta", "block_size": 64}
    train = {"steps": STEPS, "eval_every": STEPS}
    checkpoint = {"every": 0, "keep": 9}
    mesh = {"nodes": 2 * nodes, "local": 1, "emulate": True}
    config.write_text(
        dump_config(micro_config(text, mesh=mesh, train=train, checkpoint=checkpoint, zero=zero))
    )
    meeting = ("--hosts", 2, "--coordinator", f"127.0.0.1:{free_port()}", "--host")
    job = ("--devices-per-node", 1, "--nodes", nodes, "--restarts", 1, "--min-nodes", nodes)
    # A path that differs for each host, in its working directory.
    run = Path("/proc/self/cwd/run") if disks == "own" else tmp_path / "0" / "run"
    here = tmp_path / "0" / "run"

    def start(host: int) -> subprocess.Popen[bytes]:
        words = ("launch", *meeting, host, *job, config, "--run-dir", run)
        command = [sys.executable, "-m", "zerojax", *map(str, words)]
        (disk := tmp_path / str(host)).mkdir(exist_ok=True)
        with (tmp_path / f"{host}.log").open("ab") as log:
            return subprocess.Popen(command, env=for_programs(), cwd=disk, stdout=log, stderr=log)

    def trains(start: int) -> bool:
        """Whether this start of the run has taken steps."""
        found = sessions(RunFolder(here).read_summary())
        logged = read_metrics(here / "metrics.jsonl")
        return len(found) == start and logged[-1:] != [] and logged[-1]["step"] > found[-1]["step"] + 5

    launchers = [start(0), start(1)]
    wait_until(lambda: trains(1), launchers[0])
    for number in (2, 4):
        launchers[1].kill()
        launchers[1].wait()
        wait_until(partial(trains, number), launchers[0])
        with suspended(launchers[0]):  # a run ends for a host once it has trained for ten seconds
            if disks == "own":
                shutil.rmtree(tmp_path / "1")  # another host takes its place
            launchers[1] = start(1)
            time.sleep(10)
        wait_until(partial(trains, number + 1), launchers[0])
    assert [launcher.wait(timeout=300) for launcher in launchers] == [0, 0]
    found = sessions(RunFolder(here).read_summary())
    assert [one["devices"] for one in found] == [2 * nodes, nodes, 2 * nodes, nodes, 2 * nodes]
    assert any("after host 1 arrived" in note for note in found[-1]["notes"])
    joined, left = found[-1]["step"], found[-2]["step"]
    assert found[-2]["last_step"] == joined > left >= found[-3]["step"] > 0
    fresh = tmp_path / "fresh"
    shutil.copytree(here, fresh)
    for step in step_dirs.steps(fresh / "checkpoints"):
        if step > joined:
            shutil.rmtree(fresh / "checkpoints" / str(step))
    run_through("launch", "--nodes", 2 * nodes, *job[:2], config, "--run-dir", fresh, "--resume", "must")
    assert lines(here) == lines(fresh)


@contextmanager
def suspended(launcher: subprocess.Popen[bytes]) -> Generator[None]:
    """Let the processes of a launcher stand still for a while."""
    workers = psutil.Process(launcher.pid).children()
    for worker in workers:
        worker.suspend()
    yield
    for worker in workers:
        worker.resume()


def wait_until(done: Callable[[], bool], launcher: subprocess.Popen[bytes]) -> None:
    while not done():
        assert launcher.poll() is None
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_two_processes_post_train_as_one(config: Path, tmp_path: Path, method: str) -> None:
    run_through("train", config, "--run-dir", tmp_path / "start", "--train.steps", 2)
    (tmp_path / "reward.py").write_text("def reward(prompt, completion): return len(set(completion)) / 4")
    rows = "".join(f'{{"prompt": "all {i}"}}\n' for i in range(30))
    (tmp_path / "prompts.jsonl").write_text(rows)
    options = {
        "--init-from": tmp_path / "start",
        "--data.source": tmp_path / "prompts.jsonl",
        "--posttrain.method": method,
        "--posttrain.reward": f"{tmp_path / 'reward.py'}:reward",
        "--posttrain.group-size": 4 if method == "grpo" else 1,
        "--posttrain.max-new-tokens": 4,
        "--checkpoint.keep-best": 0,
        "--posttrain.kl": 0.01,
        "--train.steps": 3,
    }
    command = ("posttrain", config, *(word for pair in options.items() for word in pair))
    run_through(*LAUNCH, *command, "--run-dir", tmp_path / "two")
    run_through(*command, "--run-dir", tmp_path / "one")
    two, one = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    names = ["reward", "length", "kl", "grad_norm", "validation_reward"]
    names += ["value_loss", "value_grad_norm", "explained_variance"] if method == "ppo" else []
    for name in names:
        np.testing.assert_allclose([x[name] for x in two], [x[name] for x in one], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_processes_learn_from_preferences_as_one(config: Path, tmp_path: Path) -> None:
    run_through("train", config, "--run-dir", tmp_path / "start", "--train.steps", 2)
    rows = "".join(f'{{"prompt": "all {i}", "chosen": "a{i}", "rejected": "bb"}}\n' for i in range(60))
    (tmp_path / "pairs.jsonl").write_text(rows)
    options = {
        "--init-from": tmp_path / "start",
        "--data.source": tmp_path / "pairs.jsonl",
        "--posttrain.method": "dpo",
        "--train.steps": 4,
        "--train.accumulate": 2,
    }
    command = ("posttrain", config, *(word for pair in options.items() for word in pair))
    run_through(*LAUNCH, *command, "--run-dir", tmp_path / "two")
    run_through(*command, "--run-dir", tmp_path / "one")
    two, one = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    for name in ("loss", "margin", "grad_norm", "length", "validation_loss"):
        found, wanted = ([x[name] for x in lines if name in x] for lines in (two, one))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
