"""Prompts from tables, in an order that only depends on the seed and the rollout's number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from zerojax.errors import errors_at
from zerojax.run.config import DataSection
from zerojax.run.data.chat_template import ChatTemplate, text_of_content
from zerojax.run.data.examples import TOOLS, checked_messages, checked_tools
from zerojax.run.data.formats import DataError, encode_text, is_table, read_rows, text_of
from zerojax.run.data.source import TextSource
from zerojax.run.data.split import evenly_spread, hold_out
from zerojax.run.data.tokenizer import Tokenizer


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        tokens: the prompt after the token that begins a text, or rendered by the chat template.
        text: the prompt, or a conversation's last message, for the reward.
        row: the other columns of its row, for the reward.
    """

    tokens: Int32[np.ndarray, " prompt"]
    text: str
    row: dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """The prompts of rollouts and of evaluations.

    ``left_out`` is the number of prompts that were too long.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    left_out: int

    @classmethod
    def read(
        cls, data: DataSection, tokenizer: Tokenizer, template: ChatTemplate | None, longest: int
    ) -> "Prompts":
        """Read ``data.source``, and hold out the fraction ``data.validation`` of the prompts by their text.

        Args:
            data: the run's settings of its data.
            tokenizer: of the model.
            template: for conversations; None if each row has a prompt.
            longest: the most tokens of a prompt. Longer prompts are skipped.
        """
        every = [
            one for path in files_of(data, "prompts") for one in _read_table(path, data, tokenizer, template)
        ]
        fitting = [one for one in every if len(one.tokens) <= longest]
        if not fitting:
            raise DataError(
                f"data.source {data.source!r}: all {len(every):,} prompts have more than {longest} tokens. "
                "To leave them more room, raise train.sequence_length or lower posttrain.max_new_tokens"
            )
        train, held_out = hold_out(fitting, lambda one: one.tokens.tobytes(), data.validation)
        return cls(train, held_out, len(every) - len(fitting))

    def of_rollout(self, rollout: int, count: int, seed: int) -> list[Prompt]:
        """The ``count`` prompts of rollout 0, 1, ...: these go through all prompts in new random orders."""
        total, orders = len(self.train), {}
        found = []
        for place in range(rollout * count, (rollout + 1) * count):
            epoch, index = divmod(place, total)
            if epoch not in orders:
                orders[epoch] = np.random.default_rng((seed, epoch)).permutation(total)
            found.append(self.train[orders[epoch][index]])
        return found

    def of_evaluation(self, count: int) -> list[Prompt]:
        """At most ``count`` held-out prompts, spread evenly over all of them."""
        return [self.held_out[i] for i in evenly_spread(count, len(self.held_out))]


def files_of(data: DataSection, what: str) -> Sequence[Path]:
    """The files of ``data.source``; messages call their contents ``what``, such as "prompts".

    Raises:
        DataError: there are several sources, or none was chosen, or a file is plain text.
    """
    if data.mixture or data.source == DataSection.source:
        raise DataError(
            f"zerojax posttrain reads {what} from one source: name a file, folder or glob in data.source"
        )
    files = TextSource(data.source, data.pattern).files
    if texts := [path for path in files if not is_table(path)]:
        raise DataError(
            f"{texts[0]} is plain text: zerojax posttrain reads {what} from JSON lines, Parquet or Arrow"
        )
    return files


def _read_table(
    path: Path, data: DataSection, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[Prompt]:
    column = data.prompt_column if template is None else data.messages_column
    for place, row in read_rows(path, (column,), optional=(TOOLS,) if template else (), others=True):
        rest = {key: value for key, value in row.items() if key != column}
        if taken := {"prompt", "completion"} & rest.keys():
            raise DataError(f"{place}: the reward already has an argument {min(taken)!r}: rename this column")
        yield Prompt(*_encode(row, place, column, tokenizer, template), rest)


def _encode(
    row: dict[str, Any], place: str, column: str, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[np.ndarray, str]:
    """The tokens and the text of a prompt or of a conversation's messages."""
    if template is None:
        given = text_of(row, column, place)
        tokens = tokenizer.encode(encode_text(given, place))
        return np.asarray([tokenizer.begin_of_text, *tokens], np.int32), given
    messages = checked_messages(row[column], column, place)
    tools = checked_tools(row, place)
    with errors_at(place):
        text = template.render(messages, tools=tools, add_generation_prompt=True)
    return tokenizer.encode(encode_text(text, place)).astype(np.int32), text_of_content(
        messages[-1].get("content")
    )
