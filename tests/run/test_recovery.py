"""zerojax.run.recovery: what a restart says about itself."""

import json
import time
from pathlib import Path

import pytest
from micro_run import Stop, die_at, micro_config, train

from zerojax.multihost.hosts import Cause, Event
from zerojax.run.recovery import VARIABLE, Recovery


def test_each_phase_has_its_seconds() -> None:
    times = iter((15.0, 16.0, 19.0, 19.5))
    recovery = Recovery(
        noticed=10.0, ended=11.0, cause=Cause(Event.LOST, "rank 1"), clock=lambda: next(times)
    )
    recovery.end("to start")
    recovery.end("to open the run")
    assert [recovery.is_new(step, reached=5) for step in (4, 5, 6)] == [False, False, True]
    assert str(recovery) == (
        "a new step 9.5 s after rank 1 was lost: 1.0 s to end the others, 4.0 s to start, "
        "1.0 s to open the run, 3.0 s to take a step, 0.5 s to repeat 2 steps"
    )


def test_without_steps_to_repeat_the_first_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "10.0 12.5 lost rank 1, rank 2")
    recovery = Recovery.find()
    assert recovery is not None
    assert recovery.is_new(1, reached=0)
    assert list(recovery.seconds) == ["to end the others", "to take a step"]
    assert recovery.seconds["to end the others"] == 2.5
    assert Recovery.find() is None, "a program that this one starts is no restart"


def test_a_restart_is_logged_and_recorded(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        die_at(patch, 6)
        with pytest.raises(Stop):
            train(micro_config(text), tmp_path)
    now = time.monotonic()
    monkeypatch.setenv(VARIABLE, f"{now - 9} {now - 8} lost rank 1")
    train(micro_config(text), tmp_path)
    *_, session = json.loads((tmp_path / "run.json").read_text())["sessions"]
    first = ["to end the others", "to start and join", "to restore the state", "to open the run"]
    assert list(session["recovery"])[:5] == [*first, "to take a step"]
    assert list(session["recovery"])[5] in ("to repeat 1 step", "to repeat 2 steps")  # some were not logged
    assert session["recovery"]["to end the others"] == pytest.approx(1)
    assert session["recovery"]["to start and join"] >= 8
    line = session["notes"][-1]
    assert line.startswith("a new step ")
    assert line in " ".join(capsys.readouterr().out.split())
