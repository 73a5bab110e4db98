"""Set-up of a job's processes: what libraries print stays off the terminal, and how many GPUs they use."""

import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
from environment import for_programs

from zerojax.cli.cluster import joined_cluster
from zerojax.multihost import distributed
from zerojax.run.config import ClusterSection, MeshSection

PROGRAM = """
import os, sys
from jax._src.lib import utils
from zerojax import terminal
from zerojax.cli.cluster import only_own_output

only_own_output()
os.write(1, b"a library's line\\n")
print("printed", os.environ["TF_CPP_MIN_LOG_LEVEL"])
terminal.stdout.write("written\\n")
os.write(2, b"a crash\\n")
"""


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, ["printed 3", "written"]),
        pytest.param(
            {"NCCL_DEBUG": "INFO"}, ["a library's line", "printed 3", "written"], marks=pytest.mark.slow
        ),
        ({"TF_CPP_MIN_LOG_LEVEL": "0"}, ["a library's line", "printed 0", "written"]),
    ],
    ids=["default", "NCCL_DEBUG", "all"],
)
def test_only_own_output_is_shown_at_the_default_level(variables: dict[str, str], shown: list[str]) -> None:
    left_out = ("NCCL_DEBUG", "TF_CPP_MIN_LOG_LEVEL")
    environment = {name: value for name, value in for_programs().items() if name not in left_out}
    command = [sys.executable, "-u", "-c", PROGRAM]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (shown, "a crash\n")


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [(MeshSection(), None), (MeshSection(local=2), 2), (MeshSection(nodes=2, local=4), 8)],
    ids=["all", "local", "nodes"],
)
def test_a_mesh_of_some_gpus_shares_host_memory_among_them(mesh: MeshSection, devices: int | None) -> None:
    inner = mock.patch.object(distributed, "joined", return_value=nullcontext())
    with inner as joined, joined_cluster(mesh, ClusterSection()):
        pass
    assert joined.call_args.kwargs["devices"] == devices
