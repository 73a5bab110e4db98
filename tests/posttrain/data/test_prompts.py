"""Prompts: what they are read from, which are held out, and their order."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerojax.errors import ConfigurationError
from zerojax.posttrain.data.prompts import Prompts
from zerojax.run.config import DataSection
from zerojax.run.data.chat_template import CHATML, ChatTemplate
from zerojax.run.data.tokenizer import ByteTokenizer


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(source: str, longest: int = 99, template: ChatTemplate | None = None, **data: Any) -> Prompts:
    settings = DataSection(source=source, validation=0.25, **data)
    return Prompts.read(settings, ByteTokenizer(), template, longest)


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    rows = [{"prompt": f"{i:02}" + "x" * (i == 7), "answer": str(i), "more": [i]} for i in range(40)]
    return read(write(tmp_path / "rows.jsonl", rows), longest=3)


def test_every_prompt_has_its_row_and_is_in_one_split(prompts: Prompts) -> None:
    assert prompts.left_out == 1
    every = [*prompts.train, *prompts.held_out]
    assert sorted(one.text for one in every) == [f"{i:02}" for i in range(40) if i != 7]
    assert 1 <= len(prompts.held_out) <= 20
    for one in every:
        assert one.tokens.tolist() == [0, *one.text.encode()]
        assert one.row == {"answer": str(int(one.text)), "more": [int(one.text)]}


def test_rollouts_go_through_all_prompts_in_one_order_after_another(prompts: Prompts) -> None:
    total = len(prompts.train)
    found = [one.text for rollout in range(2 * total) for one in prompts.of_rollout(rollout, 3, seed=5)]
    epochs = [found[first : first + total] for first in range(0, 6 * total, total)]
    assert all(sorted(epoch) == sorted(one.text for one in prompts.train) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert [one.text for one in prompts.of_rollout(0, 3, seed=6)] != found[:3]


def test_evaluations_take_held_out_prompts(prompts: Prompts) -> None:
    held_out = [one.text for one in prompts.held_out]
    assert [one.text for one in prompts.of_evaluation(99)] == held_out
    assert len({one.text for one in prompts.of_evaluation(3)}) == 3
    assert prompts.of_evaluation(0) == []


def test_conversations_are_rendered_up_to_the_answer(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"hi {i}"}], "answer": i} for i in range(8)]
    found = read(write(tmp_path / "rows.jsonl", rows), template=ChatTemplate(CHATML))
    for one in (*found.train, *found.held_out):
        text = f"<|im_start|>user\n{one.text}<|im_end|>\n<|im_start|>assistant\n"
        np.testing.assert_array_equal(one.tokens, np.frombuffer(text.encode(), np.uint8))
        assert one.text == f"hi {one.row['answer']}"


def test_columns_of_parquet_go_to_the_reward_as_well(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"prompt": ["a", "b", "c"], "answer": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    found = read(str(tmp_path / "rows.parquet"))
    every = {one.text: one.row for one in (*found.train, *found.held_out)}
    assert every == {"a": {"answer": 1}, "b": {"answer": 2}, "c": {"answer": 3}}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": 3}], r"rows.jsonl:1: column 'prompt' is int, not text"),
        ([{"prompt": "a\ud800"}], "rows.jsonl:1: not valid Unicode: half of a surrogate pair at character 1"),
        ([{"prompt": "a"}, {"text": "a"}], r"rows.jsonl:2: .*'prompt'"),
        (
            [{"prompt": "a", "completion": "b"}],
            "the reward already has an argument 'completion'",
        ),
        ([{"prompt": "a" * 99}], "all 1 prompts have more than 99 tokens"),
    ],
)
def test_what_is_no_prompt_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(write(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "rows.jsonl:1: column 'messages' is str, not a list of messages"),
        (["hi"], "rows.jsonl:1: message 0 is str, not a table with role and content"),
        ([{"role": "user", "content": None}], "rows.jsonl:1: message 0 has null as content"),
        ([{"role": "user", "content": "no"}], "rows.jsonl:1: the chat template: never"),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path: Path, messages: Any, message: str) -> None:
    template = ChatTemplate(
        CHATML + "{% if 'no' == messages[0].content %}{{ raise_exception('never') }}{% endif %}"
    )
    with pytest.raises(ConfigurationError, match=message):
        read(write(tmp_path / "rows.jsonl", [{"messages": messages}]), template=template)


def test_plain_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        ConfigurationError, match=r"a\.txt is plain text: zerojax posttrain reads prompts from"
    ):
        read(str(tmp_path / "a.txt"))


def test_the_default_source_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"name a file, folder or glob in data.source"):
        read("stdlib")
