"""`zerojax report`: a page that stands alone, whatever is left of a run."""

import errno
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from zerojax.cli import main
from zerojax.formatting import abbreviated, percent
from zerojax.run.html_report import RunData, render
from zerojax.run.html_report.charts import Chart, Series, smoothed, thinned
from zerojax.run.html_report.run_data import read_columns
from zerojax.run.run_dir import RunFolder


class Page(HTMLParser):
    """Every tag, with its attributes, and the text; complains of tags that are not closed in order."""

    VOID = frozenset({"meta", "line", "path", "circle"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def page_of(folder: Path) -> Page:
    return Page(render(RunData(RunFolder(folder))))


def titles(page: Page) -> list[str | None]:
    """The charts' labels; the first chart is there for a narrow page as well."""
    return list(dict.fromkeys(attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"))


def test_a_full_disk_leaves_the_report_of_before(
    finished: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "page.html").write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    assert main(["report", str(finished.path), "--out", str(tmp_path / "page.html")]) != 0
    assert "cannot write the report: " in capsys.readouterr().err
    assert (tmp_path / "page.html").read_text() == "before"
    assert main(["report", str(finished.path), "--out", os.devnull]) == 0  # no file to replace


def test_the_page_of_a_finished_run_loads_nothing(
    finished: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(finished.path), "--out", str(tmp_path / "page.html")]) == 0
    assert str(tmp_path / "page.html") in capsys.readouterr().out
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    names = ("Loss", "Gradient norm", "Learning rate", "Throughput", "Memory")
    assert titles(page) == [f"{name} by step" for name in names]  # the MFU of a CPU is not known
    summary = finished.read_summary()
    for part in (
        "finished",
        f"{summary['validation_loss']:.4f}",
        "weights forward",
        "gradients",
        "ZeRO-3 in bf16 would send",
        "0 to 8",
        "Checkpoints at steps 6, 8",
        "learning_rate",
        summary["versions"]["jax"],
        summary["host"],
    ):
        assert part in page.text, part
    # Nothing is fetched from anywhere, and no other file is needed.
    assert not re.search(r"https?://|url\(|@import|\bsrc=|<link", text)
    assert not [attrs for _, attrs in page.tags if "href" in attrs or "src" in attrs]


def test_on_a_narrow_page_the_main_chart_is_drawn_in_a_box_whose_labels_can_be_read(
    finished: RunFolder,
) -> None:
    page = page_of(finished.path)
    boxes = [str(attrs["viewbox"]).split()[2:] for name, attrs in page.tags if name == "svg"]
    assert boxes[:2] == [["1160", "320"], ["560", "230"]]
    assert set(map(tuple, boxes[1:])) == {("560", "230")}


def test_a_run_that_went_on_after_it_was_killed(finished_copy: RunFolder) -> None:
    finished_copy.begin_session(6, devices=8, notes=["resuming from step 6"])
    finished_copy.begin_session(6, devices=4, notes=[])
    run = RunData(finished_copy)
    assert [one["status"] for one in run.sessions] == ["finished", "killed", "running"]
    page = page_of(finished_copy.path)
    assert [attrs.get("class") for tag, attrs in page.tags if tag == "line"].count(
        "restart"
    ) == 2 * 6  # the first chart in two widths
    assert "resumed from a checkpoint" in page.text
    finished_copy.update_summary(status="failed", step=7, reason="RunError: <b>no</b> & never")
    page = page_of(finished_copy.path)
    assert "RunError: <b>no</b> & never" in page.text
    assert "6 to 7" in page.text


def test_a_clock_that_was_set_back_is_no_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    session = {"began": 9000.0, "step": 0}
    folder.summary.write_text(json.dumps({"status": "finished", "noted": 5000.0, "sessions": [session]}))
    page = page_of(tmp_path)
    assert "not known" in page.text
    assert " ms" not in page.text


def test_absurd_times_are_not_known(tmp_path: Path) -> None:
    sessions = [{"began": 1e300, "step": 0}, {"began": 0.0, "step": 1}]
    summary = {"status": "finished", "noted": 1e300, "sessions": sessions}
    (tmp_path / "run.json").write_text(json.dumps(summary))
    lines = [json.dumps({"step": step, "loss": 1.0, "step_seconds": 1e300}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    page = page_of(tmp_path)
    assert page.text.count("not known") >= 3
    assert "1970-01-01 00:00:00" in page.text


def test_a_damaged_folder_is_noted_and_shown(finished_copy: RunFolder) -> None:
    with finished_copy.metrics.open("a") as file:
        file.write('{"step": 9, "loss": null, "skipped": 1.0}\n{"step": 10, "lo')
    finished_copy.summary.write_text("{")
    finished_copy.config.write_text("[train")
    shutil.rmtree(finished_copy.checkpoints)
    page = page_of(finished_copy.path)
    for part in (
        "1 line of metrics.jsonl cannot be read",
        "run.json cannot be read",
        "config.toml cannot be read",
        "1 of 9 changed nothing",
        "unknown",
    ):
        assert part in page.text, part
    assert titles(page)[0] == "Loss by step"


COMMUNICATION = {
    "phases": {"forward": {"local_bytes": 1, "node_bytes": 2}},
    "local_bytes": 1,
    "node_bytes": 2,
}
COMMUNICATION |= {"nodes": 2, "between_nodes": 2, "model_bytes": 1, "zero3_bytes": 3}


@pytest.mark.parametrize(
    "summary",
    [
        {"validation_loss_per_byte": "text"},
        {"validation_loss_per_byte": 10**400},
        {"first_loss": 10**400},
        {"sessions": [{"notes": 5}, {"step": [], "notes": None}]},
        {"sessions": {"a": 1}},
        {"status": [], "reason": "\ud800", "versions": []},
        {"communication": [1]},
        {"communication": COMMUNICATION | {"phases": {"forward": 5}}},
        {"communication": COMMUNICATION | {"local_bytes": "text"}},
        {"communication": COMMUNICATION | {"model_bytes": 0}},
        {"communication": {"phases": {}}},
    ],
)
def test_other_types_than_a_run_writes_are_left_out(tmp_path: Path, summary: dict[str, object]) -> None:
    step = {"step": 1, "loss": 2.0, "validation_loss": 3.0}
    lines = [step, {"step": True}, {"step": 10**400}, step | {"step": 2, "loss": 10**400, "mfu": []}, []]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n" + "[" * 10**5)
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "communication": COMMUNICATION}))
    assert "Between nodes, per node and step: 2 B, which is 2 M" in page_of(tmp_path).text
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished"} | summary))
    page = page_of(tmp_path)
    assert "4 lines of metrics.jsonl cannot be read" in page.text
    assert "Between nodes, per node" not in page.text


@pytest.mark.parametrize("name", ["run.json", "samples.jsonl", "config.toml"])
def test_deep_nesting_is_left_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    (tmp_path / name).write_text("a = " * (name == "config.toml") + "[" * 10**5)
    assert "training loss" in page_of(tmp_path).text


def test_a_run_of_post_training_shows_rewards_and_completions(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.summary.write_text('{"first_validation_reward": 0.125}')
    line = {"loss": 0.01, "reward": 0.25, "validation_reward": 0.75}
    folder.metrics.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in (1, 2)))
    samples = [{"step": 2, "prompt": "1 + 1 =", "completion": f"<{i}>", "reward": None} for i in range(20)]
    folder.samples.write_text("".join(json.dumps(one) + "\n" for one in [*samples, {"step": 2}]))
    page = page_of(tmp_path)
    assert titles(page) == ["Reward by step"]
    assert "0.750" in page.text
    assert "<3>" not in page.text
    assert page.text.count("lost") == page.text.count("1 + 1 =") == 16
    assert "<19>" in page.text
    # The curve begins with what the first weights earn.
    steps, values = RunData(folder).series("validation_reward")
    assert (steps.tolist(), values.tolist()) == ([0, 1, 2], [0.125, 0.75, 0.75])


def test_a_run_of_ppo_shows_its_critic(tmp_path: Path) -> None:
    values = {"loss": 0.01, "reward": 0.25, "score": 0.5, "kl": 0.125}
    values |= {"value_loss": 2.0, "explained_variance": 0.5}
    lines = [json.dumps({"step": step, **values}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    page = page_of(tmp_path)
    assert titles(page) == ["Reward by step", "Value loss by step", "Explained variance by step"]
    assert "0.125" in page.text


def test_a_run_of_a_mixture_shows_its_routers(tmp_path: Path) -> None:
    values = {"loss": 2.0, "expert_load": 1.375, "router_entropy": 1.5}
    lines = [json.dumps({"step": step, **values}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    page = page_of(tmp_path)
    assert titles(page) == ["Loss by step", "Expert load by step", "Router entropy by step"]
    assert "1.38" in page.text


def test_a_run_on_preferences_shows_accuracy_and_rewards(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "finished"}')
    values = {"accuracy": 0.5, "validation_accuracy": 0.75, "rewards_chosen": 1.0, "rewards_rejected": -1.0}
    lines = [json.dumps({"step": step, "loss": 0.6931, **values}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    page = page_of(tmp_path)
    assert titles(page) == ["Loss by step", "Accuracy by step", "Rewards by step"]
    assert "mean over pairs" in page.text
    assert percent(0.75) in page.text


def test_a_run_before_its_first_step_has_no_charts(tmp_path: Path, finished: RunFolder) -> None:
    shutil.copy(finished.config, tmp_path)
    page = page_of(tmp_path)
    assert "No step is done yet" in page.text
    assert titles(page) == []


def test_strings_of_the_run_are_escaped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "<script>alert(1)</script>")
    folder.create()
    evil = '"><script>alert(2)</script>'
    folder.update_summary(status=evil, reason=evil, host=evil, versions={evil: evil}, device_kind=evil)
    folder.config.write_text(f"[data]\nsource = {json.dumps(evil)}\n")
    folder.metrics.write_text('{"step": 1, "loss": 2.0, "grad_norm": "x", "mfu": true}\n')
    page = page_of(folder.path)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert page.text.count("<script>alert(2)</script>") >= 5
    assert "<script>alert(1)</script>" in page.text


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_of_two_lines_about_a_step_the_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": 0.5, "skipped": 1} for step in (1, 2, 3, 2, 3)]
    lines += [{"step": 3, "loss": None, "skipped": 0}, {"step": 4, "mfu": 0.25}]
    path.write_text("".join(map("{}\n".format, map(json.dumps, lines))) + "no JSON\n")
    found, damaged = read_columns(path)
    assert damaged == 1
    assert found["step"].steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(found["loss"].values, [0.5, 0.5, np.nan])
    assert [x.tolist() for x in found["mfu"]] == [[4], [0.25]]
    run = RunData(RunFolder(tmp_path))
    assert (run.skipped, run.steps, run.finite("loss")) == ([1, 2], [1, 2, 3, 4], [0.5, 0.5])


class TestCharts:
    def test_the_ends_of_a_line_are_where_they_belong(self) -> None:
        line = Series("a", [10, 20], [0.0, 5.0])
        chart = Chart("t", "", [line], 20, from_zero=True, width=100)
        assert chart.path(line) == f"M58 204L88 {204 - 194 * 5 / 5.3:.1f}".removesuffix(".0")
        assert chart.y_ticks == [0, 1, 2, 3, 4, 5]

    def test_what_is_not_finite_leaves_a_gap(self) -> None:
        line = Series("a", [1, 2, 3, 4], [1.0, None, 2.0, 3.0])
        assert re.findall("[ML]", Chart("t", "", [line], 4).path(line)) == ["M", "M", "L"]
        assert not Chart("t", "", [Series("a", [1, 2], [None, None])], 2).known.size

    def test_logarithms_leave_out_what_has_none(self) -> None:
        line = Series("a", [1, 2, 3], [0.01, 0.0, 100.0])
        chart = Chart("t", "", [line], 3, log=True)
        assert {0.1, 1, 10} <= {*chart.y_ticks}
        assert re.findall("[ML]", chart.path(line)) == ["M", "M"]

    def test_equal_values_are_drawn(self) -> None:
        line = Series("a", [1, 2], [0.0, 0.0])
        assert "nan" not in Chart("t", "", [line], 2).path(line)

    def test_thinning_keeps_every_peak(self) -> None:
        values: list[float | None] = [1.0] * 10_000
        values[1234], values[8765], values[5000] = 99.0, -99.0, None
        steps, kept = thinned(range(10_000), Series("a", range(10_000), values).numbers)
        assert len(steps) <= 600
        assert {99.0, -99.0} <= set(kept)
        assert steps == sorted(steps)
        assert (steps[0], steps[-1]) == (0, 9999)

    def test_a_rate_is_averaged_by_its_seconds(self) -> None:
        """A step that seems to take no time does not lift the average."""
        values: list[float | None] = [100.0] * 1000
        values[50] = 1e9
        _, line = smoothed("x", range(1000), values, rate=True)
        assert line.numbers.max() < 110

    def test_a_gap_is_no_part_of_a_mean(self) -> None:
        values: list[float | None] = [2.0, None, 4.0] * 100
        _, line = smoothed("x", range(300), values)
        assert np.isnan(line.numbers[1::3]).all()
        assert line.numbers[9] == pytest.approx(np.mean([2, 4, 2, 4, 2]))

    def test_a_smoothed_line_does_not_lag(self) -> None:
        falling: list[float | None] = [500.0 - i for i in range(500)]
        _, line = smoothed("x", range(500), falling)
        assert line.numbers[10:-10].tolist() == pytest.approx(falling[10:-10])

    @pytest.mark.parametrize(
        ("value", "text"),
        [(12345, "12.35k"), (2.5e6, "2.5M"), (0.00012, "0.00012"), (0, "0"), (3.14159, "3.142")],
    )
    def test_numbers_are_abbreviated(self, value: float, text: str) -> None:
        assert abbreviated(value) == text
