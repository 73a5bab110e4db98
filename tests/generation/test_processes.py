"""Several processes generate what one does, and refuse together."""

import subprocess
import sys

import numpy as np
import pytest
from environment import ROOT, for_programs
from generation_models import SMALL, create, prompts

import zerojax
from zerojax.multihost.distributed import free_port


@pytest.mark.slow
def test_two_processes_generate_the_tokens_of_one(tmp_path):
    port, helpers = free_port(), ROOT / "tests" / "helpers"
    environment = for_programs() | {"PYTHONPATH": f"{ROOT}:{helpers}"}
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    workers = [
        subprocess.Popen(
            [sys.executable, helpers / "generation_worker.py", str(port), str(rank), "2", tmp_path],
            env=environment,
        )
        for rank in range(2)
    ]
    assert [worker.wait(timeout=400) for worker in workers] == [0, 0]
    one = zerojax.generate(create(SMALL, 2, 2), prompts(10), 6, seed=3)
    for form in ("gathered", "compute"):
        parts = [np.load(tmp_path / f"{form}{rank}.npz") for rank in range(2)]
        for number, whole in enumerate(one):
            joined = np.concatenate([part[f"arr_{number}"] for part in parts])
            np.testing.assert_allclose(joined, whole, atol=1e-5)
    refused = [(tmp_path / f"refused{rank}").read_text().splitlines() for rank in range(2)]
    assert "the processes pass [5, 4] prompts" in refused[0][0]
    assert refused[0][0] == refused[1][0]
    assert "prompt 0 has 24 tokens" in refused[0][1]
    assert "the prompts of another process were refused" in refused[1][1]
