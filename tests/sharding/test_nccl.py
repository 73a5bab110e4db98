"""What NCCL is told: the table from facts to variables, and never over the user's own."""

import os

import pytest

from zerojax.sharding import nccl
from zerojax.sharding.network import Network

GBIT = 1e9 / 8
THREADS, SOCKETS, SPLIT = nccl.THREADS, nccl.SOCKETS, nccl.SPLIT


def network(gigabits=100.0, **facts):
    return Network("eth0", gigabits and gigabits * GBIT, "0x15b3", **facts)


def chosen(network, nodes=2, local=1, cores=64, given=()):
    found = nccl.settings(network, nodes=nodes, local=local, cores=cores, given=dict(given))
    return {setting.name: setting.value for setting in found if setting.value is not None}, found


@pytest.mark.parametrize(
    ("gigabits", "local", "cores", "threads", "sockets"),
    [
        (1, 1, 64, None, None),
        (10, 1, 64, None, None),
        (None, 1, 64, "4", None),
        (25, 1, 64, "4", None),
        (40, 1, 64, "4", None),
        (100, 1, 64, "8", None),
        (200, 1, 64, "16", None),
        (400, 1, 64, "16", "2"),
        (6400, 1, 64, "16", "4"),  # NCCL's own bound
        # GPUs of a node share its link, and each opens flows of its own.
        (100, 2, 64, "4", None),
        (100, 8, 64, None, None),
        (None, 4, 64, None, None),
        (400, 8, 64, "4", None),
        # Every thread, at both ends of a connection, may keep a core busy.
        (100, 1, 8, "4", None),
        (100, 1, 2, None, None),
        (400, 8, 32, "2", None),
    ],
)
def test_as_many_flows_as_fill_the_link(gigabits, local, cores, threads, sockets):
    told, found = chosen(network(gigabits), local=local, cores=cores)
    assert told == {
        name: value for name, value in ((SPLIT, "0"), (THREADS, threads), (SOCKETS, sockets)) if value
    }
    assert all(len(setting.reason) > 10 for setting in found)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"rdma": "InfiniBand (mlx5_0)"}, "InfiniBand"),
        ({"loopback": True}, "this host"),
        ({"vendor": "0x1d0f"}, "Amazon"),
        ({"vendor": "0x1ae0"}, "Google"),
        ({"interface": ""}, "not known"),
        ({"rate": 10 * GBIT}, "one TCP flow fills a link of 10 Gb/s"),
    ],
)
def test_where_sockets_are_left_alone(facts, reason):
    told, found = chosen(Network(**({"interface": "eth0", "rate": 100 * GBIT} | facts)))
    assert told == {SPLIT: "0"}
    assert reason in found[-1].reason


def test_one_node_needs_nothing():
    assert chosen(network(), nodes=1) == ({}, [])


@pytest.mark.parametrize("name", [THREADS, SOCKETS])
def test_a_variable_of_the_user_stays_and_so_does_its_twin(name):
    told, found = chosen(network(), given={name: "2", SPLIT: "1"})
    assert told == {}
    assert [str(setting) for setting in found] == [
        f"{SPLIT}: set to 1 already",
        f"{THREADS}: {name} is set to 2 already",
    ]


def test_variables_are_read_from_the_environment_and_from_files(tmp_path):
    (tmp_path / ".nccl.conf").write_text(f"# mine\n{SOCKETS} = 2 # two\n{SPLIT}=0\n")
    environ = {"HOME": str(tmp_path), SPLIT: "1", "PATH": "/bin"}
    assert nccl.given_settings(environ) == {SOCKETS: "2", SPLIT: "1"}
    assert nccl.given_settings({"NCCL_CONF_FILE": str(tmp_path / ".nccl.conf")})[SPLIT] == "0"
    assert nccl.given_settings({}) == {}


def test_what_is_applied_is_in_the_environment_and_announced(monkeypatch):
    monkeypatch.setattr(nccl, "_applied", [])
    for name in (THREADS, SPLIT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    _, found = chosen(network(25), given={SPLIT: "1"})
    nccl.apply(found)
    assert os.environ[THREADS] == "4"
    assert SPLIT not in os.environ
    assert list(map(str, nccl.applied())) == [
        f"{THREADS}=4: a link of 25 Gb/s: 4 TCP flows a node in place of 1"
    ]
    assert nccl.exports(found) == [f"export {THREADS}=4"]
