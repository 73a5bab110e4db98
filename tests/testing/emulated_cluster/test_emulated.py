"""Emulated clusters: the environment of a node, its link, and cleaning up."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerojax import cluster
from zerojax.multihost.devices import separate_nodes, share_devices
from zerojax.testing.emulated_cluster import inside
from zerojax.testing.emulated_cluster.network import INTERFACE

pytestmark = pytest.mark.alone

needs_namespaces = pytest.mark.skipif(cluster.unavailable() is not None, reason=str(cluster.unavailable()))


def run(nodes, script, **options):
    """The lines of each node, and the result."""
    output = io.BytesIO()
    with cluster.EmulatedCluster(nodes, 2, rate="1gbit", platform="cpu") as emulated:
        result = emulated.run(["sh", "-c", script], output=output, timeout=60, **options)
    lines = output.getvalue().decode().splitlines()
    return [[x.split("] ", 1)[1] for x in lines if x.startswith(f"[node{i}]")] for i in range(nodes)], result


def script(*arguments, **options):
    command = [sys.executable, "-m", "zerojax", "emulate", "--platform", "cpu", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def alive(marker: str) -> bool:
    """Whether any process has the marker among its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def wait_until(condition, within=60.0):
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_signal_for_a_command_that_has_ended_is_ignored():
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    inside._signal_group(ended.pid, signal.SIGTERM)


@needs_namespaces
def test_a_node_is_a_host_of_its_own():
    lines, result = run(3, "hostname; hostname -i; ls -d /proc/[0-9]* | wc -l; tail -n +3 /proc/net/dev")
    assert result.code == 0
    for node, (hostname, address, processes, *interfaces) in enumerate(lines):
        assert (hostname, address) == (f"node{node}", f"10.77.0.{node + 1}")
        assert int(processes) <= 5
        assert {i.split(":")[0].strip() for i in interfaces} == {"lo", "wire0"}


