"""Runs on tokens that were prepared elsewhere: what they keep of them, and what they refuse to go on with."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from micro_run import micro_config

from zerojax.errors import ConfigurationError
from zerojax.run.checkpoints import Record
from zerojax.run.config import DataSection, MixtureSource, spelled_out
from zerojax.run.data.chat_template import CHATML, TEMPLATE
from zerojax.run.data.dataset import ELSEWHERE, open_template, open_tokenizer, tokenizer_file
from zerojax.run.data.formats import DataError
from zerojax.run.data.prepare import keep_tokenizer, prepare
from zerojax.run.data.tokenizer import ByteTokenizer
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import changes_since

WORDS = b"all work and no play"


def tokens(text: Path, folder: Path, tokenizer: str = "byte") -> DataSection:
    """Prepare tokens in a folder; returns the settings of a run on them, which name another tokenizer."""
    prepare(DataSection(source=str(text), tokenizer=tokenizer, vocab_size=300, validation=0.2), folder)
    return DataSection(source=str(folder))


def test_a_run_keeps_the_tokenizer_and_the_template_of_its_tokens(text: Path, tmp_path: Path) -> None:
    settings, run = tokens(text, tmp_path / "first", tokenizer="bpe"), tmp_path / "run/data"
    (tmp_path / "first" / TEMPLATE).write_text(CHATML)
    wanted = open_tokenizer(settings, run).encode(WORDS).tolist()
    prepare(settings, run)
    (tmp_path / "first").rename(tmp_path / "moved")
    assert open_tokenizer(settings, run).encode(WORDS).tolist() == wanted
    assert open_template(settings, run).source == CHATML
    assert tokenizer_file(settings, run) == run / "tokenizer.json"
    with pytest.raises(DataError, match=r"run was started with prepared tokens, .*/first .*, but data"):
        prepare(settings, run)
    (tmp_path / "first").mkdir()  # of which nothing says that it held tokens
    (tmp_path / "first" / "a.txt").write_text("text")
    with pytest.raises(DataError, match="was started with prepared tokens"):
        prepare(settings, run)


def test_a_run_on_bytes_has_bytes_whatever_its_settings_say(text: Path, tmp_path: Path) -> None:
    settings, run = tokens(text, tmp_path / "first"), tmp_path / "run/data"
    settings = replace(settings, tokenizer="bpe")
    prepare(settings, run)
    shutil.rmtree(tmp_path / "first")
    assert isinstance(open_tokenizer(settings, run), ByteTokenizer)


def test_other_tokens_are_refused(text: Path, tmp_path: Path) -> None:
    first, run = tmp_path / "first", tmp_path / "run/data"
    settings = tokens(text, first)
    prepare(settings, run)
    before = (run / ELSEWHERE).read_bytes()
    first.rename(tmp_path / "moved")
    (tmp_path / "a.txt").write_text("another line\n" * 99)
    tokens(tmp_path / "a.txt", first)
    with pytest.raises(
        DataError,
        match=r"run was started with the tokens of .*first \(.* tokens, checksum .*\), and these are "
        r".*first \(.* tokens, checksum .*\): put the former back, or choose another --run-dir",
    ):
        prepare(settings, run)
    prepare(replace(settings, source=str(tmp_path / "moved")), run)
    shutil.rmtree(first)
    (tmp_path / "moved").rename(first)
    prepare(settings, run)
    assert (run / ELSEWHERE).read_bytes() == before


def test_moved_tokens_are_resumed_from(text: Path, tmp_path: Path) -> None:
    first, run = tmp_path / "first", RunFolder(tmp_path / "run")
    prepare(tokens(text, first), run.data)
    before: Any = SimpleNamespace(record=Record(config=spelled_out(micro_config(first))))
    first.rename(tmp_path / "moved")
    assert changes_since(before, micro_config(tmp_path / "moved"), run) == []
    with pytest.raises(ConfigurationError, match=r"was started with data\.source"):
        changes_since(before, micro_config(text), run)


def test_other_sources_are_refused(text: Path, tmp_path: Path) -> None:
    """Text in place of tokens, tokens in place of the run's own, and the folder of a run that has none."""
    settings, run = tokens(text, tmp_path / "first"), tmp_path / "run/data"
    prepare(settings, run)
    own = DataSection(source=str(text), validation=0.2)
    with pytest.raises(DataError, match=r"started with prepared tokens, .*/first .*, but data\.source names"):
        prepare(own, run)
    prepare(own, tmp_path / "own/data")
    with pytest.raises(DataError, match=r"own/data holds tokens, but data\.source names others"):
        prepare(settings, tmp_path / "own/data")
    prepare(DataSection(source=str(tmp_path / "own/data")), tmp_path / "own/data")
    assert not (tmp_path / "own/data" / ELSEWHERE).exists()
    with pytest.raises(
        DataError, match=r"run/data holds no tokens: its run reads the tokens in .*/first\. Name"
    ):
        prepare(DataSection(source=str(run)), tmp_path / "third/data")


def test_a_mixture_of_tokens_is_recorded_source_by_source(text: Path, tmp_path: Path) -> None:
    mixture = (MixtureSource(str(text), pattern="*[0-4].txt"), MixtureSource(str(text), pattern="*[5-9].txt"))
    prepare(DataSection(mixture=mixture, tokenizer="bpe", vocab_size=300, validation=0.2), tmp_path / "first")
    names = [str(tmp_path / "first" / name) for name in "01"]
    settings, run = DataSection(mixture=tuple(map(MixtureSource, names))), tmp_path / "run/data"
    prepare(settings, run)
    prepare(settings, run)
    shutil.rmtree(tmp_path / "first")
    assert open_tokenizer(settings, run).vocab_size > 256
    with pytest.raises(DataError, match=r"first/0 \(.*\) and .*first/1 \("):
        prepare(settings, run)


def test_a_run_without_a_record_goes_on_and_gets_one(text: Path, tmp_path: Path) -> None:
    settings, run = tokens(text, tmp_path / "first", tokenizer="bpe"), tmp_path / "run/data"
    (tmp_path / "first").rename(tmp_path / "moved")
    with pytest.raises(
        DataError, match=r"the tokenizer should be in .*run/data or beside the tokens of data\.source"
    ):
        open_tokenizer(settings, run)
    (tmp_path / "moved").rename(tmp_path / "first")
    prepare(settings, run)
    assert (run / ELSEWHERE).is_file()
    (run / ELSEWHERE).write_text("{}")
    with pytest.raises(DataError, match="damaged; delete the file to use the tokens"):
        prepare(settings, run)
    (run / ELSEWHERE).unlink()
    prepare(settings, run)
    assert (run / ELSEWHERE).is_file()


def test_a_run_that_prepares_nothing_needs_no_source_for_its_bytes(tmp_path: Path) -> None:
    settings = DataSection(source=str(tmp_path / "prompts.jsonl"))
    keep_tokenizer(settings, tmp_path / "run/data")
    assert isinstance(open_tokenizer(settings, tmp_path / "run/data"), ByteTokenizer)
