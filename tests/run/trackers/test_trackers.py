"""Trackers: the content of each after a run was killed and resumed, without a network."""

import dataclasses
import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from zerojax.errors import ZeroError
from zerojax.run import trackers as package
from zerojax.run.config import LogSection, RunConfig, config_to_dict
from zerojax.run.run_dir import RunFolder
from zerojax.run.trackers import Trackers, check_trackers, clients, open_trackers
from zerojax.run.trackers.clients import TrackedRun

STEPS = {1: 4.0, 2: 3.0, 3: 2.0}


def opened(folder: RunFolder, name: Any, start: int, say: Callable[[str], None]) -> Trackers:
    config = dataclasses.replace(RunConfig(), log=LogSection(trackers=(name,), project="a project"))
    return open_trackers(folder, (name,), "a project", config_to_dict(config), start, say)


def die_and_go_on(tmp_path: Path, name: str) -> tuple[RunFolder, list[str]]:
    """Steps 1 and 2 in a process that ends with an error, then 2 (again) and 3 in the next."""
    folder, messages = RunFolder(tmp_path / "my run"), []
    folder.create()
    for start, steps, failed in ((0, (1, 2), True), (1, (2, 3), False)):
        trackers = opened(folder, name, start, messages.append)
        for step in steps:
            trackers.write(step, {"loss": STEPS[step], "mfu": 0.5})
        trackers.close(failed=failed)
    return folder, messages


def events(folder: RunFolder) -> list[Any]:
    """The content of the event files, in order of writing."""
    found: list[Any] = []
    for path in sorted((folder.path / "tensorboard").iterdir(), key=os.path.getmtime):
        raw = path.read_bytes()
        while raw:
            size = int.from_bytes(raw[:8], "little")
            found.append(Event.FromString(raw[12 : 12 + size]))
            raw = raw[16 + size :]
    return found


def scalars(folder: RunFolder, tag: str) -> list[tuple[int, float]]:
    return [(e.step, v.simple_value) for e in events(folder) for v in e.summary.value if v.tag == tag]


def test_tensorboard_continues_a_run(tmp_path: Path) -> None:
    folder, messages = die_and_go_on(tmp_path, "tensorboard")
    assert scalars(folder, "loss") == [(1, 4.0), (2, 3.0), (2, 3.0), (3, 2.0)]
    # A SessionLog of START at step 2 hides what was written of it before.
    assert 2 in [e.step for e in events(folder) if e.HasField("session_log")]
    assert messages == []


def test_a_package_is_hidden_from_imports_unless_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with clients._without("heavy"), pytest.raises(ImportError):
        importlib.import_module("heavy")
    there = importlib.import_module("heavy")
    with clients._without("heavy"):
        assert importlib.import_module("heavy") is there
    monkeypatch.delitem(sys.modules, "heavy")


def test_a_moved_run_goes_on_in_its_trackers_and_a_copy_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Path, str | None]] = []

    class Fake:
        def __init__(self, run: TrackedRun) -> None:
            made.append((run.folder.path, run.known))
            self.identity = run.known or f"id {len(made)}"

        def close(self, *, failed: bool) -> None: ...

    monkeypatch.setitem(package._TRACKERS, "wandb", (Fake, "wandb", None))
    names = [tmp_path / name for name in ("run", "moved", "copy")]
    run, moved, copy = map(RunFolder, names)
    run.create()
    opened(run, "wandb", 0, print).close(failed=False)
    run.path.rename(moved.path)
    opened(moved, "wandb", 0, print).close(failed=False)
    shutil.copytree(moved.path, copy.path)
    for _ in range(2):
        opened(copy, "wandb", 0, print).close(failed=False)
    assert made == list(
        zip([names[0], names[1], names[2], names[2]], [None, "id 1", None, "id 3"], strict=True)
    )


