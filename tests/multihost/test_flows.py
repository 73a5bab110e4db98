"""TCP flows between nodes: only the job's processes open them, and their rate is the link's."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zerojax import cluster
from zerojax.analysis.link_report import OPS, FlowRate, LinkReport
from zerojax.errors import JobError
from zerojax.multihost import flows
from zerojax.multihost.flows import Flows

pytestmark = pytest.mark.alone


def ring(nodes, count=2, seconds=0.2):
    """Measure between nodes of this process; each one's result or error."""

    def measure(i):
        try:
            return nodes[i].measure(nodes[(i + 1) % len(nodes)].address, count, seconds)
        except JobError as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as threads:
        found = list(threads.map(measure, range(len(nodes))))
    for node in nodes:
        node.__exit__()
    return found


def test_flows_carry_bytes_around_a_ring():
    for found in ring([Flows("127.0.0.1") for _ in range(3)]):
        assert isinstance(found, FlowRate)
        assert found.flows == 2
        assert 1e7 < found.bytes_per_second < 1e12
        assert 0 < found.busiest_thread < 1.5
        assert 0 <= found.host_busy <= 1


def test_a_flow_without_the_secret_is_not_taken(monkeypatch):
    monkeypatch.setattr(flows, "_OPEN", 1.0)
    nodes = [Flows("127.0.0.1") for _ in range(2)]
    host, port, _ = nodes[1].address
    nodes[1].address = host, port, nodes[0].address[2]
    first, second = ring(nodes)
    assert isinstance(second, JobError)
    assert "did not open within" in str(second)
    assert isinstance(first, JobError)


def test_strangers_neither_get_in_nor_keep_the_job_out():
    with Flows("127.0.0.1") as node:
        silent, loud = (socket.create_connection(node.address[:2]) for _ in range(2))
        loud.sendall(bytes(4096))
        found = node.measure(node.address, 1, 0.2)
        assert found.bytes_per_second > 1e7
        loud.close()
        silent.close()


def test_a_neighbour_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr(flows, "_OPEN", 0.5)
    with (
        Flows("127.0.0.1") as here,
        Flows("127.0.0.1") as there,
        pytest.raises(JobError, match="did not open within"),
    ):
        here.measure(there.address, 1, 0.1)


def test_an_address_of_another_host_cannot_be_listened_at():
    with pytest.raises(JobError, match=r"cannot listen at 192\.0\.2\.77"):
        Flows("192.0.2.77")


@pytest.mark.skipif(cluster.unavailable() is not None, reason=str(cluster.unavailable()))
def test_flows_measure_the_rate_of_an_emulated_link(tmp_path: Path):
    """The link carries no more than 400 Mb/s. How near flows come to it depends on what else the cores do."""
    file, rate = tmp_path / "links.json", 400e6 / 8
    command = [sys.executable, "-m", "zerojax", "links", "--sizes", "4", "1", "--json", str(file)]
    with cluster.EmulatedCluster(2, rate="400mbit", platform="cpu") as emulated:
        assert emulated.run(command, timeout=120).code == 0
    report = LinkReport.read(file)
    assert (report.nodes, report.local, report.interface, report.rate) == (2, 1, "wire0", rate)
    carried = {flow.flows: flow.bytes_per_second for flow in report.flows}
    assert list(carried) == [1, 2, 4, 8]
    assert all(0.3 * rate < found < 1.15 * rate for found in carried.values())
    assert report.sizes() == [1 << 20, 1 << 22]
    for op in OPS:
        assert 0.1 * rate < report.carried(op, 1 << 22) < 1.1 * rate
    assert report.nccl["NCCL_SOCKET_IFNAME"] == "wire0"
