"""Bytes that collectives send, from the counters of emulated links."""

import io

import pytest

from zerojax import cluster

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(cluster.unavailable() is not None, reason=str(cluster.unavailable())),
]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(request.config.rootpath)


def measure(op, *, nodes, local, elements, dtype="int8", repeats):
    output = io.BytesIO()
    try:
        return cluster.measure_bytes(
            "tests.helpers.traffic:collective",
            {"op": op, "elements": elements, "dtype": dtype, "repeats": repeats},
            nodes=nodes, devices_per_node=local, timeout=120, output=output,
        )  # fmt: skip
    except (RuntimeError, TimeoutError) as error:
        raise AssertionError(output.getvalue().decode()) from error


@pytest.mark.parametrize(("nodes", "local"), [(2, 4), (3, 2)])
def test_all_gather_sends_its_shard_to_every_other_node(nodes, local):
    elements, repeats = 60_000_000 // (local * (nodes - 1) * 2), 2
    measured = measure("all_gather", nodes=nodes, local=local, elements=elements, repeats=repeats)
    expected = repeats * local * (nodes - 1) * elements
    assert expected > 50e6
    for node in measured:
        assert node.link.sent == pytest.approx(expected, rel=0.05)
        assert node.link.received == pytest.approx(expected, rel=0.05)
        # Device (n, l) gathers the shards of values n * local + l + 1 over all n.
        sums = [sum(n * local + i + 1 for n in range(nodes)) * elements for i in range(local)]
        assert node.result == pytest.approx(sums)


def test_all_to_all_keeps_its_own_part():
    elements, nodes, local, repeats = 8_000_000, 2, 4, 2
    measured = measure("all_to_all", nodes=nodes, local=local, elements=elements, repeats=repeats)
    expected = repeats * local * elements * (nodes - 1) / nodes
    for node, other in zip(measured, reversed(measured), strict=True):
        assert node.link.sent == pytest.approx(expected, rel=0.05)
        assert node.link.received == pytest.approx(other.link.sent, rel=0.001)


def test_a_failing_target_is_named():
    with pytest.raises(AssertionError, match="no_such_type"):
        measure("all_gather", nodes=2, local=1, elements=8, dtype="no_such_type", repeats=1)
