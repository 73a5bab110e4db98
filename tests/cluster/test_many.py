"""As many processes as a job may have, at the limits that systems set; and strangers who keep rank 0 busy."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from environment import for_programs

from zerojax.distributed import free_port
from zerojax.peers.handshake import VARIABLE, new_token

CROWD = Path(__file__).parent / "crowd.py"

RANK_0 = """
import os, resource, sys
port, size, soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from zerojax import distributed
with distributed.joined(f"127.0.0.1:{port}", 0, size, join_timeout=280, peer_timeout=60):
    import jax
    value = jax._src.distributed.global_state.client.blocking_key_value_get(f"test/{size - 1}", 100_000)
    held = len(os.listdir("/dev/fd"))
    mine = [open(os.devnull) for _ in range(soft // 2)]  # what the training opens
    print(f"up: {value}; {held} files of {resource.getrlimit(resource.RLIMIT_NOFILE)}", flush=True)
"""


def job(size, parts, soft, hard):
    """Rank 0's exit code, output and standard error, and the output of the others."""
    port, env = free_port(), for_programs() | {VARIABLE: new_token()}
    first = [sys.executable, "-c", RANK_0, str(port), str(size), str(soft), str(hard)]
    bounds = [1 + (size - 1) * i // parts for i in range(parts + 1)]
    others = [
        [sys.executable, str(CROWD), str(port), str(size), str(a), str(b - a)]
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    processes = [
        subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for command in (first, *others)
    ]
    try:
        out, err = processes[0].communicate(timeout=500)
        if processes[0].returncode:
            return processes[0].returncode, out, err, []
        return 0, out, err, [process.communicate(timeout=60)[0] for process in processes[1:]]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("size", "parts", "soft", "hard"),
    [
        (64, 1, 128, 700),
        pytest.param(1024, 8, 1024, 4096, marks=[pytest.mark.slow, pytest.mark.timeout(1000)]),
    ],
)
def test_a_job_of_more_processes_than_the_soft_limit_has_files(size, parts, soft, hard):
    code, out, err, others = job(size, parts, soft, hard)
    assert (code, err) == (0, "")
    print(out)
    assert out.startswith(f"up: value {size - 1}; ")
    assert all(text.startswith("0 of ") for text in others)
