"""zerojax links in one process; tests/multihost/test_flows.py runs it between emulated nodes."""

from pathlib import Path

import pytest

from zerojax.analysis.link_report import OPS, CollectiveTime, FlowRate, LinkReport
from zerojax.cli import main


def test_one_process_measures_its_collectives_and_no_flows(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    file = tmp_path / "links.json"
    assert main(["links", "--mesh.nodes", "3", "--mesh.local", "2", "--sizes", "1", "--json", str(file)]) == 0
    out = capfd.readouterr().out
    assert "TCP flows: not measured" in out
    assert "limit" not in out
    report = LinkReport.read(file)
    assert (report.nodes, report.local, report.flows) == (3, 2, ())
    assert report.sizes() == [1 << 20]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mesh.nodes", "1"], "one node: there are no links"),
        (["--mesh.nodes", "2", "--seconds", "0"], "--seconds 0"),
        (["--mesh.nodes", "2", "--sizes", "0"], "--sizes"),
        (["--mesh.nodes", "2", "--sizes", "1000000"], "--sizes"),
    ],
)
def test_impossible_measurements_are_refused(
    options: list[str], said: str, capfd: pytest.CaptureFixture[str]
):
    assert main(["links", *options]) == 2
    assert said in capfd.readouterr().err


def test_a_plan_takes_the_measurements(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    file = tmp_path / "links.json"
    flows = (FlowRate(1, 2.5e9, 0.9, 0.5), FlowRate(4, 1e10, 0.9, 0.5))
    times = tuple(CollectiveTime(op, size, 1e-4 + size / 8e9) for op in OPS for size in (1 << 20, 1 << 24))
    LinkReport(2, 1, "gpu", "eth0", None, flows, times, {}).write(file)
    plan = ["plan", "gpt-tiny", "--gpu", "h100", "--nodes", "2", "--gpus-per-node", "1"]
    assert main([*plan, "--links", str(file)]) == 0
    said = "all-gather 64, all-to-all 64 Gb/s (collectives measured on 2 x 1 devices) between nodes"
    assert said in capfd.readouterr().out
    assert main([*plan, "--links", str(file), "--bandwidth", "10gbit"]) == 2
    assert "--bandwidth and --links exclude each other" in capfd.readouterr().err
    assert main(["plan", "gpt-tiny", "--links", str(file)]) == 2
    assert "Name its GPUs, such as --gpu" in capfd.readouterr().err
