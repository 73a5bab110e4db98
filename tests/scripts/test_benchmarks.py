"""The benchmarks' own code: what they print, write and draw. Their figures come from GPUs."""

import json
import re
import subprocess
import sys

import pytest
from environment import ROOT

from zerojax import cluster
from zerojax.analysis.profile import Event

SCRIPTS, MEASURED = ROOT / "scripts" / "bench", ROOT / "docs" / "measured"
needs_namespaces = pytest.mark.skipif(cluster.unavailable() is not None, reason=str(cluster.unavailable()))


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["2x4-10gbit", "2x1-rates"])
def test_rows_are_drawn(name, tmp_path):
    run("draw_rows.py", MEASURED / f"{name}.json", "--picture", tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_links_are_shown_next_to_predictions(tmp_path):
    rows = json.loads((MEASURED / "2x1-rates-again.json").read_text())
    cells = [{"model": "1.3B", "tokens": 2048, **row} for row in rows]
    (tmp_path / "links.json").write_text(json.dumps(cells))
    table = run(
        "show_links.py", "--nodes", 2, "--gpus-per-node", 1, tmp_path / "links.json",
        "--flows", "19.7gbit",
    )  # fmt: skip
    heads, _, row, *within = table.splitlines()
    assert heads.startswith("| model | tokens | delta, 10 Gb/s | zero++, 10 Gb/s | delta, 25 Gb/s")
    assert row.startswith("| 1.3B | 2048 | 1.97 (")  # 2048 tokens in 1042 ms
    assert [line.split(":")[0] for line in within] == ["10 Gb/s", "25 Gb/s", "40 Gb/s", "100 Gb/s"]
    assert {line.split(" of ")[1] for line in within} == {"2 within 15%"}


@pytest.mark.slow
@needs_namespaces
def test_links_are_measured_at_every_rate(tmp_path):
    rates = ("50mbit", "1gbit")
    run(
        "links.py", "--nodes", 2, "--gpus-per-node", 1, "--models", "350M", "--tokens", 16, "--rates",
        *rates, "--variants", "zero3", "--steps", 1, "--timeout", 480, "--json", tmp_path / "links.json",
        "--layers", 2,
    )  # fmt: skip
    cells = json.loads((tmp_path / "links.json").read_text())
    assert [(cell["model"], cell["tokens"], cell["rate"]) for cell in cells] == [
        ("350M", 16, rate) for rate in rates
    ]
    for cell in cells:
        assert cell["sent_per_node"] > 1e6
        assert cell["tokens_per_second"] > 0


def test_a_step_of_a_trace_is_drawn(tmp_path):
    """Steps of 10 ms, of which an exchange takes 8, 6 of them beside compute; the last but one counts."""
    sys.path.append(str(SCRIPTS))
    import draw_trace

    def event(begins: float, ends: float, scope: str = "") -> Event:
        return Event(0, "sent" if scope else "kernels", "", scope, begins * 1e6, ends * 1e6, bool(scope))

    steps = [
        [event(begin, begin + 8, "exchange_fragment"), event(begin + 2, begin + 9)] for begin in (0, 10, 20)
    ]
    events = [one for step in steps for one in step]
    chosen = draw_trace.step_of(events, "exchange_fragment")
    assert chosen == steps[1]
    assert draw_trace.table(chosen)[2:] == [
        "| compute | 2.00 | 9.00 | 7.00 |  |",
        "| exchange_fragment | 0.00 | 8.00 | 8.00 | 6.00 |",
    ]
    draw_trace.draw(chosen, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="1 exchanges in 'exchange_fragment'"):
        draw_trace.step_of(events[:2], "exchange_fragment")


def test_the_script_that_measures_again_has_the_sections_that_pages_name():
    done = subprocess.run([SCRIPTS / "reproduce.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    sections = done.stderr.split("one of: ")[1].split()
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert set(re.findall(r"reproduce\.sh ([\w-]+)", pages)) == set(sections)
