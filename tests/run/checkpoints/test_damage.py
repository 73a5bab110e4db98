"""Random damage to files on disk is reported in one line, never by a deep traceback or a wrong result."""

import errno
import os
import pickle
import shutil
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from micro_run import micro_config

import zerojax
from zerojax.cli import main
from zerojax.errors import RunError, ZeroError
from zerojax.run.checkpoints import Checkpoints, DamagedError, Record, newest_valid, restore, verify
from zerojax.run.checkpoints.canonical import to_canonical
from zerojax.run.config import ConfigError, DataSection, RunConfig, dump_config, load_config
from zerojax.run.data.dataset import open_dataset
from zerojax.run.data.formats import DataError
from zerojax.run.data.prepare import prepare
from zerojax.run.metrics.files import read_metrics
from zerojax.run.run_dir import RunFolder
from zerojax.run.train_run import TrainRun
from zerojax.train.state import TrainState

# Orbax closes its event loop while abandoned reads are still running.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("leave_nothing_behind"),
]


def hurt(path: Path, random: np.random.Generator) -> None:
    """Flip a bit, truncate the file, insert bytes, or overwrite a part of it."""
    data = bytearray(path.read_bytes())
    at = int(random.integers(max(len(data), 1)))
    match int(random.integers(4)):
        case 0 if data:
            data[at] ^= 1 << int(random.integers(8))
        case 1 if data:
            del data[at:]
        case 2:
            data[at:at] = random.bytes(int(random.integers(1, 9)))
        case _:
            data[at : at + 16] = random.bytes(16)
    path.write_bytes(data)


