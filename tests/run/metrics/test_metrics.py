"""Metrics: the queue, the file, the progress line."""

import io
import json
import os
import re
import time
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread
from micro_run import hang
from rich.console import Console

from zerojax.errors import RunError
from zerojax.run.metrics.files import MetricsFile, iterate_lines, read_metrics
from zerojax.run.metrics.log import most_memory
from zerojax.run.metrics.progress import Progress
from zerojax.run.metrics.queue import MetricsQueue
from zerojax.run.train_run import draw_loss_curve


class Clock:
    """Set by hand; another thread that reads it is heard of."""

    def __init__(self) -> None:
        self.now = 0.0
        self.read = Event()

    def __call__(self) -> float:
        if current_thread() is not main_thread():
            self.read.set()
        return self.now

    def finish(self, metric: "Slow", at: float) -> None:
        """Let a metric become ready at a time, and wait until that has been noted."""
        self.read.clear()
        self.now = at
        metric.ready.set()
        assert self.read.wait(10)


class Slow:
    """A metric that becomes ready when the test says so."""

    def __init__(self, value: float) -> None:
        self.value, self.ready = value, Event()
        self.copying = False

    def copy_to_host_async(self) -> None:
        self.copying = True

    def block_until_ready(self) -> None:
        assert self.ready.wait(10)

    def __array__(self, dtype: object = None, copy: object = None) -> object:
        self.block_until_ready()
        return jnp.asarray(self.value).__array__()


def metrics(loss: Slow) -> dict[str, Any]:
    """A step's metrics; ``loss`` stands in for an array."""
    return {"loss": loss}


class TestQueue:
    def test_a_step_is_read_only_when_newer_ones_are_in_flight(self) -> None:
        clock = Clock()
        queue = MetricsQueue(depth=2, clock=clock)
        first, second, third = Slow(3.5), Slow(3.0), Slow(2.5)
        assert queue.push(1, metrics(first)) == []
        assert queue.push(2, metrics(second)) == []
        assert first.copying
        clock.finish(first, 1.0)
        (record,) = queue.push(3, metrics(third))
        assert (record.step, record.values, record.seconds) == (1, {"loss": 3.5}, 1.0)
        clock.finish(second, 2.0)
        clock.finish(third, 3.5)
        assert [(r.step, r.seconds) for r in queue.drain()] == [(2, 1.0), (3, 1.5)]
        assert queue.drain() == []

    def test_a_step_ends_when_it_is_done_and_not_when_the_host_looks(self) -> None:
        clock = Clock()
        queue = MetricsQueue(depth=2, clock=clock)
        steps = [Slow(3.0) for _ in range(2)]
        for number, metric in enumerate(steps, 1):
            queue.push(number, metrics(metric))
        clock.finish(steps[0], 1.0)
        clock.finish(steps[1], 3.0)
        clock.now = 50.0
        assert [(r.step, r.seconds) for r in queue.drain()] == [(1, 1.0), (2, 2.0)]

    def test_evaluation_is_not_part_of_the_step_time(self) -> None:
        clock = Clock()
        queue = MetricsQueue(depth=2, clock=clock)
        ready = Slow(3.0)
        ready.ready.set()
        clock.now = 1.0

        def evaluation() -> dict[str, Any]:
            clock.now = 9.0
            return {"validation_loss": np.float32(2.0)}

        (first,) = queue.push(1, metrics(ready), evaluation)
        last = Slow(2.9)
        queue.push(2, metrics(last))
        clock.finish(last, 10.0)
        (second,) = queue.drain()
        assert first.values == {"loss": 3.0, "validation_loss": 2.0}
        assert (first.seconds, second.seconds) == (1.0, 1.0)

    def test_a_restarted_clock_excludes_the_time_before(self) -> None:
        clock = Clock()
        queue = MetricsQueue(depth=2, clock=clock)
        clock.now = 5.0
        queue.restart_clock()
        metric = Slow(1.0)
        queue.push(1, metrics(metric))
        clock.finish(metric, 6.0)
        (record,) = queue.drain()
        assert record.seconds == 1.0

    def test_arrays_become_numbers(self) -> None:
        queue = MetricsQueue(depth=0)
        (record,) = queue.push(1, {"loss": jnp.float32(1.5), "skipped": jnp.int32(1)})
        assert record.values == {"loss": 1.5, "skipped": 1.0}


