"""zerojax links in one process; tests/multihost/test_flows.py runs it between emulated nodes."""

from pathlib import Path

import pytest

from zerojax.analysis.link_report import LinkReport
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
def test_refuses(options: list[str], said: str, capfd: pytest.CaptureFixture[str]):
    assert main(["links", *options]) == 2
    assert said in capfd.readouterr().err
