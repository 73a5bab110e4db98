"""Jobs of many processes under usual limits of open files; and a flood of idle connections to rank 0."""

import itertools
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from subprocess import PIPE

import pytest
from environment import ROOT, for_programs

from zerojax.multihost.distributed import free_port
from zerojax.multihost.peers.handshake import VARIABLE, new_token

pytestmark = pytest.mark.alone

CROWD = ROOT / "tests" / "helpers" / "crowd.py"

RANK_0 = """
import os, resource, sys
port, size, soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from zerojax import distributed
with distributed.joined(f"127.0.0.1:{port}", 0, size, join_timeout=280, peer_timeout=60):
    import jax
    value = jax._src.distributed.global_state.client.blocking_key_value_get(f"test/{size - 1}", 100_000)
    held = len(os.listdir("/dev/fd"))
    mine = [open(os.devnull) for _ in range(soft // 2)]  # files opened by training
    print(f"up: {value}; {held} files of {resource.getrlimit(resource.RLIMIT_NOFILE)}", flush=True)
"""


def job(size, parts, soft, hard):
    """Rank 0's exit code, output and standard error, and the output of the others."""
    port, env = free_port(), for_programs() | {VARIABLE: new_token()}
    first = [sys.executable, "-c", RANK_0, str(port), str(size), str(soft), str(hard)]
    bounds = [1 + (size - 1) * i // parts for i in range(parts + 1)]
    others = [
        [sys.executable, str(CROWD), str(port), str(size), str(a), str(b - a)]
        for a, b in itertools.pairwise(bounds)
    ]
    processes = [
        subprocess.Popen(command, env=env, text=True, stdout=PIPE, stderr=PIPE)
        for command in (first, *others)
    ]
    try:
        out, err = processes[0].communicate(timeout=500)
        if processes[0].returncode:
            return processes[0].returncode, out, err, []
        return 0, out, err, [process.communicate(timeout=120)[0] for process in processes[1:]]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_too_few_files_are_refused_in_a_line():
    code, out, err, _ = job(400, 1, 128, 1000)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(
        "zerojax.errors.ConfigurationError: 400 processes need up to 1,360 open files in rank 0. It "
    )
    assert err.splitlines()[-1].endswith("its hard limit is 1,000: raise it (ulimit -Hn)")


def test_a_flood_of_idle_connections_does_not_stop_a_job():
    """New connections replace closed ones. A limit of 400 files is no more than the job itself needs."""
    port, env = free_port(), for_programs() | {VARIABLE: new_token()}
    first = [sys.executable, "-c", RANK_0, str(port), "2", "400", "400"]
    second = [sys.executable, str(CROWD), str(port), "2", "1", "1"]
    crowd, gone = [], threading.Event()

    def flood():
        while not gone.is_set():
            with suppress(OSError):
                crowd.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            if len(crowd) > 600:
                crowd.pop(0).close()
            gone.wait(0.002)

    with subprocess.Popen(first, env=env, text=True, stdout=PIPE, stderr=PIPE) as rank_0:
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            while len(crowd) < 500:
                assert rank_0.poll() is None, rank_0.communicate()
                time.sleep(0.1)
            done = subprocess.run(second, env=env, text=True, capture_output=True, timeout=120)
            out, err = rank_0.communicate(timeout=120)
        finally:
            gone.set()
            thread.join()
            rank_0.kill()
            for stranger in crowd:
                stranger.close()
    assert (rank_0.returncode, err, done.stdout) == (0, "", "0 of 1 failed: []\n")
    assert out.startswith("up: value 1; ")


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
    assert out.startswith(f"up: value {size - 1}; ")
    assert all(text.startswith("0 of ") for text in others)