class TestFiles:
    def test_a_file_has_one_object_per_step(self, tmp_path: Path) -> None:
        files = MetricsFile(tmp_path / "metrics.jsonl")
        files.write(1, {"loss": 2.5})
        files.write(2, {"loss": float("nan"), "skipped": 1.0})
        files.close()
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        values = [json.loads(line, parse_constant=refuse) for line in lines]
        assert values == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None, "skipped": 1.0}]

    def test_resuming_drops_steps_to_be_repeated(self, tmp_path: Path) -> None:
        files = MetricsFile(tmp_path / "metrics.jsonl")
        for step in range(1, 6):
            files.write(step, {"loss": float(step)})
        files.close()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "lo')  # killed in mid-line
        assert list(iterate_lines(tmp_path / "metrics.jsonl")).count(None) == 1
        again = MetricsFile(tmp_path / "metrics.jsonl", start=3)
        again.write(4, {"loss": 40.0})
        again.close()
        steps = read_metrics(tmp_path / "metrics.jsonl")
        assert [(s["step"], s["loss"]) for s in steps] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]

    def test_a_file_that_is_deleted_takes_no_lines(self, tmp_path: Path) -> None:
        files = MetricsFile(tmp_path / "metrics.jsonl")
        (tmp_path / "metrics.jsonl").unlink()
        files.write(1, {"loss": 1.0})
        with pytest.raises(RunError, match=r"metrics\.jsonl was deleted while the run wrote to it"):
            files.close()

    def test_the_file_is_replaced_atomically(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that dies while it rewrites the file loses nothing."""
        path = tmp_path / "metrics.jsonl"
        before = "".join(f'{{"step": {step}}}\n' for step in range(1, 4))
        path.write_text(before)

        def dumps(values: object) -> str:
            raise KeyboardInterrupt

        monkeypatch.setattr(json, "dumps", dumps)
        with pytest.raises(KeyboardInterrupt):
            MetricsFile(path, start=3)
        assert path.read_text() == before

    def test_a_full_disk_is_reported_with_the_next_line(self, tmp_path: Path) -> None:
        files = MetricsFile(tmp_path / "metrics.jsonl")
        with Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), files._file)
        files.write(1, {"loss": 1.0})
        for _ in range(2):
            with pytest.raises(OSError, match="No space left on device"):
                files.flush()
        with pytest.raises(OSError, match="No space left on device"):
            files.write(2, {"loss": 1.0})
        with pytest.raises(OSError, match="No space left on device"):
            files.close()

    def test_a_hung_disk_blocks_only_when_the_queue_is_full(self, tmp_path: Path) -> None:
        files = MetricsFile(tmp_path / "metrics.jsonl", most=5, patience=0.3)
        hang(files)
        begun = time.monotonic()
        for step in range(1, 6):
            files.write(step, {"loss": 1.0})
        assert time.monotonic() - begun < 0.3
        for do in (lambda: files.write(6, {"loss": 1.0}), files.flush, files.close):
            with pytest.raises(OSError, match=r"has not responded for 0\.3 s.*metrics\.jsonl"):
                do()
        assert time.monotonic() - begun < 3

    def test_a_slow_disk_is_waited_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = MetricsFile(tmp_path / "metrics.jsonl", most=3, patience=0.3)
        real = files._append
        monkeypatch.setattr(files, "_append", lambda line: (time.sleep(0.1), real(line)))
        for step in range(1, 9):
            files.write(step, {"loss": 1.0})
        files.close()
        assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 9))

    def test_no_file_has_no_steps(self, tmp_path: Path) -> None:
        assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_loss_curve_is_drawn(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [{"step": i, "loss": 3.0 / i} for i in range(1, 20)]
    steps[5]["loss"] = None  # as a skipped step reads
    steps[10]["validation_loss"] = 1.0
    draw_loss_curve(steps, tmp_path / "loss.png", "a run")
    drawn = imread(tmp_path / "loss.png")
    assert drawn.shape[:2] == (540, 960)
    assert drawn[..., :3].std() > 0.01


def on_screen(written: str) -> list[str]:
    """The lines of a terminal that knows line feeds, going up and erasing."""
    lines, at = [""], 0
    for token in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\n|\r|[^\x1b\n\r]+", written):
        if token == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif token == "\x1b[2K":
            lines[at] = ""
        elif token == "\x1b[1A":
            at -= 1
        elif token[0] not in "\x1b\r":
            lines[at] += token
    return [line for line in lines if line]


class TestProgress:
    VALUES = {  # noqa: RUF012  # read only
        "loss": 2.5,
        "tokens_per_second": 12345.0,
        "step_seconds": 2.0,
        "memory_bytes": 3e9,
    }

    def lines(self, *, every: int, steps: int, **extra: float) -> list[str]:
        out = io.StringIO()
        with Progress(steps=steps, every=every, console=Console(file=out, width=200)) as progress:
            for step in range(1, steps + 1):
                progress.show(step, self.VALUES | extra)
        return out.getvalue().splitlines()

    def test_plain_lines_without_a_terminal(self) -> None:
        lines = self.lines(every=10, steps=25)
        assert [line.split(" |")[0] for line in lines] == [
            "step 1/25",
            "step 10/25",
            "step 20/25",
            "step 25/25",
        ]
        assert lines[1] == "step 10/25 | loss 2.5000 | 12.3k tok/s | left 0:00:30 | mem 3.00 GB"
        assert "left" not in lines[0]  # the first step's time is compilation

    def test_known_values_are_shown(self) -> None:
        (line,) = self.lines(every=1, steps=1, mfu=0.415, internode_bytes=3.0e6, skipped_total=2.0)
        assert "mfu 41.5%" in line
        assert "wire 3.00 MB/step" in line
        assert line.endswith("skipped 2")

    def test_live_line_in_a_terminal(self) -> None:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=200)
        with Progress(steps=3, console=console) as progress:
            progress.say("hello [bold]")
            for step in range(1, 4):
                progress.show(step, self.VALUES)
            progress.say("the summary")
        lines = on_screen(out.getvalue())
        assert lines == [
            "hello [bold]",
            "step 3/3 | loss 2.5000 | 12.3k tok/s | left 0:00:00 | mem 3.00 GB",
            "the summary",
        ]

    def test_the_last_line_stays_where_a_run_is_stopped(self) -> None:
        out = io.StringIO()
        with Progress(steps=9, console=Console(file=out, force_terminal=True, width=200)) as progress:
            progress.show(1, self.VALUES)
        assert on_screen(out.getvalue()) == ["step 1/9 | loss 2.5000 | 12.3k tok/s | mem 3.00 GB"]

    def test_rates_are_medians_of_the_last_ten_steps(self) -> None:
        out = io.StringIO()
        rates, seconds = [1.0, *[4e3] * 9, 9e9, 5e3], [900.0, *[2.0] * 9, 0.001, 3.0]
        with Progress(steps=12, every=1, console=Console(file=out, width=200)) as progress:
            for step, (rate, length) in enumerate(zip(rates, seconds, strict=True), 1):
                progress.show(step, self.VALUES | {"tokens_per_second": rate, "step_seconds": length})
        lines = out.getvalue().splitlines()
        assert "| 1 tok/s | mem" in lines[0]  # with compilation
        assert "| 4.0k tok/s | left 0:00:02 |" in lines[10]

    def test_other_processes_print_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Progress(steps=1, shown=False) as progress:
            progress.say("hello")
            progress.show(1, self.VALUES)
        assert capsys.readouterr().out == ""


def test_memory_is_the_most_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_memory() > 10 << 20
    stats = [None, {"bytes_in_use": 5, "peak_bytes_in_use": 7}, {"bytes_in_use": 6, "peak_bytes_in_use": 8}]
    devices = [mock.Mock(memory_stats=lambda found=found: found) for found in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert most_memory() == 8