@needs_namespaces
def test_the_environment_of_a_node(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    lines, _ = run(
        2,
        "echo $JAX_COORDINATOR_ADDRESS $JAX_PROCESS_ID $JAX_NUM_PROCESSES $NCCL_HOSTID "
        "$NCCL_SOCKET_IFNAME $ZEROJAX_LINK_RATE $ZEROJAX_NODE_CORES $EXTRA [$https_proxy]; "
        "echo $XLA_FLAGS; echo $ZEROJAX_JOB_TOKEN",
        env={"EXTRA": "more"},
    )
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    (token,) = {token for _, _, token in lines}
    assert len(token) == 64
    for node, (told, flags, _) in enumerate(lines):
        assert told == f"10.77.0.1:9876 {node} 2 node{node} wire0 1gbit {cores} more []"
        assert flags.endswith("--xla_force_host_platform_device_count=2")


def test_nodes_may_share_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,0,1")
    shares = share_devices(2, 2, "gpu")
    assert shares == [{"CUDA_VISIBLE_DEVICES": "0,1"}] * 2
    assert [one["NCCL_HOSTID"] for one in separate_nodes(shares)] == ["node0", "node1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    shares = share_devices(2, 2, "gpu")
    assert separate_nodes(shares) == shares


@needs_namespaces
@pytest.mark.parametrize(("rate", "later"), [("10mbit", None), ("1gbit", "10mbit")])
def test_the_rate_holds(rate, later):
    """1 MB takes at least its time at 10 Mbit/s, apart from the bucket's 128 KB."""
    slow_down = "" if later is None else f"from zerojax import cluster; cluster.limit_link({later!r})\n"
    sender = slow_down + (
        "import socket, sys, time\n"
        "if sys.argv[1] == '0':\n"
        "    with socket.create_server(('', 5000)) as s, s.accept()[0] as c:\n"
        "        start = time.monotonic(); left = 1_000_000\n"
        "        while left: left -= len(c.recv(left))\n"
        "        print(time.monotonic() - start)\n"
        "else:\n"
        "    while True:\n"
        "        try: c = socket.create_connection(('node0', 5000)); break\n"
        "        except OSError: time.sleep(0.05)\n"
        "    c.sendall(bytes(1_000_000)); c.recv(1); c.close()\n"
    )
    output = io.BytesIO()
    with cluster.EmulatedCluster(2, rate=rate, platform="cpu") as emulated:
        emulated.run(lambda node: [sys.executable, "-c", sender, str(node)], output=output, timeout=60)
        links = emulated.link_bytes()
    assert float(output.getvalue().decode().split()[-1]) > 0.6
    assert links[1].sent > 1_000_000
    assert links[0].received > 1_000_000


@needs_namespaces
def test_a_link_without_a_rate_cannot_be_limited_later():
    code = "from zerojax import cluster; cluster.limit_link('1gbit')"
    output = io.BytesIO()
    with cluster.EmulatedCluster(1, rate=None, platform="cpu") as emulated:
        result = emulated.run([sys.executable, "-c", code], output=output, timeout=60)
    assert result.code == 1
    assert "create the cluster with the highest rate" in output.getvalue().decode()


def test_no_link_outside_a_cluster():
    with pytest.raises(cluster.ClusterError, match="not a node of an emulated cluster"):
        cluster.limit_link("1gbit")


@needs_namespaces
def test_file_descriptors_are_released():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run(2, "true")
    assert len(os.listdir("/proc/self/fd")) == before


@needs_namespaces
def test_the_command_prints_bytes_and_returns_the_highest_code():
    process = script("--nodes", "2", "--", "sh", "-c", "[ $NODE_RANK = 0 ] || exit 5; sleep 0.2")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "node1 ended with exit code 5" in err
    table = err.splitlines()[-3:]
    assert [line.split()[0] for line in table] == ["link", "node0", "node1"]
    assert out == ""


@needs_namespaces
def test_packets_are_as_large_as_asked():
    output = io.BytesIO()
    program = f"import psutil; print(psutil.net_if_stats()['{INTERFACE}'].mtu)"
    with cluster.EmulatedCluster(2, platform="cpu", mtu=9000) as emulated:
        emulated.run([sys.executable, "-c", program], output=output)
    assert sorted(output.getvalue().decode().splitlines()) == ["[node0] 9000", "[node1] 9000"]


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_script(number):
    """Not even a process that has left its session, if the script is killed with SIGKILL."""
    marker = f"zerojax-test-{os.getpid()}-{number}"
    forks = f"setsid sh -c 'sleep 600; :' {marker} & echo up; wait"
    process = script("--nodes", "2", "--grace", "5", "--", "sh", "-c", forks)
    assert process.stdout is not None
    assert [process.stdout.readline().split()[1] for _ in range(2)] == ["up", "up"]
    wait_until(lambda: alive(marker))
    process.send_signal(number)
    process.communicate(timeout=120)
    wait_until(lambda: not alive(marker))


COUNT = (
    "n=0; trap 'n=$((n+1))' TERM; echo up; i=0; while [ $i -lt 20 ]; do sleep 0.05; i=$((i+1)); done; "
    "echo heard $n"
)


@needs_namespaces
def test_a_signal_reaches_the_command_once():
    process = script("--nodes", "1", "--", "sh", "-c", COUNT)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    out, _ = process.communicate(timeout=120)
    assert out.splitlines()[-1] == "[node0] heard 1"


SLOW_PARENTS = """
import os, runpy, sys, time
fork = os.fork

def slow_fork():
    child = fork()
    if child:
        time.sleep(0.3)
    return child

os.fork = slow_fork
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs_namespaces
def test_a_signal_reaches_a_command_that_is_up_before_its_parents_go_on():
    """On a busy machine the processes above the command may not have run since they forked."""
    with open("/proc/self/ns/net") as own:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SLOW_PARENTS,
                inside.__file__,
                str(own.fileno()),
                "node0",
                "",
                "sh",
                "-c",
                COUNT,
            ],
            pass_fds=(own.fileno(),),
            start_new_session=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert out == "heard 1\n"
    assert process.returncode == 0


def test_gpus_are_divided_among_nodes(monkeypatch):
    if cluster.unavailable():
        pytest.skip(str(cluster.unavailable()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    with cluster.EmulatedCluster(2, 2, platform="gpu") as emulated:
        shares = [emulated.environment(i)["CUDA_VISIBLE_DEVICES"] for i in range(2)]
    assert shares == ["3,5", "6,7"]
    with pytest.raises(ValueError, match="6 x 1 GPUs were requested, but this machine has 4"):
        cluster.EmulatedCluster(6, 1)


def test_refuses_without_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(cluster.ClusterError, match="root"):
        cluster.EmulatedCluster(2, platform="cpu")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": "fast"},
        {"rate": "10gbps"},
        {"latency": "50"},
        {"nodes": 0},
        {"devices_per_node": 0},
        {"mtu": 500},
    ],
)
def test_refuses(wrong):
    with pytest.raises(ValueError):  # noqa: PT011  (each says something else)
        cluster.EmulatedCluster(**({"nodes": 2, "platform": "cpu"} | wrong))
