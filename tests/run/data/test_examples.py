"""Prompts with completions, and conversations: tokens, masks, and the files that they are prepared into."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from environment import ROOT
from pyarrow import parquet

from zerojax.run.config import DataSection, MixtureSource
from zerojax.run.data.batches import make_rows
from zerojax.run.data.chat_template import CHATML, ChatTemplate
from zerojax.run.data.dataset import open_dataset
from zerojax.run.data.examples import Completions, Conversations
from zerojax.run.data.formats import DataError
from zerojax.run.data.prepare import prepare
from zerojax.run.data.responses import ResponseEnd, held_out_items
from zerojax.run.data.source import TextSource
from zerojax.run.data.tokenizer import BPETokenizer, ByteTokenizer
from zerojax.run.data.tokens import TokenFile, open_tokens
from zerojax.validation.untrusted import load_checked

FIXTURES = ROOT / "tests" / "fixtures" / "chat"
CHAT = DataSection(kind="chat", chat_template="chatml", packing="documents", validation=0.2)
COMPLETION = DataSection(kind="completion", packing="documents", validation=0.2)


def write_rows(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"wie heißt {i}? ", "completion": f"ß{i}!" * (1 + i % 3)} for i in range(count)]


def conversations(count: int) -> list[dict[str, Any]]:
    turns = [("user", "hällo {}"), ("assistant", "hi\n\n{}"), ("user", "und?"), ("assistant", "ß {}")]
    return [
        {"messages": [{"role": role, "content": text.format(i)} for role, text in turns[: 2 + 2 * (i % 2)]]}
        for i in range(count)
    ]


def documents_of(file: TokenFile) -> list[tuple[bytes, bytes]]:
    """Each document of a file of bytes, and what of it counts."""
    ends = np.cumsum(file.lengths)
    assert file.mask is not None
    parts = zip(np.split(file.tokens, ends[:-1]), np.split(file.mask, ends[:-1]), strict=True)
    return [(bytes(tokens), bytes(tokens[mask == 1])) for tokens, mask in parts]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_of_prompts_and_completions_the_completion_and_its_end_count(tmp_path: Path, name: str) -> None:
    rows = questions(40)
    settings = replace(COMPLETION, source=str(write_rows(tmp_path / name, rows)))
    prepare(settings, tmp_path / "data")
    (part,) = open_dataset(settings, tmp_path / "data").parts
    wanted = {
        (f"\0{row['prompt']}{row['completion']}\0".encode(), f"{row['completion']}\0".encode())
        for row in rows
    }
    train, validation = documents_of(part.train), documents_of(part.validation)
    assert {*train, *validation} == wanted
    assert len(train) + len(validation) == 40
    header = part.train.header
    assert header.targets == sum(len(completion) for _, completion in train)
    assert header.text_bytes == sum(len(completion) - 1 for _, completion in train)
    assert not header.shared_ends


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_of_conversations_the_assistants_turns_count(tmp_path: Path, name: str) -> None:
    rows = conversations(30)
    # Parquet has null for the keys that other messages have.
    rows[3]["messages"][0]["name"] = "somebody"
    settings = replace(CHAT, source=str(write_rows(tmp_path / name, rows)))
    prepare(settings, tmp_path / "data")
    data = open_dataset(settings, tmp_path / "data")
    found = documents_of(data.parts[0].train) + documents_of(data.parts[0].validation)
    wanted = set()
    for row in rows:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["messages"])
        turns = [f"{m['content']}<|im_end|>\n" for m in row["messages"] if m["role"] == "assistant"]
        wanted.add((text.encode(), "".join(turns).encode()))
    assert set(found) == wanted
    assert (tmp_path / "data" / "chat_template.jinja").read_text() == CHATML
    assert " tokens count)" in data.describe()


def test_an_answer_counts_alone_and_whole() -> None:
    history = [
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))
    ]

    def counted(source: str) -> list[str]:
        document = Conversations(ChatTemplate(source)).document({"messages": history}, "here", "why</t>d")
        text = document.text.decode()
        return [text[start:end] for start, end in document.targets or ()]

    # Without blocks, earlier answers may be written differently.
    thinking = (FIXTURES / "thinking.jinja").read_text()
    assert counted(thinking) == ["<think>\n\n</think>\n\nwhy</t>d<|im_end|>\n"]
    blocks = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% set parts = m.content.split('</t>') %}"
        "{% if parts | length > 1 %}{% generation %}{{ parts[0] + '</t>' }}{% endgeneration %}{% endif %}"
        "{% generation %}{{ parts[-1] + '</a>' }}{% endgeneration %}{% else %}<u>{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<a>PROMPT{% endif %}"
    )
    # An answer may be of several blocks. It begins after the prompt, if it continues that.
    assert counted(blocks.replace("PROMPT", "")) == ["why</t>", "d</a>"]
    assert counted(blocks.replace("PROMPT", "why")) == ["</t>", "d</a>"]
    assert counted(blocks.replace("PROMPT", "<t>")) == ["why</t>", "d</a>"]
    for source in (CHATML, blocks):
        with pytest.raises(DataError, match=r"here: .* up to 3 differently .* copy of the template"):
            counted("{{ messages | length }}" + source)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("as_text", [False, True])
def test_the_tools_of_a_conversation_reach_the_template(tmp_path: Path, name: str, as_text: bool) -> None:
    known = json.loads((FIXTURES / "rendered.json").read_text())
    case = known["tools"][0]
    # A column of Parquet has one type, and its tables the keys of all rows.
    messages = [
        m | {"content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
        for m in case["messages"]
    ]
    other = [
        {"type": "function", "function": {"name": "none", "parameters": {"properties": {"c": {"type": "x"}}}}}
    ]
    tools = [json.dumps(one) if as_text else one for one in (case["tools"], other)]
    rows = [{"messages": messages, "tools": one} for one in tools]
    template = ChatTemplate((FIXTURES / "tools.jinja").read_text(), known["special_tokens"])
    document, _ = Conversations(template).read(write_rows(tmp_path / name, rows))
    assert document.text.decode() == case["text"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_an_empty_completion_is_left_out_and_counted(tmp_path: Path, name: str) -> None:
    rows = questions(30)
    for row in rows[4:6]:
        row["completion"] = ""
    settings = replace(COMPLETION, source=str(write_rows(tmp_path / name, rows)))
    prepare(settings, tmp_path / "data")
    data = open_dataset(settings, tmp_path / "data")
    found = [
        text for part in (data.parts[0].train, data.parts[0].validation) for text, _ in documents_of(part)
    ]
    kept = [row for row in rows if row["completion"]]
    assert sorted(found) == sorted(f"\0{row['prompt']}{row['completion']}\0".encode() for row in kept)
    assert data.notes(99) == [f"{settings.source}: 2 rows have an empty completion and are skipped"]


def test_tokens_of_a_bpe_count_if_their_text_does(tmp_path: Path) -> None:
    text = [b"<|im_start|>assistant\nhello  hello\n\nw\xc3\xb6rld\n<|im_end|> \n" * 3]
    tokenizer = BPETokenizer.train(text * 30, 330)
    messages = [
        {"role": "user", "content": "hello\n\nwörld"},
        {"role": "assistant", "content": "  wörld\n\n \U0001f600 hello\n"},
    ]
    chat = Conversations(ChatTemplate(CHATML))
    (document,) = chat.read(write_rows(tmp_path / "rows.jsonl", [{"messages": messages}]))
    [(tokens, mask)] = chat.encode(tokenizer, [document])
    np.testing.assert_array_equal(tokens, tokenizer.encode(document.text))
    assert 1 < len(tokens) < len(document.text)
    counted = tokenizer.decode(tokens[mask].tolist())
    # A token across the border counts: here the line break before the answer may join its blanks.
    assert counted.strip() == "wörld\n\n \U0001f600 hello\n<|im_end|>"
    assert counted.endswith("<|im_end|>\n")
    assert np.all(np.diff(np.flatnonzero(mask)) == 1)


def test_a_bpe_learns_from_rendered_training_conversations(tmp_path: Path) -> None:
    source = str(write_rows(tmp_path / "rows.jsonl", conversations(60)))
    settings = replace(CHAT, source=source, tokenizer="bpe", vocab_size=300)
    prepare(settings, tmp_path / "data")
    data = open_dataset(settings, tmp_path / "data")
    assert len(data.tokenizer.encode(b"<|im_start|>")) < 6
    assert data.tokenizer.special_tokens == {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("settings", "row", "message"),
    [
        (CHAT, {"text": "a"}, r"rows.jsonl:2: no column 'messages' among \['text'\]"),
        (CHAT, {"messages": "a"}, "rows.jsonl:2: column 'messages' is str, not a list of messages"),
        (CHAT, {"messages": []}, "rows.jsonl:2: column 'messages' is an empty list"),
        (CHAT, {"messages": [MESSAGE, 3]}, "rows.jsonl:2: message 1 is int, not a table"),
        (
            CHAT,
            {"messages": [{"role": "user"}]},
            r"rows.jsonl:2: message 0 has no 'content' among \['role'\]",
        ),
        (CHAT, {"messages": [MESSAGE | {"content": None}]}, "rows.jsonl:2: message 0 has null as content"),
        (
            CHAT,
            {"messages": [MESSAGE | {"content": [{"type": "image_url"}]}]},
            "rows.jsonl:2: message 0 has {'type': 'image_url'} in its content: zerojax reads text only",
        ),
        (CHAT, {"messages": [MESSAGE], "tools": [3]}, r"rows.jsonl:2: column 'tools' is \[3\], not a list"),
        (
            CHAT,
            {"messages": [MESSAGE], "tools": "x"},
            "^[^:]*rows.jsonl:2: column 'tools' is text that is not JSON",
        ),
        (CHAT, {"messages": [MESSAGE]}, "rows.jsonl:2: no message of the assistant"),
        (
            CHAT,
            {"messages": [MESSAGE, {"role": "assistant", "content": "\ud800"}]},
            "rows.jsonl:2: not valid Unicode",
        ),
        (
            CHAT,
            {"messages": [MESSAGE, {"role": "assistant", "content": "\0"}]},
            "rows.jsonl:2: a NUL byte",
        ),
        (COMPLETION, {"prompt": "a"}, "rows.jsonl:2: no column 'completion'"),
        (COMPLETION, {"prompt": 3, "completion": "b"}, "rows.jsonl:2: column 'prompt' is int, not text"),
        (COMPLETION, {"prompt": "\0", "completion": "b"}, "rows.jsonl:2: a NUL byte"),
        (COMPLETION, ["a"], "rows.jsonl:2: a list instead of a JSON object"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, settings: DataSection, row: Any, message: str) -> None:
    good: list[Any] = conversations(30) if settings is CHAT else questions(30)
    source = write_rows(tmp_path / "rows.jsonl", [good[0], row, *good[1:]])
    with pytest.raises(DataError, match=message):
        prepare(replace(settings, source=str(source)), tmp_path / "data")


def test_a_bad_row_of_parquet_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "c"}]
    file = write_rows(tmp_path / "rows.parquet", rows)
    with pytest.raises(DataError, match=r"rows.parquet row 1: column 'prompt' is null, not text"):
        list(Completions().read(file))
    with pytest.raises(DataError, match=r"rows.parquet: no column 'answer' among \['prompt', 'completion'\]"):
        list(Completions(completion="answer").read(file))


def test_plain_text_has_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"a.txt: plain text has no columns \['messages'\]"):
        list(TextSource(str(tmp_path), examples=Conversations(ChatTemplate(CHATML))).documents())


class TestFiles:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> DataSection:
        settings = replace(COMPLETION, source=str(write_rows(tmp_path / "rows.jsonl", questions(40))))
        prepare(settings, tmp_path / "data")
        return settings

    def test_a_damaged_mask_is_refused(self, settings: DataSection, tmp_path: Path) -> None:
        path = tmp_path / "data" / "train.mask"
        raw = path.read_bytes()
        path.write_bytes(bytes([1 - raw[0]]) + raw[1:])
        with pytest.raises(DataError, match=r"train.mask: damaged: wrong checksum"):
            open_tokens(path.with_suffix(".bin"))
        path.write_bytes(raw[:-1])
        with pytest.raises(DataError, match=r"train.mask: damaged: .* bytes"):
            open_tokens(path.with_suffix(".bin"), verify=False)
        path.unlink()
        with pytest.raises(DataError, match=r"train.mask: No such file"):
            open_tokens(path.with_suffix(".bin"))

    def test_plain_text_is_stored_as_it_always_was(self, text: Path, tmp_path: Path) -> None:
        settings = DataSection(source=str(text), validation=0.2)
        prepare(settings, tmp_path / "plain")
        names = {path.name for path in (tmp_path / "plain").iterdir()}
        assert names == {
            *(f"{split}.{kind}" for split in ("train", "validation") for kind in ("bin", "json", "lengths")),
            "settings.json",
        }
        header = load_checked((tmp_path / "plain" / "train.json").read_text())
        assert {"targets", "mask_crc32"}.isdisjoint(header)
        # What earlier versions wrote: folders that they prepared stay valid.
        assert json.loads((tmp_path / "plain" / "settings.json").read_text()) == {
            "sources": [{"source": str(text), "column": "text", "pattern": "**/*"}],
            "tokenizer": "byte",
            "validation": 0.2,
        }

    def test_other_columns_are_other_data(self, settings: DataSection, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="was prepared with"):
            prepare(replace(settings, prompt_column="question"), tmp_path / "data")
        with pytest.raises(DataError, match="was prepared with"):
            prepare(replace(CHAT, source=settings.source), tmp_path / "data")

    def test_tokens_are_of_the_kind_that_they_were_prepared_from(
        self, settings: DataSection, tmp_path: Path
    ) -> None:
        again = replace(settings, source=str(tmp_path / "data"))
        prepare(again, tmp_path / "other")
        assert open_dataset(again, tmp_path / "other").parts[0].train.mask is not None
        with pytest.raises(DataError, match=r'a loss mask, which does not fit data.kind = "text"'):
            open_dataset(replace(again, kind="text"), tmp_path / "other")

    def test_a_mixture_with_text_counts_all_of_the_text(
        self, settings: DataSection, text: Path, tmp_path: Path
    ) -> None:
        mixture = (MixtureSource(str(tmp_path / "data")), MixtureSource(str(tmp_path / "plain")))
        prepare(DataSection(source=str(text), validation=0.2), tmp_path / "plain")
        mixed = DataSection(mixture=(replace(mixture[0], kind="completion"), mixture[1]), packing="documents")
        assert mixed.masked
        data = open_dataset(mixed, tmp_path / "other")
        answers, plain = (make_rows(p.train, 64, "documents", labels=True)[0] for p in data.parts)
        np.testing.assert_array_equal(plain["labels"], plain["tokens"])
        assert 0 < np.sum(answers["labels"] >= 0) < np.sum(answers["tokens"] >= 0)

    def test_held_out_items_are_prompts_and_their_completions(
        self, settings: DataSection, tmp_path: Path
    ) -> None:
        file = open_tokens(tmp_path / "data" / "validation.bin")
        items = held_out_items(file, 100, 64)
        found = {(bytes(p.astype(np.uint8)), bytes(c.astype(np.uint8))) for p, c in items}
        assert found == {(text[: -len(answer)], answer) for text, answer in documents_of(file)}
        shorter = held_out_items(file, 100, 20)
        assert 0 < len(shorter) < len(items)
        assert all(len(p) + len(c) <= 20 for p, c in shorter)
        assert len(held_out_items(file, 2, 64)) == 2


def test_of_a_conversation_the_last_answer_is_held_out(tmp_path: Path) -> None:
    settings = replace(CHAT, source=str(write_rows(tmp_path / "rows.jsonl", conversations(30))))
    prepare(settings, tmp_path / "data")
    file = open_tokens(tmp_path / "data" / "validation.bin")
    end = ResponseEnd.of(ByteTokenizer(), ChatTemplate(CHATML))
    assert end == ResponseEnd(0, "<|im_end|>", tuple(b"<|im_end|>"))
    assert end.stop == [(0,), end.tokens]
    for prompt, completion in held_out_items(file, 9, 999):
        text = ByteTokenizer().decode(prompt.tolist())
        assert text.endswith("<|im_start|>assistant\n")
        answer, ended = end.read(ByteTokenizer(), completion.tolist())
        assert ended
        number = text.split("hällo ")[1].split("<")[0]
        assert answer == (f"ß {number}" if "und?" in text else f"hi\n\n{number}")
