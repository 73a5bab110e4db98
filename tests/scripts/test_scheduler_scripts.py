"""What the scripts for SLURM and Kubernetes tell the processes, without either."""

import os
import subprocess

import pytest
import yaml
from environment import ROOT

from zerojax.multihost.peers.handshake import VARIABLE

pytestmark = pytest.mark.alone


# srun, as far as the script needs it: the command in two tasks, with the environment handed on.
STUBS = {
    "scontrol": "echo node0",
    "srun": 'shift 2; for rank in 0 1; do SLURM_PROCID=$rank "$@" || exit; done',
    "zerojax": 'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS: $*"; echo $'
    + VARIABLE,
}


@pytest.fixture
def environment(tmp_path):
    venv = tmp_path / "bin"
    venv.mkdir()
    for name, line in STUBS.items():
        (venv / name).write_text(f"#!/bin/bash\n{line}\n")
        (venv / name).chmod(0o755)
    (venv / "activate").write_text(f"PATH={venv}:$PATH\n")
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return kept | {
        "ZEROJAX_VENV": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": "2",
    }


def test_all_tasks_of_a_slurm_job_have_one_token_and_each_job_its_own(environment):
    tokens = []
    for _ in range(2):
        script = ROOT / "scripts" / "slurm" / "train.sbatch"
        command = ["bash", str(script), "gpt-1b", "--run-dir", "x y"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        told, token, told_1, token_1 = done.stdout.splitlines()
        assert told == "0 of 2 at node0:20001: train gpt-1b --run-dir x y"
        assert told_1.startswith("1 of 2 at node0:20001: ")
        assert token == token_1
        assert len(token) == 64
        assert set(token) <= set("0123456789abcdef")
        tokens.append(token)
    assert tokens[0] != tokens[1]


def test_pods_take_the_token_from_a_secret_that_is_not_in_the_file():
    text = (ROOT / "scripts" / "k8s" / "train.yaml").read_text()
    (worker,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    (container,) = worker["template"]["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry for entry in container["env"]}
    secret = variables[VARIABLE]["valueFrom"]["secretKeyRef"]
    assert "value" not in variables[VARIABLE]
    assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=" in text
