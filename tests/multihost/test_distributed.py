"""zerojax.multihost.distributed: checks before connecting, and a job of two processes."""

import socket
import stat
import subprocess
import sys
from unittest import mock

import jax
import pytest
from environment import for_programs
from jax._src.lib import utils
from kernel_cases import has_gpu

from zerojax import distributed
from zerojax.errors import EXIT_FAILED, EXIT_WRONG_USE, JobError, ZeroError

pytestmark = pytest.mark.alone

NAMES = (
    "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_BIND_ADDRESS",
    "ZEROJAX_JOB_TOKEN", "ZEROJAX_INSECURE",
)  # fmt: skip
TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    for name in (*NAMES, "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_LOCAL_SIZE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def join(*arguments, **options):
    with distributed.joined(*arguments, **options):
        pass


class Begun(Exception):
    """All checks have passed: the processes would connect now."""


@pytest.fixture
def begin(monkeypatch):
    """The place that ``Peers`` receives, without connecting."""
    places = []

    def stop(place, facts, **_):
        places.append(place)
        raise Begun

    monkeypatch.setattr("zerojax.multihost.distributed.Peers", stop)

    def begun(*arguments, **options):
        with pytest.raises(Begun):
            join(*arguments, **options)
        return places.pop()

    return begun


def test_alone_without_a_job():
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


def test_a_coordinator_on_loopback_only_is_refused(monkeypatch):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answer)
    with pytest.raises(ZeroError, match=r"node7 means 127\.0\.1\.1"):
        join("node7:1", 0, 2)


GLOO = (
    "UNKNOWN: Gloo context initialization failed: [external/gloo/transport/tcp/pair.cc:152] timed out "
    "connecting: SO_ERROR: Connection refused, remote=[{}]:21404$0"
)


@pytest.mark.parametrize(
    ("coordinator", "remote", "explained"),
    [
        ("10.77.0.1:5555", "127.0.0.1", True),
        ("[fd00::1]:5555", "::1", True),
        ("10.77.0.1:5555", "10.77.0.2", False),
        ("127.0.0.1:5555", "127.0.0.1", False),  # all processes are on this host
    ],
)
def test_gloo_that_was_told_a_loopback_address(monkeypatch, capsys, coordinator, remote, explained):
    peers = mock.Mock()
    peers.fail.side_effect = Begun
    monkeypatch.setattr(distributed, "Peers", lambda *_, **__: peers)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    with pytest.raises(Begun), distributed.joined(coordinator, 1, 2, insecure=True):
        raise RuntimeError(GLOO.format(remote))
    code, line = peers.fail.call_args.args
    assert code == (EXIT_WRONG_USE if explained else EXIT_FAILED)
    assert (f"the name of a host means {remote}, which no other host can reach" in line) == explained
    assert ("Traceback" in capsys.readouterr().err) != explained
    assert f"remote=[{remote}]:21404" in line
    assert len(line) <= 500


OPEN = [
    (("10.1.2.3:99", 0, 2), {}),
    (("10.1.2.3:99", 1, 2), {}),
    (("127.0.0.1:99", 0, 2), {"bind_address": "[::]:99"}),
    (("127.0.0.1:99", 0, 2), {"bind_address": "0.0.0.0:99"}),
]


@pytest.mark.parametrize(("arguments", "options"), OPEN)
def test_without_a_token_only_loopback_is_allowed(begin, monkeypatch, arguments, options):
    """A process that connects to rank 0 elsewhere is refused, too, instead of waiting in vain."""
    with pytest.raises(ZeroError, match=r"without a token anybody .*`openssl rand -hex 32`; or --insecure"):
        join(*arguments, **options)
    assert begin(*arguments, insecure=True, **options).token == ""
    monkeypatch.setenv("ZEROJAX_INSECURE", "1")
    assert begin(*arguments, **options).token == ""
    assert begin(*arguments, token=TOKEN, **options).token == TOKEN
    monkeypatch.setenv("ZEROJAX_INSECURE", "0")
    monkeypatch.setenv("ZEROJAX_JOB_TOKEN", f"{TOKEN}\n")
    assert begin(*arguments, **options).token == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.1.2.3"])
def test_this_host_needs_no_token(begin, host):
    assert begin(f"{host}:99", 1, 2).token == ""


@pytest.mark.parametrize("token", ["changeme", "x" * 15, "0123456789\tabcdef", "gehe\u00edm" * 9])
def test_an_invalid_token(token):
    with pytest.raises(ZeroError, match="at least 16 plain characters"):
        join("127.0.0.1:99", 0, 2, token=token)


def test_an_invalid_value_of_zerojax_insecure(monkeypatch):
    monkeypatch.setenv("ZEROJAX_INSECURE", "yes")
    with pytest.raises(ZeroError, match="ZEROJAX_INSECURE must be 1 or 0, not 'yes'"):
        join("10.1.2.3:99", 0, 2)


def test_no_folder_for_sockets(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with pytest.raises(JobError, match=r"No such file or directory.*set TMPDIR to another place"):
        join("127.0.0.1:99", 0, 2)


@pytest.mark.parametrize("name", ["short", "x" * 100])
def test_sockets_are_private_and_their_paths_short(monkeypatch, tmp_path, name):
    """Wherever temporary files are: a Unix socket's path has at most 108 bytes."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    folders = []

    def stop(place, facts, **_):
        for path in {place.service, place.client}:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path)
        folders.append(place.folder)
        assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
        raise Begun

    monkeypatch.setattr("zerojax.multihost.distributed.Peers", stop)
    for rank in range(2):
        with pytest.raises(Begun):
            join("127.0.0.1:99", rank, 2)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize(("level", "quieter"), [(None, True), ("1", True), ("0", False), ("3", False)])
def test_jax_joins_and_leaves_a_job_with_all_processes_and_without_warnings(monkeypatch, level, quieter):
    """Its service warns at the start, and a GPU's client, which watches the service, after the end."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    calls = mock.Mock()
    monkeypatch.setattr(distributed, "Peers", lambda *_, **__: calls.peers)
    monkeypatch.setattr(utils, "absl_set_min_log_level", calls.level)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: calls.initialize())
    monkeypatch.setattr(jax.distributed, "shutdown", calls.shutdown)
    join("127.0.0.1:9", 0, 2)
    silence = [mock.call.level(2)] if quieter else []
    assert calls.mock_calls == [
        *silence,
        mock.call.initialize(),
        *([mock.call.level(1)] if quieter else []),
        mock.call.peers.leave(),
        *silence,
        mock.call.peers.wait_for_closed(60.0),
        mock.call.shutdown(),
        mock.call.peers.close(),
    ]


ENDS_WELL = """
import sys, time
import jax.numpy as jnp
from zerojax import distributed

with distributed.joined(f"127.0.0.1:{sys.argv[1]}", int(sys.argv[2]), 2):
    kept = jnp.arange(4.0) + int(sys.argv[2])
print(kept.sum())
time.sleep(2)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
def test_processes_that_end_well_on_a_gpu_print_nothing_of_their_own():
    env = for_programs() | {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env.pop("TF_CPP_MIN_LOG_LEVEL", None)
    command = [sys.executable, "-c", ENDS_WELL, str(distributed.free_port())]
    both = [
        subprocess.Popen([*command, rank], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    assert [one.communicate() for one in both] == [("6.0\n", ""), ("10.0\n", "")]
