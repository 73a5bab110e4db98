"""What limits the traffic between nodes, and the file of measurements."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from zerojax.analysis.link_report import CollectiveTime, FlowRate, LinkReport, diagnose
from zerojax.errors import ConfigurationError

GBIT, MIB = 1e9 / 8, 1 << 20


def report(flows, collectives, *, rate=None, local=1, busy=0.3, stolen=0.0, thread=0.3, latency=0.0, **more):
    """Flows and the collectives' rate in Gb/s a node."""
    given: dict[str, Any] = {
        "nodes": 2,
        "local": local,
        "platform": "gpu",
        "interface": "eth0",
        "rate": rate and rate * GBIT,
        "flows": tuple(FlowRate(k, g * GBIT, thread, busy, stolen) for k, g in flows.items()),
        "collectives": tuple(
            CollectiveTime(op, n * MIB, latency + local * n * MIB / (collectives * GBIT))
            for n in (1, 16, 64)
            for op in ("all-gather", "all-to-all")
        ),
        "nccl": {},
    }
    return LinkReport(**given | more)


GROWING = {1: 19.8, 2: 36, 4: 67, 8: 94.6}  # measured over an emulated link of 100 Gb/s

# For each of the two connections between two GPUs.
FOUR = {"NCCL_SOCKET_NTHREADS": "2"}
EIGHT = {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}


@pytest.mark.parametrize(
    ("found", "limit", "said"),
    [
        # All that flows carry: nothing but the link is left.
        (report({1: 9.4, 2: 9.4}, 9.2, rate=10), "network", "fewer bytes"),
        (report(GROWING, 92, rate=100), "network", "fewer bytes"),
        (report(GROWING, 92), "network", "fewer bytes"),
        (
            report(GROWING, 92, rate=100, mtu=1500),
            "network",
            "packets have 1500 bytes: jumbo frames carry 4% more",
        ),
        (report(GROWING, 92, mtu=9000), "network", "only fewer bytes"),
        # A link of 100 on which flows stop at 40.
        (report({1: 20, 2: 40, 4: 40, 8: 40}, 39, rate=100), "network", "slower than their links"),
        # Eight flows are still too few.
        (report({1: 5, 2: 10, 4: 20, 8: 40}, 39, rate=100), "flows", "NCCL_SOCKET_NTHREADS=8 gives a node"),
        # Collectives use a single flow.
        (report(GROWING, 20, rate=100), "flows", "NCCL_SOCKET_NTHREADS=4 "),
        (report(GROWING, 60, rate=100, local=4), "flows", "NCCL_SOCKET_NTHREADS=1 gives a node 8 flows"),
        (report(GROWING, 67, rate=100, nccl=FOUR), "flows", "NCCL_SOCKET_NTHREADS=4 "),
        (report(GROWING, 20, rate=100, nccl=EIGHT), "schedule", "NCCL's threads"),
        (report({1: 19.7, 2: 23, 4: 23}, 18, rate=25), "schedule", "NCCL's threads"),
        (report(GROWING, 50, rate=100, nccl=EIGHT), "schedule", "NCCL's threads"),
        (report(GROWING, 50, rate=100, platform="cpu"), "schedule", "gloo"),
        (report(GROWING, 190, rate=100, rdma="RoCE (mlx5_0)"), "network", "adapters"),
        (report({1: 20, 2: 36, 4: 37, 8: 36}, 30, busy=0.97), "cores", "more cores"),
        (report(GROWING, 50, rate=100, nccl=EIGHT, stolen=0.06), "cores", "quieter"),
        (report(GROWING, 92, rate=100, stolen=0.06), "network", "fewer bytes"),
        # Busy cores do not matter to a link that is full.
        (report({1: 9.4, 2: 9.4}, 9.2, rate=10, busy=0.97), "network", "fewer bytes"),
    ],
)
def test_what_limits_the_traffic(found, limit, said):
    diagnosis = diagnose(found)
    assert diagnosis.limit == limit
    assert said in diagnosis.change


@pytest.mark.parametrize(("thread", "cause"), [(0.99, "a core is busy"), (0.2, "limits each flow")])
def test_why_a_flow_carries_no_more(thread, cause):
    assert cause in diagnose(report(GROWING, 20, rate=100, thread=thread)).why


@pytest.mark.parametrize("local", [1, 4])
def test_a_collective_is_a_wait_and_a_rate(local):
    latency, rate = report(GROWING, 80, local=local, latency=3e-4).fit("all-gather")
    assert latency == pytest.approx(3e-4)
    assert rate == pytest.approx(80 * GBIT)


def test_a_file_from_before_stolen_cores_were_read(tmp_path):
    found = dataclasses.asdict(report(GROWING, 90))
    for flow in found["flows"]:
        del flow["stolen"]
    (tmp_path / "links.json").write_text(json.dumps(found))
    assert LinkReport.read(tmp_path / "links.json") == report(GROWING, 90)


def test_times_that_fit_no_line_leave_the_rate_of_the_largest():
    falling = tuple(
        CollectiveTime(op, n * MIB, n * MIB / (g * GBIT))
        for n, g in ((1, 0.9), (16, 0.6), (64, 0.5))
        for op in ("all-gather", "all-to-all")
    )
    found = dataclasses.replace(report(GROWING, 1), collectives=falling)
    assert found.fit("all-to-all") == (0.0, pytest.approx(0.5 * GBIT))
    found = dataclasses.replace(found, collectives=falling[:2])
    assert found.fit("all-to-all") == (0.0, pytest.approx(0.9 * GBIT))


def test_a_file_gives_back_what_was_written(tmp_path):
    file = tmp_path / "links.json"
    for found in (report(GROWING, 90, rate=100), report({}, 90)):
        found.write(file)
        assert LinkReport.read(file) == found
    for file in (tmp_path / "none/links.json", Path("/dev/full")):
        with pytest.raises(ConfigurationError, match=f"{file}: cannot write: No s"):
            found.write(file)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"nodes": 1}, "1 nodes"),
        ({"nodes": "2"}, "nodes"),
        ({"collectives": []}, "each collective"),
        ({"collectives": [{"op": "all-gather", "bytes": 8, "seconds": 1.0}]}, "each collective"),
        ({"collectives": [{"op": "all-reduce", "bytes": 8, "seconds": 1.0}]}, "op"),
        (
            {"collectives": [{"op": op, "bytes": 8, "seconds": 0} for op in ("all-gather", "all-to-all")]},
            "above 0",
        ),
        ({"rate": True}, "not a number"),
        ({"other": 1}, "other"),
    ],
)
def test_a_file_with_other_values_is_refused(tmp_path, changed, said):
    file = tmp_path / "links.json"
    file.write_text(json.dumps(dataclasses.asdict(report(GROWING, 90)) | changed))
    with pytest.raises(ConfigurationError, match="not what zerojax links writes") as refusal:
        LinkReport.read(file)
    assert said in str(refusal.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"nodes": NaN}'])
def test_what_is_no_such_file_is_refused(tmp_path, text):
    file = tmp_path / "links.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="not what zerojax links writes"):
        LinkReport.read(file)
    with pytest.raises(ConfigurationError, match="No such file"):
        LinkReport.read(tmp_path / "missing.json")
