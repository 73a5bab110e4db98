"""A run in two processes, each with the run's folder on a disk of its own."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from environment import for_programs, zerojax
from micro_run import lines, micro_config

from zerojax.run.checkpoints import read_manifest, step_dirs, verify
from zerojax.run.config import dump_config

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="needs a path that differs for each process"),
]
RUN = Path("/proc/self/cwd/run")  # the same path everywhere, in each process's own working directory


def on_two_hosts(disks: Path, *arguments: object) -> None:
    """Run a command in two processes, as on two hosts."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "ZEROJAX_JOB_TOKEN": 32 * "x"}
    processes = []
    for rank in (0, 1):
        (disks / str(rank)).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "zerojax", *map(str, arguments), "--run-dir", str(RUN)]
        environment = for_programs() | job | {"JAX_PROCESS_ID": str(rank)}
        with (disks / f"{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(command, env=environment, cwd=disks / str(rank), stdout=log, stderr=log)
            )
    codes = [process.wait(timeout=300) for process in processes]
    assert codes == [0, 0], "".join((disks / f"{rank}.log").read_text() for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["world", "node"])
def test_a_run_saves_and_resumes_on_own_disks(text: Path, tmp_path: Path, spread: str) -> None:
    config, disks = tmp_path / "micro.toml", tmp_path / "disks"
    settings = micro_config(
        text,
        mesh={"nodes": 2, "local": 1, "emulate": True},
        train={"steps": 6, "eval_every": 3},
        checkpoint={"every": 2},
        zero={"preset": "delta", "block_size": 64, "state_spread": spread},
    )
    config.write_text(dump_config(settings))
    on_two_hosts(disks, "train", config)
    done = zerojax("train", config, "--run-dir", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    undisturbed = lines(disks / "0" / "run")
    assert [(x["step"], pytest.approx(x["loss"], rel=1e-5)) for x in undisturbed] == [
        (x["step"], x["loss"]) for x in lines(tmp_path / "one")
    ]
    folders = [disks / str(rank) / "run" / "checkpoints" for rank in (0, 1)]
    for folder in folders:
        assert step_dirs.steps(folder) == [4, 6]
        verify(folder / "6")  # brought to all hosts at the end
        assert read_manifest(folder / "4").parts == (2 if spread == "world" else 1)
        shutil.rmtree(folder / "6")  # the run was killed before
    if spread == "node":
        shutil.rmtree(disks / "0" / "run")
    os.remove(folders[1].parent / "data" / "train.bin")
    on_two_hosts(disks, "train", config, "--resume", "must")
    assert lines(disks / "0" / "run")[-2:] == undisturbed[-2:]
    done = zerojax("eval", disks / "0" / "run")  # on one host
    assert done.returncode == 0, done.stderr
