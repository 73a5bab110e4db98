"""Pairs of answers: what they are read from, which are held out, and their rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerojax.errors import ConfigurationError
from zerojax.posttrain.data.pairs import PairRows, Pairs, chosen_items
from zerojax.run.config import DataSection
from zerojax.run.data.chat_template import CHATML, ChatTemplate
from zerojax.run.data.tokenizer import ByteTokenizer


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(source: str, longest: int = 99, template: ChatTemplate | None = None, **data: Any) -> Pairs:
    settings = DataSection(source=source, validation=0.25, **data)
    return Pairs.read(settings, ByteTokenizer(), template, longest)


def row(i: int, **others: Any) -> dict[str, Any]:
    return {"prompt": f"{i:02}", "chosen": " yes", "rejected": " no"} | others


def test_a_row_has_both_answers_and_what_counts(tmp_path: Path) -> None:
    rows = [row(i, better=f"+{i}") for i in range(9)]
    pairs = read(write(tmp_path / "rows.jsonl", rows), chosen_column="better")
    found = PairRows(pairs.train, 8)
    assert len(found) + len(pairs.held_out) == 9
    for one in (found[i] for i in range(len(found))):
        prompt = bytes(one["chosen"][1:3].tolist()).decode()
        better = f"+{int(prompt)}".encode()
        np.testing.assert_array_equal(one["chosen"], [0, *prompt.encode(), *better, 0, 0, 0, 0][:9])
        np.testing.assert_array_equal(one["rejected"], [0, *prompt.encode(), *b" no", 0, 0, 0])
        assert one["chosen_mask"].tolist() == [0, 0, 1, 1, 1, 0, 0, 0]  # the end counts
        assert one["rejected_mask"].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
        assert {x.dtype.name for x in one.values()} == {"int32", "float32"}


def test_prompts_with_their_chosen_answers(tmp_path: Path) -> None:
    pairs = read(write(tmp_path / "rows.jsonl", [row(i) for i in range(9)]))
    items = chosen_items(pairs.train, 3)
    assert len(items) == 3
    for item in items:
        assert item.prompt[0] == 0
        assert bytes(item.prompt[1:].tolist()) in {b"%02d" % i for i in range(9)}
        assert bytes(item.completion.tolist()) == b" yes\0"
        assert item.prompt.dtype == np.int32
    assert len(chosen_items(pairs.train, 99)) == len(pairs.train)
    assert chosen_items([], 3) == []


def test_pairs_that_are_too_long_or_equal_are_left_out(tmp_path: Path) -> None:
    rows = [row(i) for i in range(8)] + [row(8, rejected="x" * 9), row(9, rejected=" yes")]
    rows.append(row(10, rejected=""))
    pairs = read(write(tmp_path / "rows.jsonl", rows), longest=12)
    assert len(pairs.train) + len(pairs.held_out) == 8
    assert pairs.notes() == [
        "1 pairs have more than 12 tokens and were skipped",
        "1 pairs have two equal responses and were skipped",
        "1 pairs have an empty response and were skipped",
    ]


def test_pairs_of_one_prompt_are_held_out_together(tmp_path: Path) -> None:
    rows = [row(i % 20, rejected=f" no{i}") for i in range(60)]
    pairs = read(write(tmp_path / "rows.jsonl", rows))
    held_out, train = ({pair.prompt for pair in part} for part in (pairs.held_out, pairs.train))
    assert 3 * len(held_out) == len(pairs.held_out) > 0
    assert not held_out & train


def test_the_answer_follows_the_conversation(tmp_path: Path) -> None:
    turns = [("user", "hi"), ("assistant", "hello"), ("user", "again")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = [{"messages": [*messages, {"role": "user", "content": str(i)}], "good": "yes", "bad": "no"}
            for i in range(4)]  # fmt: skip
    settings = {"chosen_column": "good", "rejected_column": "bad"}
    pairs = read(write(tmp_path / "rows.jsonl", rows), 500, ChatTemplate(CHATML), **settings)
    for pair in (*pairs.train, *pairs.held_out):
        assert pair.prompt.endswith(b"<|im_end|>\n<|im_start|>assistant\n")
        assert b"hello" in pair.prompt
        # An end of several tokens, without the line break after it, which no model writes.
        assert bytes(pair.chosen.tokens[pair.chosen.mask].tolist()) == b"yes<|im_end|>"
        assert bytes(pair.rejected.tokens[pair.rejected.mask].tolist()) == b"no<|im_end|>"
        assert bytes(pair.chosen.tokens.tolist()).startswith(pair.prompt)


def test_an_answer_ends_where_a_model_ends_it(tmp_path: Path) -> None:
    class OneToken(ByteTokenizer):
        """Bytes, but for a token of their own for "<|im_end|>"."""

        def encode(self, text: bytes) -> Any:
            return super().encode(text.replace(b"<|im_end|>", b"\x01"))

        def encode_spans(self, texts: Any) -> Any:
            return super().encode_spans([text.replace("<|im_end|>", "\x01") for text in texts])

    rows = [
        {"messages": [{"role": "user", "content": str(i)}], "chosen": "a" * i, "rejected": "b"}
        for i in (1, 2)
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    source = DataSection(source=path, validation=0.5)
    template = ChatTemplate(CHATML.replace("<|im_end|>", "\x01"))
    pairs = Pairs.read(source, OneToken(), template, 99)
    for pair in (*pairs.train, *pairs.held_out):
        assert pair.chosen.tokens[-1] == pair.rejected.tokens[-1] == 1
        assert len(pair.chosen.mask) == len(pair.chosen.tokens)


def test_columns_of_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([row(i) for i in range(5)]), tmp_path / "rows.parquet")
    pairs = read(str(tmp_path / "rows.parquet"))
    assert {pair.prompt for pair in (*pairs.train, *pairs.held_out)} == {b"%02d" % i for i in range(5)}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "chosen": "b"}], r"rows.jsonl:1: .*'rejected'"),
        ([row(1, chosen=3)], r"rows.jsonl:1: column 'chosen' is int, not text"),
        ([row(1), row(2, rejected=[])], "rows.jsonl:2: column 'rejected' is list, not text"),
        ([row(1, chosen="")], "none of 1 pairs can be used. .* 1 have an empty response"),
        ([row(1, chosen="b" * 99)], "1 have more than 99 tokens, 0 have two equal responses, 0 have"),
        ([row(1, chosen=" no")], "1 have two equal responses"),
        ([], "empty"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(write(tmp_path / "rows.jsonl", rows))


def test_the_default_source_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"reads pairs from one source: name a file"):
        read("stdlib")
