"""What NCCL is told: the table from facts to variables, and never over the user's own."""

import os
from dataclasses import dataclass
from typing import Any

import jax
import pytest

import zerojax
from zerojax.cli import doctor
from zerojax.errors import ConfigurationError
from zerojax.network import nccl
from zerojax.network.discovery import Network
from zerojax.run.config import MeshSection

GBIT = 1e9 / 8
THREADS, SOCKETS, SPLIT = nccl.THREADS, nccl.SOCKETS, nccl.SPLIT
BUFFER, PIECES = nccl.BUFFER, nccl.PIECES
LONG = {BUFFER: "16777216", PIECES: "2097152"}


def network(gigabits=100.0, **facts):
    return Network("eth0", gigabits and gigabits * GBIT, "0x15b3", **facts)


def chosen(network, nodes=2, local=1, cores=64, given=()):
    found = nccl.settings(network, nodes=nodes, local=local, cores=cores, given=dict(given))
    return {setting.name: setting.value for setting in found if setting.value is not None}, found


@pytest.mark.parametrize(
    ("gigabits", "local", "cores", "threads"),
    [
        (1, 1, 64, None),
        (10, 1, 64, None),
        (None, 1, 64, "2"),
        (25, 1, 64, "2"),
        (50, 1, 64, "2"),
        (1000, 1, 64, "2"),
        # GPUs of a node share its link, and each has two connections of its own.
        (100, 2, 64, "1"),
        (100, 3, 64, "1"),
        (100, 8, 64, None),
        (None, 4, 64, None),
        # Every thread, at both ends of a connection, may keep a core busy.
        (100, 1, 16, "2"),
        (100, 1, 15, None),
        (100, 2, 16, "1"),
        (100, 2, 8, None),
    ],
)
def test_as_many_flows_as_fill_the_link(gigabits, local, cores, threads):
    told, found = chosen(network(gigabits), local=local, cores=cores)
    expected = {SPLIT: "0"} | ({THREADS: threads} | LONG if threads else {})
    if local > 1:  # NVLink's buffers would grow, too
        expected.pop(BUFFER, None)
    assert told == expected
    assert all(len(setting.reason) > 10 for setting in found)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"rdma": "InfiniBand (mlx5_0)"}, "InfiniBand"),
        ({"loopback": True}, "this host"),
        ({"interface": ""}, "not known"),
        ({"rate": 10 * GBIT}, "one thread fills a link of 10 Gb/s"),
    ],
)
def test_where_sockets_are_left_alone(facts, reason):
    told, found = chosen(Network(**({"interface": "eth0", "rate": 100 * GBIT} | facts)))
    assert told == {SPLIT: "0"}
    assert reason in found[1].reason


@pytest.mark.parametrize(("vendor", "name"), [("0x1d0f", "Amazon"), ("0x1ae0", "Google")])
def test_where_nccl_opens_flows_itself_it_gets_pieces_to_share(vendor, name):
    told, found = chosen(Network("eth0", 100 * GBIT, vendor))
    assert told == {SPLIT: "0"} | LONG
    assert name in found[1].reason


def test_one_node_needs_nothing():
    assert chosen(network(), nodes=1) == ({}, [])


@pytest.mark.parametrize("name", [THREADS, SOCKETS])
def test_a_variable_of_the_user_stays_and_so_does_its_twin(name):
    told, found = chosen(network(), given={name: "2", SPLIT: "1", BUFFER: "8388608"})
    assert told == {PIECES: "2097152"}
    assert [str(setting) for setting in found[:3]] == [
        f"{SPLIT}: set to 1 already",
        f"{THREADS}: set to 2 already" if name == THREADS else f"{THREADS}: {SOCKETS} is set to 2 already",
        f"{BUFFER}: set to 8388608 already",
    ]


def test_the_users_own_pieces_stay():
    told, found = chosen(network(), given={PIECES: "262144"})
    assert told == {SPLIT: "0", THREADS: "2", BUFFER: LONG[BUFFER]}
    assert str(found[-1]) == f"{PIECES}: set to 262144 already"