def damages(folder: Path, scratch: Path, count: int) -> Iterator[Path]:
    """Copies of a folder, each with one damaged file, in turn."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for number in range(count):
        copy = scratch / str(number)
        shutil.copytree(folder, copy)
        name = files[number % len(files)]
        hurt(copy / name, np.random.default_rng(number))
        if (copy / name).read_bytes() != (folder / name).read_bytes():
            yield copy
        shutil.rmtree(copy)


def state(*, abstract: bool = False) -> TrainState:
    make = TrainState.abstract if abstract else TrainState.create
    return make(
        lambda rngs: nnx.Linear(3, 5, rngs=rngs),
        optax.adam(1e-2),
        lambda model, batch: (model(batch) ** 2).mean(),
        mesh=zerojax.make_mesh(1, 1),
        zero=zerojax.ZeroConfig(stage=1, units=(nnx.Linear,)),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(7, state(), Record(config={"a": 1}, position={"next": 7}))
    return folder / "7"


def test_no_damage_to_a_checkpoint_goes_unseen(checkpoint: Path, tmp_path: Path) -> None:
    valid, seen = verify(checkpoint, 7), 0
    for copy in damages(checkpoint, tmp_path, 120):
        try:
            assert verify(copy, 7) == valid  # such as other white space in the manifest
        except DamagedError:
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("manifest", [True, False])
def test_a_file_that_cannot_be_read_now_is_not_damaged(
    checkpoint: Path, number: int, manifest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, why = Path.open, os.strerror(number)

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if checkpoint in path.parents and (path.name == "manifest.json") == manifest:
            raise OSError(number, why, str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RunError, match=f"7 cannot be read, and may be intact: .*: {why}"):
        newest_valid(checkpoint.parent)


@pytest.mark.slow
def test_what_orbax_stumbles_on_is_one_clear_error(checkpoint: Path, tmp_path: Path) -> None:
    """Unverified files give an error that names the checkpoint, or the right arrays."""
    expected, abstract = jax.tree.map(np.asarray, to_canonical(state())), state(abstract=True)
    refused: list[str] = []
    for copy in damages(checkpoint, tmp_path, 30):
        try:
            found = to_canonical(restore(copy, abstract))
        except ZeroError as error:
            refused.append(str(error))
        else:
            jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(refused) > 7
    assert all(str(tmp_path) in line and "\n" not in line for line in refused)


@contextmanager
def no_pickles() -> Generator[list[str]]:
    """Record what pickle would import within the context; an audit hook cannot be removed."""
    found, active = [], True

    def hook(event: str, arguments: Any) -> None:
        if active and event == "pickle.find_class":
            found.append(str(arguments))

    sys.addaudithook(hook)
    yield found
    active = False


def test_loading_unpickles_nothing(checkpoint: Path, finished: RunFolder) -> None:
    with no_pickles() as found:
        pickle.loads(pickle.dumps(RunFolder(Path())))
        assert found, "the hook works"
        found.clear()
        restore(checkpoint, state(abstract=True))
        open_dataset(finished.read_config().data, finished.data)
        newest_valid(finished.checkpoints)
    assert found == []


def test_damaged_settings_are_refused_in_one_line(text: Path, tmp_path: Path) -> None:
    path, random = tmp_path / "config.toml", np.random.default_rng(0)
    refused: list[str] = []
    for _ in range(200):
        path.write_text(dump_config(micro_config(text)))
        hurt(path, random)
        try:
            assert isinstance(load_config(path), RunConfig)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(path) in line for line in refused)


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_damaged_tokens_are_refused_in_one_line(text: Path, tmp_path: Path, tokenizer: str) -> None:
    settings = DataSection(source=str(text), tokenizer=tokenizer, vocab_size=300, validation=0.2)
    prepare(settings, tmp_path / "data")
    valid = open_dataset(settings, tmp_path / "data")
    refused: list[str] = []
    for copy in damages(tmp_path / "data", tmp_path / "replicas", 60):
        try:
            prepare(settings, copy)
            found = open_dataset(settings, copy)
        except DataError as error:
            refused.append(str(error))
            continue
        for split in ("train", "validation"):
            one, other = (getattr(data.parts[0], split) for data in (found, valid))
            assert one.header == other.header
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.lengths, other.lengths)
    assert len(refused) > 40
    assert all(str(tmp_path / "replicas") in line for line in refused)


def test_damaged_notes_of_a_run(finished_copy: RunFolder, tmp_path: Path) -> None:
    notes = {path: path.read_bytes() for path in (finished_copy.summary, finished_copy.metrics)}
    for seed in range(60):
        for path, whole in notes.items():
            path.write_bytes(whole)
            hurt(path, np.random.default_rng(seed))
        assert isinstance(finished_copy.read_summary(), dict)
        assert all(isinstance(line["step"], int) for line in read_metrics(finished_copy.metrics))


def test_a_run_goes_on_from_the_one_before(
    finished: RunFolder, finished_copy: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so, keeps the damaged one, and gets the same result."""
    checkpoints = finished_copy.checkpoints
    victim = max((checkpoints / "8" / "optimizer").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    *kept, last = victim.read_bytes()
    victim.write_bytes(bytes([*kept, last ^ 1]))
    assert main(["checkpoints", str(finished_copy.path)]) == 1
    listed = capsys.readouterr()
    assert "1 of 2 checkpoints are damaged" in listed.err
    assert len(listed.out.splitlines()) == 3, "a line for each in a pipe"
    with TrainRun.open(finished.read_config(), finished_copy) as trainer:
        out = " ".join(capsys.readouterr().out.split())
        assert f"8 is damaged: {victim.relative_to(checkpoints / '8')} has changed (wrong checksum)" in out
        assert "it is now called 8.damaged" in out
        assert "resuming from step 6" in out
        trainer.train()
    assert sorted(path.name for path in checkpoints.iterdir()) == ["6", "8", "8.damaged"]
    whole = {p["step"]: p["loss"] for p in read_metrics(finished.metrics)}
    assert {p["step"]: p["loss"] for p in read_metrics(finished_copy.metrics)} == whole
    assert main(["checkpoints", str(finished_copy.path), "--delete", "8.damaged"]) == 0


def test_nothing_is_begun_anew_over_damaged_checkpoints(finished_copy: RunFolder) -> None:
    for step in ("6", "8"):
        (finished_copy.checkpoints / step / "manifest.json").unlink()
    with pytest.raises(ZeroError, match=r"8 is damaged: manifest\.json is missing; .*6 is damaged"):
        TrainRun.open(finished_copy.read_config(), finished_copy)
    assert sorted(path.name for path in finished_copy.checkpoints.iterdir()) == ["6", "8"]