def wandb_records(raw: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a LevelDB log after a header of seven bytes."""
    block, position, parts = 1 << 15, 7, []
    while position + 7 <= len(raw):
        size, kind = int.from_bytes(raw[position + 4 : position + 6], "little"), raw[position + 6]
        parts.append(raw[position + 7 : position + 7 + size])
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []
        if block - position % block < 7:  # no room for another header in this block
            position += block - position % block


def test_wandb_continues_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra zerojax[wandb] is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder, messages = die_and_go_on(tmp_path, "wandb")
    assert messages == []
    files = sorted(folder.path.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    for _ in range(100):  # W&B's own process may write a little later than its client says
        if all(path.stat().st_size > 7 for path in files):
            break
        time.sleep(0.1)
    rows: list[tuple[Any, Any]] = []
    identities, settings = set(), {}
    for path in files:
        for raw in wandb_records(path.read_bytes()):
            record = Record.FromString(raw)
            if record.HasField("run"):
                identities.add((record.run.run_id, record.run.project, record.run.display_name))
                settings |= {item.key: item.value_json for item in record.run.config.update}
            if record.HasField("history"):
                row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                rows.append((row["step"], row["loss"]))
    assert len(files) == 2
    assert rows == [(1, 4.0), (2, 3.0), (2, 3.0), (3, 2.0)]
    assert identities == {(folder.read_summary()["trackers"]["wandb"], "a project", "my run")}
    assert json.loads(settings["train"])["steps"] == 1000


def test_mlflow_continues_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra zerojax[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    folder, messages = die_and_go_on(tmp_path, "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("a project")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == folder.read_summary()["trackers"]["mlflow"]
    assert (run.info.run_name, run.info.status) == ("my run", "FINISHED")
    assert run.data.params["train.steps"] == "1000"
    history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]
    assert history == [(1, 4.0), (2, 3.0), (2, 3.0), (3, 2.0)]
    assert messages == []


@pytest.mark.parametrize(
    ("name", "install"),
    [("wandb", "'wandb>=0.19'"), ("mlflow", "'mlflow-skinny>=3'"), ("tensorboard", "'tensorboardX'")],
)
def test_a_missing_package_is_refused_with_how_to_install_it(
    name: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard's is required by zerojax itself, and is missing where zerojax is a source tree."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = f"not installed: pip install {install}, or remove {name} from log.trackers"
    with pytest.raises(ZeroError, match=re.escape(message)):
        check_trackers([name])
    check_trackers([])


def test_an_unreachable_server_is_reported_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="the extra zerojax[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with pytest.raises(ZeroError, match="mlflow cannot start"):
        opened(folder, "mlflow", 0, print)


def test_tensorboard_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than 24.8 days, the longest timeout of poll(2)."""
    folder, now = RunFolder(tmp_path / "run"), time.time()
    folder.create()

    def train() -> None:
        trackers = opened(folder, "tensorboard", 0, messages.append)
        monkeypatch.setattr(time, "time", lambda: now - 25 * 86400)
        for step in range(1, 101):
            trackers.write(step, {"loss": 1.0, "mfu": 0.5})
        trackers.close(failed=False)

    messages: list[str] = []
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    assert messages == []
    assert [step for step, _ in scalars(folder, "loss")] == list(range(1, 101))


class Failing:
    """A tracker whose server becomes unreachable."""

    identity = "x"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step == 2:
            raise OSError("the server is gone")

    def close(self, *, failed: bool) -> None:
        raise AssertionError("it was dropped")


def test_a_tracker_that_fails_later_does_not_end_the_run() -> None:
    messages: list[str] = []
    trackers = Trackers({"wandb": Failing()}, messages.append)  # opened already
    for step in (1, 2, 3):
        trackers.write(step, {"loss": 1.0})
    trackers.close(failed=False)
    assert messages == ["log.trackers: wandb failed at step 2 and was dropped: the server is gone"]


class Hanging:
    """A tracker whose server stops answering at some step."""

    identity = "x"

    def __init__(self, step: int) -> None:
        self.step, self.told = step, list[int]()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.step:
            threading.Event().wait()
        self.told.append(step)

    def close(self, *, failed: bool) -> None:
        self.write(0, {})


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (3, "log.trackers: wandb has been stuck since step 3 and was dropped"),
        (19, "log.trackers: wandb did not accept its last steps within 0.5 s; metrics.jsonl has them"),
        (0, "log.trackers: wandb did not accept its last steps within 0.5 s; metrics.jsonl has them"),
    ],
)
def test_a_hung_tracker_delays_nothing(step: int, message: str) -> None:
    messages: list[str] = []
    hanging, sound = Hanging(step), Hanging(-1)
    both: dict[str, Any] = {"wandb": hanging, "mlflow": sound}
    trackers, begun = Trackers(both, messages.append, most=8, patience=0.5), time.monotonic()
    for number in range(1, 21):
        trackers.write(number, {"loss": 1.0})
        while len(sound.told) < number or len(hanging.told) < min(number, step - 1 if step else 20):
            time.sleep(0.001)  # a busy machine is not to make one lag behind
    trackers.close(failed=False)
    assert time.monotonic() - begun < 20
    assert messages == [message]
    assert hanging.told == list(range(1, step or 21))
    assert sound.told == [*range(1, 21), 0]


class Dying:
    """A tracker that tries to end its thread."""

    identity = "x"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        raise SystemExit("no more")

    def close(self, *, failed: bool) -> None:
        raise AssertionError("it was dropped")


def test_a_tracker_whose_thread_dies() -> None:
    messages: list[str] = []
    trackers = Trackers({"wandb": Dying()}, messages.append)  # opened already
    trackers.write(1, {"loss": 1.0})
    trackers.close(failed=True)
    assert messages == ["log.trackers: wandb failed at step 1 and was dropped: no more"]


def test_a_tracker_named_twice_is_refused() -> None:
    with pytest.raises(ZeroError, match="names one twice"):
        LogSection(trackers=("wandb", "wandb"))
