"""zerojax.distributed: what is refused before anything is connected, and a job of two."""

import socket

import pytest

from zerojax import distributed
from zerojax.errors import ZeroError

NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_BIND_ADDRESS")


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    for name in (*NAMES, "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_LOCAL_SIZE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def join(*arguments):
    with distributed.joined(*arguments):
        pass


def test_alone_where_nothing_is_said():
    with distributed.joined() as peers:
        assert peers is None
    with distributed.joined("localhost:1", 0, 1) as peers:
        assert peers is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", 0, None), "no num_processes given"),
        ((None, 0, 2), "no coordinator given"),
        (("host:1", 2, 2), "process 2 of 2"),
        (("host:1", -1, 2), "process -1 of 2"),
        (("host", 0, 2), "HOST:PORT"),
        (("host:port", 0, 2), "HOST:PORT"),
        (("host:99999", 0, 2), "HOST:PORT"),
        (("no-such-host.invalid:1", 0, 2), r"no-such-host\.invalid is not known here"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ZeroError, match=message):
        join(*arguments)


def test_the_environment_is_read(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    with pytest.raises(ZeroError, match="no JAX_COORDINATOR_ADDRESS"):
        join()
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ZeroError, match="'two'"):
        join()


def test_a_coordinator_that_only_hears_itself_is_refused(monkeypatch):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answer)
    with pytest.raises(ZeroError, match=r"node7 means 127\.0\.1\.1"):
        join("node7:1", 0, 2)