def test_variables_are_read_from_the_environment_and_from_files(tmp_path):
    (tmp_path / ".nccl.conf").write_text(f"# mine\n{SOCKETS} = 2 # two\n{SPLIT}=0\n")
    environ = {"HOME": str(tmp_path), SPLIT: "1", "PATH": "/bin"}
    assert nccl.given_settings(environ) == {SOCKETS: "2", SPLIT: "1"}
    assert nccl.given_settings({"NCCL_CONF_FILE": str(tmp_path / ".nccl.conf")})[SPLIT] == "0"
    assert nccl.given_settings({}) == {}


def test_what_is_applied_is_in_the_environment_and_announced(monkeypatch):
    monkeypatch.setattr(nccl, "_applied", [])
    for name in nccl.NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    _, found = chosen(network(25), given={SPLIT: "1"})
    nccl.apply(found)
    assert os.environ[THREADS] == "2"
    assert SPLIT not in os.environ
    assert list(map(str, nccl.applied())) == [
        f"{THREADS}=2: a link of 25 Gb/s: 4 threads of a node send, each with a TCP flow, instead of 1",
        f"{BUFFER}=16777216: 16 MiB a connection in place of 4, for longer pieces",
        f"{PIECES}=2097152: pieces of up to 2 MiB instead of 128 KiB, for the flows to share",
    ]
    exports = {THREADS: "2"} | LONG
    assert nccl.exports(found) == [f"export {name}={value}" for name, value in exports.items()]


@dataclass(frozen=True)
class Gpu:
    """What a mesh needs to know of a GPU."""

    process_index: int
    id: int
    platform: str = "cuda"
    device_kind: str = "H100"


@pytest.fixture
def job(monkeypatch):
    """A job on a network of 100 Gb/s without RDMA, and a process with cores enough."""
    for name in nccl.NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_NET", "Socket")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setattr(nccl, "_applied", [])
    monkeypatch.setattr(nccl, "discover_network", network)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


@pytest.mark.usefixtures("job")
def test_a_mesh_of_gpus_of_several_processes_tells_nccl():
    gpus: list[Any] = [Gpu(i // 2, i) for i in range(4)]
    zerojax.make_mesh(devices=gpus[:2])
    assert nccl.applied() == []
    zerojax.make_mesh(devices=gpus)
    assert (os.environ[SPLIT], os.environ[THREADS]) == ("0", "1")  # two GPUs a node, four flows
    assert [setting.name for setting in nccl.applied()] == [SPLIT, THREADS, PIECES]
    zerojax.make_mesh(devices=gpus)
    assert len(nccl.applied()) == 3
    zerojax.make_mesh(devices=[Gpu(i // 2, i, "cpu", "cpu") for i in range(4)])
    assert len(nccl.applied()) == 3


@pytest.mark.usefixtures("job")
def test_processes_of_one_gpu_each_share_a_nodes_flows_and_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    gpus: list[Any] = [Gpu(i, i) for i in range(4)]
    zerojax.make_mesh(2, 2, devices=gpus)
    assert os.environ[THREADS] == "1"  # of the cores of both processes


@pytest.mark.usefixtures("job")
def test_a_nodes_cores_may_be_named(monkeypatch):
    gpus: list[Any] = [Gpu(i, i) for i in range(2)]
    monkeypatch.setenv(nccl.CORES, "8")
    zerojax.make_mesh(devices=gpus)
    assert THREADS not in os.environ
    for wrong in ("0", "eight", "-1"):
        monkeypatch.setenv(nccl.CORES, wrong)
        with pytest.raises(ConfigurationError, match=f"{nccl.CORES}={wrong}"):
            zerojax.make_mesh(devices=gpus)


@pytest.mark.usefixtures("job")
def test_doctor_tells_it_for_other_programs(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: [Gpu(0, 0), Gpu(1, 1)])
    rows = dict(doctor._network(MeshSection()))
    assert rows["interface"] == "eth0, 100 Gb/s"
    assert rows["NCCL uses"] == "TCP sockets"
    assert rows[THREADS].startswith("2 (set by zerojax): a link of 100 Gb/s")
    exports = {SPLIT: "0", THREADS: "2"} | LONG
    assert rows["other programs"] == "; ".join(f"export {name}={value}" for name, value in exports.items())
    monkeypatch.setenv(THREADS, "4")
    assert dict(doctor._network(MeshSection()))[THREADS] == "left alone: set to 4 already"


def test_doctor_alone_has_no_network():
    assert doctor._network(MeshSection()) == [("nodes", "one process: nothing crosses a network")]
