"""Turns rows of a table into documents: texts, prompts with completions, and conversations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, UInt32

from zerojax.errors import errors_at
from zerojax.run.data.chat_template import ChatTemplate
from zerojax.run.data.formats import (
    DataError,
    Document,
    encode_text,
    kind_of,
    read_documents,
    read_rows,
    text_of,
)
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.validation.untrusted import parse_json, short

TOOLS = "tools"
"""The column with the tools of a conversation."""


class Encoded(NamedTuple):
    """The tokens of a document, including begin and end, and for each whether it counts in the loss."""

    tokens: UInt32[np.ndarray, " n"]
    mask: Bool[np.ndarray, " n"]


@dataclass(frozen=True)
class Texts:
    """Files of plain text, and rows with a text in one column; every token counts."""

    column: str = "text"
    masked: ClassVar[bool] = False

    def read(self, path: Path) -> Iterator[Document]:
        """The texts of a file; see ``Examples``."""
        return read_documents(path, self.column)

    def encode(self, tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Encoded]:
        """The tokens of texts, without begin and end; see ``Examples``."""
        encoded = tokenizer.encode_batch([document.text for document in documents])
        return [Encoded(tokens, np.ones(len(tokens), bool)) for tokens in encoded]


@dataclass(frozen=True)
class Completions:
    """Rows with a prompt and its completion, each in a column.

    They are encoded separately, because at inference a prompt comes without its completion. The tokens are
    the prompt and the completion, between the tokens that begin and end a text. The completion and the end
    count in the loss.
    """

    prompt: str = "prompt"
    completion: str = "completion"
    masked: ClassVar[bool] = True

    def read(self, path: Path) -> Iterator[Document]:
        """The prompts and completions of a table; see ``Examples``."""
        for place, row in read_rows(path, (self.prompt, self.completion)):
            yield self.document(row, place)

    def document(self, row: Mapping[str, Any], place: str) -> Document:
        """The prompt and completion of one row.

        If the completion is empty, nothing counts.
        """
        prompt, completion = (text_of(row, column, place) for column in (self.prompt, self.completion))
        whole = prompt + completion
        targets = ((len(prompt), len(whole)),) if completion else ()
        return Document(place, encode_text(whole, place), targets)

    def encode(self, tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Encoded]:
        """The tokens of prompts and completions; see ``Examples``."""
        halves: list[bytes] = []
        for document in documents:
            text = document.text.decode()
            for cut, _ in document.targets or ():
                halves += text[:cut].encode(), text[cut:].encode()
        encoded = tokenizer.encode_batch(halves)
        begin, end = (
            np.asarray([token], np.uint32) for token in (tokenizer.begin_of_text, tokenizer.end_of_text)
        )
        found = []
        for prompt, completion in zip(encoded[::2], encoded[1::2], strict=True):
            tokens = np.concatenate([begin, prompt, completion, end])
            found.append(Encoded(tokens, np.arange(len(tokens)) > len(prompt)))
        return found


@dataclass(frozen=True)
class Conversations:
    """Rows with a list of messages in one column, which a chat template turns into text.

    The column "tools", if there is one, has the tools that the assistant may call.

    The whole text is encoded at once, as ``apply_chat_template`` does in transformers: the template decides
    which special tokens there are. A token counts in the loss if any of its characters does.
    """

    template: ChatTemplate
    messages: str = "messages"
    masked: ClassVar[bool] = True

    def read(self, path: Path) -> Iterator[Document]:
        """The conversations of a table; see ``Examples``."""
        for place, row in read_rows(path, (self.messages,), optional=(TOOLS,)):
            yield self.document(row, place)

    def document(self, row: Mapping[str, Any], place: str, response: str | None = None) -> Document:
        """The conversation of one row.

        If ``response`` is given, it is added as the assistant's message, and only it counts in the loss.
        """
        messages = checked_messages(row[self.messages], self.messages, place)
        tools = checked_tools(row, place)
        with errors_at(place):
            if response is None:
                text, targets = self.template.render_targets(messages, tools)
            else:
                messages = [*messages, {"role": "assistant", "content": response}]
                text, targets = self.template.render_response(messages, tools)
        return Document(place, encode_text(text, place), targets)

    def encode(self, tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Encoded]:
        """The tokens of conversations; see ``Examples``."""
        found = []
        spans = tokenizer.encode_spans([document.text.decode() for document in documents])
        for document, (tokens, starts, ends) in zip(documents, spans, strict=True):
            firsts, lasts = np.sort(np.array(document.targets or (), int).reshape(-1, 2), axis=0).T
            # More ranges begin before a token's end than end before its start, so it is in one.
            mask = np.searchsorted(firsts, ends) > np.searchsorted(lasts, starts, "right")
            found.append(Encoded(tokens, mask))
        return found


Examples = Texts | Completions | Conversations
"""How the files of a source become documents, by ``read``, and these become tokens, by ``encode``.

If the class is ``masked``, only parts of a document count, and its tokens include begin and end. ``read``
raises a ``DataError`` if the file is damaged or not a table, or if a row is wrong; it names the row.
``encode`` raises one if the tokenizer cannot encode a document.
"""


def text_that_counts(document: Document) -> int:
    """The number of bytes of a document that count in the loss."""
    if document.targets is None:
        return len(document.text)
    text = document.text.decode()
    return sum(len(text[start:end].encode()) for start, end in document.targets)


def checked_messages(messages: Any, column: str, place: str) -> list[dict[str, Any]]:
    """The messages of a conversation, from a column of a row; errors begin with the row's ``place``.

    Each message must have a role and a content. The content is a text or a list of texts, {"type": "text",
    "text": ...}; a message with tool calls needs none.
    """
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else kind_of(messages)
        raise DataError(f"{place}: column {column!r} is {found}, not a list of messages: clean the data")
    for number, message in enumerate(messages):
        here = f"{place}: message {number}"
        if not isinstance(message, dict):
            raise DataError(f"{here} is {kind_of(message)}, not a table with role and content")
        for key in ("role", "content"):
            value = message.get(key)
            if key == "content" and isinstance(value, list):
                _check_parts(value, here)
            elif not (isinstance(value, str) or (key == "content" and value is None and _calls(message))):
                keys = short(list(message))
                what = (
                    f"has no {key!r} among {keys}"
                    if key not in message
                    else f"has {kind_of(message[key])} as {key}"
                )
                raise DataError(f"{here} {what}: role and content are text")
    return messages


def checked_tools(row: Mapping[str, Any], place: str) -> list[dict[str, Any]] | None:
    """The tools of a conversation's row; None if it has none. Errors begin with the row's ``place``.

    The column "tools" has a list of tables, or such a list as JSON text.
    """
    tools = row.get(TOOLS)
    if isinstance(tools, str):
        try:
            tools = parse_json(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(f"{place}: column {TOOLS!r} is text that is not JSON: {error}") from error
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{place}: column {TOOLS!r} is {short(tools)}, not a list of tools: clean the data")
    return [{key: value for key, value in tool.items() if value is not None} for tool in tools]


def _check_parts(parts: list[Any], here: str) -> None:
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise DataError(
                f"{here} has {short(part)} in its content: zerojax reads text only, as "
                '{"type": "text", "text": ...}'
            )


def _calls(message: dict[str, Any]) -> bool:
    calls = message.get("tool_calls")
    return isinstance(calls, list) and len(calls) > 0
