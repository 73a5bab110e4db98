"""Runs on prompts and completions, and on conversations: they learn, resume, are measured, and answer."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from micro_run import Stop, die_at, micro_config, train

from zerojax import gather_model
from zerojax.cli import chat, main
from zerojax.cli.chat import Dialogue
from zerojax.cli.trained import open_trained
from zerojax.errors import ConfigurationError
from zerojax.generation import Completions, Sampling, stream
from zerojax.run import evaluation, html_report
from zerojax.run.config import MeshSection, RunConfig, load_config
from zerojax.run.data.chat_template import CHATML, ChatTemplate
from zerojax.run.data.dataset import open_dataset
from zerojax.run.data.prepare import prepare
from zerojax.run.data.responses import held_out_items
from zerojax.run.data.tokenizer import BPETokenizer, ByteTokenizer
from zerojax.run.evaluation import ExactMatch
from zerojax.run.metrics.files import read_metrics
from zerojax.run.run_dir import RunFolder
from zerojax.zero_config import ZeroConfig

ANSWERS = {"a": "xy", "b": "zz"}


def config(source: Path, **data: Any) -> RunConfig:
    return micro_config(
        source,
        train={
            "steps": 80,
            "eval_every": 40,
            "eval_batches": 1,
            "eval_exact_match": 6,
            "eval_samples": 4,
            "sequence_length": 24,
        },
        model={"d_model": 32, "positions": "rope"},
        optimizer={"learning_rate": 2e-2, "warmup_steps": 10, "final_fraction": 0.0},
        mesh={"nodes": 1, "local": 1},
        data={"kind": "completion", "packing": "documents", "validation": 0.4} | data,
        checkpoint={"every": 45},
    )


def rows_of(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "tokens", "grad_norm", "validation_loss", "exact_match")
    return [tuple(line.get(name) for name in names) for line in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that learned to answer "a" and "b"; read-only."""
    folder = tmp_path_factory.mktemp("answering")
    rows = [
        {"prompt": f"{i:02}{letter}", "completion": f" {answer} "}
        for i in range(40)
        for letter, answer in ANSWERS.items()
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(config(folder / "rows.jsonl"), folder / "run")
    return RunFolder(folder / "run")


def test_a_run_learns_to_answer_and_measures_it(answering: RunFolder) -> None:
    measured = {row[0]: row[5] for row in rows_of(answering.path) if row[5] is not None}
    assert set(measured) == {40, 80}
    summary = answering.read_summary()
    assert measured[80] == summary["exact_match"] == 1
    assert summary["validation_loss"] < 0.1
    # Eight rows of four documents, each with a completion of four tokens and its end.
    assert all(8 * 4 < row[2] <= 8 * 4 * 5 for row in rows_of(answering.path))


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_each_evaluation_has_samples(answering: RunFolder) -> None:
    found = samples_of(answering.path)
    assert [one["step"] for one in found] == [40] * 4 + [80] * 4
    assert len({one["prompt"] for one in found}) == 4
    for one in found:
        assert one["expected"] == f" {ANSWERS[one['prompt'][2]]} "
    assert all(one["completion"] == one["expected"] for one in found[4:])
    page = html_report.render(html_report.RunData(answering))
    assert "<th>expected</th>" in page


def test_samples_of_a_text_write_its_second_half(text: Path, tmp_path: Path) -> None:
    settings = micro_config(text, data={"tokenizer": "byte"})
    prepare(settings.data, tmp_path)
    (part,) = open_dataset(settings.data, tmp_path).parts
    items = held_out_items(part.validation, 3, 20)
    texts = [ByteTokenizer().decode([*one.prompt, *one.completion]) for one in items]
    assert [text[:9] for text in texts] == ["document "] * len(texts)
    assert [(one.prompt[0], len(one.prompt), len(one.completion)) for one in items] == [(0, 10, 10)] * 3


def test_a_torn_run_resumes_in_the_middle_of_an_epoch_bit_by_bit(
    answering: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_config(answering.config)
    with monkeypatch.context() as patch:
        die_at(patch, 48)
        with pytest.raises(Stop):
            train(settings, tmp_path / "torn")
    train(settings, tmp_path / "torn", resume="must")
    assert rows_of(tmp_path / "torn") == rows_of(answering.path)
    assert samples_of(tmp_path / "torn") == samples_of(answering.path)


def test_exact_match_is_the_share_of_right_answers_as_text(
    answering: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_config(answering.config)
    data = open_dataset(settings.data, answering.data)
    items = ExactMatch.of(settings, data, answering.data)
    assert items is not None
    assert len(items) == 6
    [(end, some)] = items.items
    given = {item.prompt.tobytes(): item.completion for item in some}

    def answers(state: Any, rows: Any, limits: Any, **options: Any) -> Completions:
        """Right but for blanks, except for the last two prompts; the last one does not end."""
        assert options["stop"] == end.stop == [(0,)]
        assert options["how"].temperature == 0
        found = np.full((len(rows), max(limits)), 120, np.int32)
        lengths = np.asarray(limits, np.int32)
        for number, row in enumerate(rows[:-1]):
            assert len(given[row.tobytes()]) <= limits[number] <= 25 - len(row)
            right = [] if number == len(rows) - 2 else given[row.tobytes()][1:-2].tolist()
            found[number, : len(right) + 1] = [*right, 0]
            lengths[number] = len(right) + 1
        return Completions(found, lengths, np.zeros(found.shape, np.float32))

    monkeypatch.setattr(evaluation, "generate_rows", answers)
    state: Any = None
    assert items.measure(state) == 4 / 6
    # Each of two processes answers three, of which its first one right.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(evaluation, "gather_from_all", lambda x: [x] * 2)
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert items.measure(state) == 2 / 6


def test_eval_says_exact_match_and_perplexity(
    answering: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(answering.path), "--exact-match", "9"]) == 0
    out = capfd.readouterr().out
    assert "of the completions, whose perplexity is 1.0" in out
    assert "exact match 100.0% of 9 held-out prompts" in out


def test_items_need_prompts_in_whole_documents(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r'set data.kind to "chat" or "completion"'):
        micro_config(tmp_path, train={"eval_exact_match": 4})
    with pytest.raises(ConfigurationError, match=r'set data.packing = "documents"'):
        config(tmp_path, packing="none")


def test_long_documents_are_noted(
    answering: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = open_dataset(load_config(answering.config).data, answering.data)
    assert data.notes(24) == []
    (note,) = data.notes(5)
    header = data.parts[0].train.header
    assert f": {header.documents} of {header.documents} documents are longer than 6 tokens" in note
    # A document has nine tokens, of which the last five count.
    assert f"lose their end: {3 * header.documents} of {5 * header.documents} tokens that count" in note


def test_chat_answers_each_line(
    answering: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("91a\n\n92b\n"))
    assert main(["chat", str(answering.path), "--temperature", "0", "--tokens", "9"]) == 0
    assert capfd.readouterr().out == "xy \nzz \n"
    assert main(["chat", str(answering.path), "--system", "be brief"]) == 2
    assert "--system is for conversations" in capfd.readouterr().err


def test_chat_on_conversations_uses_the_template(
    answering: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The weights of the other run; what they answer here is nonsense, but always the same.
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(answering.path, folder.path, ignore=shutil.ignore_patterns("data"))
    config = load_config(answering.config)
    chat = replace(config.data, kind="chat", chat_template="chatml")
    config = replace(config, data=chat, model=replace(config.model, max_seq_len=256), zero=ZeroConfig())
    folder.write_config(config)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    capfd.readouterr()
    code = main(["chat", str(folder.path), "--system", "S", "--temperature", "0", "--tokens", "7"])
    assert code == 0
    out = capfd.readouterr().out
    # The same by hand.
    model = gather_model(open_trained(folder, config, MeshSection(nodes=1, local=1)).state)
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    prompt = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    new = stream(model, prompt, 7, key=jax.random.key(0), how=Sampling(temperature=0), stop=0)
    assert out == ByteTokenizer().decode(list(new)).lstrip() + "\n"


def test_chat_remembers_in_a_context_shorter_than_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: dict[str, Any] = {"kind": "chat", "packing": "documents", "chat_template": "chatml"}
    folder, prompts = RunFolder(tmp_path), []
    folder.write_config(micro_config(tmp_path, data=data, model={"max_seq_len": 256}))
    monkeypatch.setattr(chat.Options, "open_model", lambda *_: None)
    monkeypatch.setattr(chat, "stream", lambda _, prompt, *__, **___: prompts.append(prompt) or iter(()))
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", str(folder.path), "--tokens", "300"]) == 0
    assert "user\none<|im_end|>" in ByteTokenizer().decode(prompts[1].tolist())


def test_of_conversations_the_last_answers_are_compared(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho\n"}]
    rows = [{"messages": [turns[0] | {"content": f"hi {i}"}, turns[1]]} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(tmp_path / "rows.jsonl", kind="chat", chat_template="chatml")
    settings = replace(
        settings,
        train=replace(settings.train, sequence_length=96),
        model=replace(settings.model, max_seq_len=96),
    )
    prepare(settings.data, tmp_path / "data")
    items = ExactMatch.of(settings, open_dataset(settings.data, tmp_path / "data"), tmp_path / "data")
    assert items is not None
    [(end, some)] = items.items
    assert end.text == "<|im_end|>"
    assert {bytes(item.completion.astype(np.uint8)) for item in some} == {b"ho\n<|im_end|>\n"}
    assert all(bytes(item.prompt.astype(np.uint8)).endswith(b"<|im_start|>assistant\n") for item in some)
    short = replace(settings, train=replace(settings.train, sequence_length=24))
    data = open_dataset(settings.data, tmp_path / "data")
    with pytest.raises(ConfigurationError, match="no held-out document fits into 25 tokens"):
        ExactMatch.of(short, data, tmp_path / "data")


def test_chat_with_a_run_on_text_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config(micro_config(tmp_path))
    assert main(["chat", str(folder.path)]) == 2
    assert "was trained on plain text, and its tokenizer has no chat template: use zerojax sample" in (
        capfd.readouterr().err
    )
    assert main(["chat", str(folder.path), "--tokens", "0"]) == 2


class TestDialogue:
    def read(self, text: bytes) -> list[str]:
        dialogue = Dialogue(ByteTokenizer(), ChatTemplate(CHATML), longest=999)
        return [piece for piece in dialogue.read(iter(text)) if piece]

    def test_text_comes_as_it_is_complete_and_ends_before_the_end(self) -> None:
        assert self.read(b"hello world, you<|im_end|>\nand more") == list("hello world, you")
        assert "".join(self.read("  größe 😀!".encode())) == "größe 😀!"
        assert all("\ufffd" not in piece for piece in self.read("😀 größe, and so on".encode()))
        assert "".join(self.read(b"a < b <|im_e")) == "a < b <|im_e"
        assert self.read(b"<|im_end|>") == []

    def test_an_end_that_is_one_token_is_that_token(self) -> None:
        tokenizer = BPETokenizer.train([b"hello"], 260)
        template = ChatTemplate(CHATML.replace("<|im_end|>", "<|endoftext|>"))
        dialogue = Dialogue(tokenizer, template, longest=99)
        assert (dialogue.end.token, dialogue.end.text) == (tokenizer.end_of_text, "")
        assert list(dialogue.read(iter(tokenizer.encode(b"hi!").tolist()))) == ["h", "i", "!", ""]

    def test_the_oldest_messages_are_dropped_but_not_the_system_message(self) -> None:
        dialogue = Dialogue(ByteTokenizer(), ChatTemplate(CHATML), system="S", longest=150)
        prompt = ""
        for turn in range(4):
            prompt = ByteTokenizer().decode(dialogue.ask(f"q{turn}").tolist())
            dialogue.add_response(f"a{turn}")
        assert len(prompt) <= 150
        assert prompt.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq2")
        assert prompt.endswith("a2<|im_end|>\n<|im_start|>user\nq3<|im_end|>\n<|im_start|>assistant\n")
        assert "x" * 200 in ByteTokenizer().decode(dialogue.ask("x" * 200).tolist())
