"""The tokenizer of a run: kept in its folder, and compared with that of its first weights."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import pytest
from micro_run import micro_config

from zerojax import compilation_cache
from zerojax.errors import ConfigurationError
from zerojax.multihost import standby
from zerojax.run import build
from zerojax.run.build import RunSetup
from zerojax.run.checkpoints import Manifest, Record
from zerojax.run.config import PosttrainSection, RunConfig
from zerojax.run.data.chat_template import CHATML
from zerojax.run.data.dataset import open_template, open_tokenizer
from zerojax.run.data.prepare import prepare
from zerojax.run.data.tokenizer import BPETokenizer
from zerojax.run.inputs import abstract_batch, check_inputs, kept_tokenizer
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import start_run
from zerojax.train.state import check_there

TEXT = b"all work and no play"


def config(folder: Path, vocabulary: int = 264, **data: Any) -> RunConfig:
    """Settings with a tokenizer of a file, which is written."""
    path = folder / "tokenizer.json"
    BPETokenizer.train([TEXT] * 9, vocabulary).save(path)
    data = {"tokenizer": str(path), "validation": 0.2, **data}
    return micro_config(folder, model={"vocab_size": 270}, data=data)


def resumed() -> Manifest:
    return Manifest(4, 0.0, Record(position={"rollouts": 1}), {})


def test_a_run_keeps_its_tokenizer_and_its_template(tmp_path: Path) -> None:
    settings = config(tmp_path, kind="chat", packing="documents", chat_template="chatml")
    tokenizer, _ = kept_tokenizer(settings, RunFolder(tmp_path / "run"), None)
    (tmp_path / "tokenizer.json").unlink()
    shutil.move(tmp_path / "run", tmp_path / "moved")
    moved = RunFolder(tmp_path / "moved")
    for found in (
        open_tokenizer(settings.data, moved.data),
        kept_tokenizer(settings, moved, resumed())[0],
    ):
        assert found.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
        assert found.special_tokens == tokenizer.special_tokens
    assert open_template(settings.data, moved.data).source == CHATML


def test_first_weights_in_host_memory_can_be_trained(tmp_path: Path) -> None:
    state = RunSetup(micro_config(tmp_path, zero={"preset": "zero3", "host": ("optimizer",)})).initial_state()
    check_there(state)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state.encoded))


def test_a_process_that_stands_by_looks_for_the_step_until_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, loaded = RunSetup(micro_config(tmp_path)), []
    batch = abstract_batch(setup.config)
    setup.prepare_step(batch)  # does not stand by

    def load(lowered: jax.stages.Lowered) -> bool:
        loaded.append(lowered)
        return len(loaded) == 2

    monkeypatch.setattr(standby, "waits", lambda _: True)
    monkeypatch.setattr(compilation_cache, "load", load)
    setup.prepare_step(batch)
    assert len(loaded) == 2
    assert "jit__train" in loaded[0].as_text()
    monkeypatch.setattr(standby, "waits", lambda seconds: seconds == 0)
    setup.prepare_step(batch)
    assert len(loaded) == 2, "the launcher lets it begin"


def test_a_process_that_only_compiles_the_step_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    setup = RunSetup(micro_config(tmp_path))
    monkeypatch.setattr(standby, "waits", lambda _: True)
    monkeypatch.setattr(
        build, "lower_train_step", lambda *_: SimpleNamespace(compile=lambda: compiled.append(1))
    )
    monkeypatch.setenv(standby.VARIABLE, standby.COMPILE)
    with pytest.raises(SystemExit) as ended:
        setup.prepare_step(abstract_batch(setup.config))
    assert (ended.value.code, compiled) == (0, [1])


def test_a_run_resumes_with_the_tokenizer_that_it_began_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    kept_tokenizer(config(tmp_path), folder, None)
    other = config(tmp_path, 268)
    assert kept_tokenizer(other, folder, resumed())[0].vocab_size == 264
    assert kept_tokenizer(other, folder, None)[0].vocab_size == 268  # its first start failed


def test_first_weights_of_another_tokenizer_are_noted(finished: RunFolder, tmp_path: Path) -> None:
    settings, folder, notes = config(tmp_path), RunFolder(tmp_path / "run"), []
    for data in (replace(settings.data, tokenizer="byte"), settings.data):
        setup = RunSetup(replace(finished.read_config(), data=data))
        notes.append(start_run(setup, folder, None, finished.path).notes)
    assert len(notes[0]) == 1
    assert notes[1] == [
        *notes[0],
        f"data.tokenizer is not the tokenizer of {finished.path}/checkpoints/8: "
        "the weights may have learnt other tokens",
    ]


def test_a_vocabulary_larger_than_the_model_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the tokenizer has a vocabulary of 272"):
        kept_tokenizer(config(tmp_path, 272), RunFolder(tmp_path / "run"), None)


@pytest.mark.parametrize("method", ["none", "dpo"])
def test_a_check_of_the_inputs_is_of_what_a_start_would_keep(
    tmp_path: Path, method: Literal["none", "dpo"]
) -> None:
    """Not of the tokenizer that a start which failed has left."""
    folder = RunFolder(tmp_path / "run")
    too_large = replace(config(tmp_path, 272), posttrain=PosttrainSection(method=method))
    with pytest.raises(ConfigurationError, match="the tokenizer has a vocabulary of 272"):
        check_inputs(too_large, folder, None)
    assert not folder.data.exists()
    with pytest.raises(ConfigurationError, match="the tokenizer has a vocabulary of 272"):
        kept_tokenizer(too_large, folder, None)
    fits = replace(too_large, data=config(tmp_path).data)
    check_inputs(fits, folder, None)
    with pytest.raises(ConfigurationError, match="the tokenizer has a vocabulary of 272"):
        check_inputs(replace(fits, posttrain=PosttrainSection(method="dpo")), folder, resumed())


def test_data_take_the_place_of_a_kept_tokenizer_and_of_nothing_else(text: Path, tmp_path: Path) -> None:
    folder, settings = RunFolder(tmp_path / "run"), config(tmp_path, source=str(text))
    kept_tokenizer(settings, folder, None)
    prepare(settings.data, folder.data)
    assert (folder.data / "train.bin").exists()
    (folder.data / "validation.json").unlink()
    with pytest.raises(ConfigurationError, match=r"data holds '.*', but not all files of prepared data"):
        prepare(settings.data, folder.data)
    assert (folder.data / "train.bin").exists()


def test_a_run_whose_hosts_have_no_room_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step keeps in host memory counts, before any data is prepared."""
    setup = RunSetup(micro_config(tmp_path, model={"layers": 2}, zero={"host": ["activations"]}))
    setup.check()
    monkeypatch.setattr("zerojax.train.memory.memory_limits", lambda: {"host": 0})
    with pytest.raises(ConfigurationError, match=r"host=\('activations',\) keeps .* 0 B are free here"):
        setup.check()
