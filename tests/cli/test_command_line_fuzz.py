"""Any command line and environment either starts a job or is refused with a message: no other errors."""

import os
from contextlib import suppress
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerojax import distributed
from zerojax.cli import launch
from zerojax.cli.cluster import emulate_devices
from zerojax.errors import ZeroError
from zerojax.multihost.supervisor import Result
from zerojax.run.config import MeshSection

pytestmark = pytest.mark.alone

NUMBERS = st.one_of(
    st.integers(-3, 40).map(str),
    st.sampled_from(["", "0x10", "1e3", "nan", "inf", "-inf", "²", "9" * 30, "--", "1.5"]),
    st.text(max_size=6).filter(lambda text: "\0" not in text and text.isprintable()),
)
OPTIONS = (
    "--nodes",
    "--devices-per-node",
    "--platform",
    "--restarts",
    "--min-nodes",
    "--grace",
    "--snapshot-seconds",
    "--wrong",
)
ARGUMENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(OPTIONS), NUMBERS),
        st.tuples(st.sampled_from(["gpt-tiny", "--help", "-h", "doctor", "cpu", "--nodes"])),
    ),
    max_size=6,
).map(lambda parts: [word for part in parts for word in part])


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS, st.booleans())
def test_launch_survives_any_numbers(arguments, complete):
    if complete:
        arguments = ["--nodes", "2", "--devices-per-node", "1", *arguments, "gpt-tiny"]
    started = mock.Mock()
    started.return_value.run.return_value = Result((), ())
    with (
        mock.patch("zerojax.cli.launch.Supervisor", started),
        mock.patch("sys.stderr"),
        mock.patch("sys.stdout"),
    ):
        try:
            launch.launch(launch.parse(arguments))
            code = None
        except SystemExit as error:
            code = error.code
        except ZeroError:
            code = 2
    assert code in (None, 0, 2)
    assert started.called == (code is None)
    for call in started.call_args_list:
        assert 1 <= len(call.args[0]) <= 4096


VARIABLES = (
    "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_BIND_ADDRESS",
    "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID",
    "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
    "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX",
    "ZEROJAX_JOB_TOKEN", "ZEROJAX_INSECURE",
)  # fmt: skip
VALUES = NUMBERS | st.sampled_from(
    ["localhost:1", "[::1]:5", "host:0", "2(x3),1", "a[1-3]", "1.2.3.4:99999", ":1"]
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES, max_size=6))
def test_joining_survives_any_variables(variables):
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    began = mock.Mock()
    with (
        mock.patch.dict(os.environ, kept | variables, clear=True),
        mock.patch("zerojax.multihost.distributed.Peers", began),
        mock.patch("socket.getaddrinfo", return_value=[(0, 0, 0, "", ("10.0.0.1", 1))]),
    ):
        began.side_effect = ZeroError("here it would begin")
        with suppress(ZeroError), distributed.joined() as peers:
            assert peers is None


@settings(max_examples=100, deadline=None)
@given(NUMBERS)
def test_emulation_survives_any_numbers(processes):
    variables = {"JAX_NUM_PROCESSES": processes, "XLA_FLAGS": ""}
    with mock.patch.dict(os.environ, variables), suppress(ZeroError):
        emulate_devices(MeshSection(nodes=2, local=4, emulate=True))
        assert int(processes) in (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grace": float("nan")}, "grace"),
        ({"nodes": 10**9}, "on one machine"),
        ({"restarts": -1}, "restarts"),
    ],
)
def test_refusals_name_the_option(options, message):
    with pytest.raises(ZeroError, match=message):
        launch.launch(
            launch.Job(**({"train": ["x"], "nodes": 1, "devices_per_node": 1, "platform": "cpu"} | options))
        )
