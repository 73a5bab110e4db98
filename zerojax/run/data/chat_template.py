"""Chat templates: Jinja programs that turn a conversation into the text that a model was trained on.

Hugging Face tokenizers carry one, as "chat_template" in tokenizer_config.json or as chat_template.jinja.
Templates are rendered as ``transformers`` does (``apply_chat_template`` with ``tokenize=False``): in Jinja's
sandbox, without access to files or to Python's internals.
"""

import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zerojax.errors import file_errors
from zerojax.run.data.formats import DataError, user_path
from zerojax.run.data.tokenizer import SETTINGS, read_settings
from zerojax.validation.untrusted import printable, short

TEMPLATE = "chat_template.jinja"
"""Beside a tokenizer.json, as in Hugging Face's folders."""

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
BUILT_IN = {"chatml": CHATML}
"""Name -> template, for tokenizers that have none."""

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Ranges = tuple[tuple[int, int], ...]

_REFUSALS = jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError
_PROBE = "0f2c9a71"  # content that no template writes itself
_TOOLS = re.compile(r"\btools\b")
_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        source: Jinja.
        special_tokens: "bos_token" and "eos_token", as far as the tokenizer has them.
        name: of its file or setting, for messages.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    name: str = "the chat template"

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        # Jinja's own filter would escape HTML.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda format: datetime.now().strftime(format),
        }
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{self.name}: line {error.lineno}: {printable(str(error))}") from error

    def render(
        self, messages: Sequence[Message], *, tools: Tools = None, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with "role" and "content", and perhaps other keys that the template knows. The
                content is a text, a list of texts as {"type": "text", "text": ...}, or, beside tool calls,
                None.
            tools: descriptions of what the assistant may call, as JSON schemas.
            add_generation_prompt: end with what begins an answer.

        Raises:
            DataError: the template is not valid, or refuses the conversation, or does not write its tools.
        """
        return self._render(messages, tools, add_generation_prompt)[0]

    def render_targets(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, Ranges]:
        """The text of a conversation, and the ranges of its characters that an assistant is to write.

        These are what the template puts into ``{% generation %}`` blocks; in a template without them, what
        an assistant's message adds to the text of the messages before it and the generation prompt. That
        includes what ends the turn.

        Raises:
            DataError: as for ``render``; there is nothing to learn; or the template has no blocks and does
                not continue where the text of fewer messages ends.
        """
        text, ranges = self._render(messages, tools, False)
        if not self._has_blocks:
            turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            ranges = tuple(self._turn(messages, tools, number, text) for number in turns)
        return text, _written(ranges)

    def render_answer(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, Ranges]:
        """The text of a conversation, and the ranges of its last message that an assistant is to write.

        They are as for ``render_targets``, and begin after the generation prompt. The template may write
        earlier answers differently when others follow.

        Raises:
            DataError: as for ``render``; there is nothing to learn; or the template does not continue where
                the text of the messages before the last ends.
        """
        text, blocks = self._render(messages, tools, False)
        # A prompt may end with more than is written before an answer, such as "<think>"; blocks say where it
        # begins all the same.
        for prompt in (True, False) if self._has_blocks else (True,):
            before, _ = self._render(messages[:-1], tools, prompt)
            if text.startswith(before):
                ranges = blocks if self._has_blocks else ((0, len(text)),)
                return text, _written((max(start, len(before)), end) for start, end in ranges)
        raise self._rewrites(len(messages) - 1)

    def _turn(self, messages: Sequence[Message], tools: Tools, number: int, text: str) -> tuple[int, int]:
        """The range of an assistant's message in the text of the whole conversation."""
        before, _ = self._render(messages[:number], tools, True)
        after, _ = self._render(messages[: number + 1], tools, False)
        if not (after.startswith(before) and text.startswith(after)):
            raise self._rewrites(number)
        return len(before), len(after)

    @property
    def _has_blocks(self) -> bool:
        """Whether ``{% generation %}`` blocks mark what an assistant writes."""
        return _BLOCK.search(self.source) is not None

    def _rewrites(self, number: int) -> DataError:
        way_out = "write them alike"
        if not self._has_blocks:
            way_out = "mark what the assistant writes by {% generation %} ... {% endgeneration %}"
        return DataError(
            f"{self.name} writes the messages up to {number} differently when others follow: {way_out} in a "
            "copy of the template, and give its path as data.chat_template"
        )

    @cached_property
    def turn_end(self) -> str:
        """What the template writes after the content of an assistant's message.

        Raises:
            DataError: it writes nothing, so that a model could not learn to stop, or does not train on it.
        """
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        text, ranges = self.render_targets(probe)
        at = text.rfind(_PROBE) + len(_PROBE)
        ending = text[at:]
        if _PROBE not in text or not ending:
            raise DataError(
                f"{self.name} writes nothing after an assistant's message, so a model cannot learn to stop: "
                'add what ends a turn, or set data.chat_template to "chatml"'
            )
        written = len(ending.rstrip()) or len(ending)
        if not any(start <= text.rfind(_PROBE) and at + written <= end for start, end in ranges):
            raise DataError(
                f"{self.name} leaves {short(ending)}, which ends an assistant's message, outside of its "
                "{% generation %} block, so a model would not learn to stop"
            )
        return ending

    @property
    def closing(self) -> str:
        """``turn_end`` without the blanks around it, if it is more than blanks: what a model ends with.

        Raises:
            DataError: as ``turn_end``.
        """
        return self.turn_end.strip() or self.turn_end

    def after_answer(self, messages: Sequence[Message]) -> str:
        """What the template writes after the content of an assistant's message, up to the next answer.

        ``messages`` are those between the two.

        Raises:
            DataError: as for ``render``; or the template leaves out earlier answers.
        """
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        _, found, after = self.render([*probe, *messages], add_generation_prompt=True).partition(_PROBE)
        if not found:
            raise DataError(f"{self.name} leaves out an answer that others follow")
        return after

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads contents that are lists of texts."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            text, _ = self._run([{"role": role, "content": parts} for role in ("user", "assistant")])
        except DataError:
            return False
        return text.count(_PROBE) == 2 and not re.search("['\"]type['\"]", text)

    def _render(self, messages: Sequence[Message], tools: Tools, prompt: bool) -> tuple[str, Ranges]:
        if tools and not _TOOLS.search(self.source):
            raise DataError(
                f"{self.name} does not write the tools that come with the conversation: set "
                "data.chat_template to one that does, or drop their column"
            )
        plain: list[Message] = []
        for number, message in enumerate(messages):
            # A column of Parquet has null for the keys that a message lacks.
            own = {key: value for key, value in message.items() if value is not None or key == "content"}
            content = own.get("content")
            if content is None and "tool_calls" not in self.source:
                raise DataError(
                    f"message {number} has tool calls in place of a content, and {self.name} writes none: "
                    "set data.chat_template to one that does"
                )
            if isinstance(content, list) and not self._reads_parts:
                own["content"] = text_of_content(content)
            plain.append(own)
        return self._run(plain, tools, prompt)

    def _run(
        self, messages: Sequence[Message], tools: Tools = None, prompt: bool = False
    ) -> tuple[str, Ranges]:
        template = self._compiled
        blocks: list[str] = []
        ranges: list[tuple[int, int]] = []
        try:
            with _GenerationBlocks.recorded(template.environment, blocks, ranges):
                for block in template.generate(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=prompt,
                    **self.special_tokens,
                ):
                    blocks.append(block)
        except _REFUSALS as error:
            raise DataError(f"{self.name}: {printable(str(error))}") from error
        return "".join(blocks), tuple(ranges)


def _written(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found = tuple((start, end) for start, end in ranges if start < end)
    if not found:
        raise DataError("no message of the assistant, so there is nothing to learn")
    return found


def text_of_content(content: Any) -> str:
    """The text of a message's content, as ``ChatTemplate.render`` takes it."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def find_template(folder: Path) -> str | None:
    """The chat template of a tokenizer's folder, or None if it has none.

    Raises:
        DataError: a file of the folder cannot be read.
    """
    path = folder / TEMPLATE
    if path.is_file():
        return _read(path)
    found = read_settings(folder / SETTINGS).get("chat_template")
    if isinstance(found, list):  # of named ones
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise DataError(f"{folder / SETTINGS}: chat_template = {short(found)} should be a string")
    return found


def load_template(setting: str, tokenizer: str) -> tuple[str, str]:
    """The chat template of the settings.

    ``setting`` is data.chat_template: "tokenizer", the name of a built-in one, or the path of a Jinja file;
    ``tokenizer`` is data.tokenizer.

    Returns:
        The template, and its name for messages.

    Raises:
        DataError: there is none; says which to choose.
    """
    if setting in BUILT_IN:
        return BUILT_IN[setting], f'data.chat_template "{setting}"'
    if setting != "tokenizer":
        path = user_path(setting)
        if not path.is_file():
            known = ", ".join(map(repr, BUILT_IN))
            raise DataError(f"data.chat_template {setting!r}: 'tokenizer', {known} or an existing file")
        return _read(path), str(path)
    folder = user_path(tokenizer).parent
    found = None if tokenizer in ("byte", "bpe") else find_template(folder)
    if found is None:
        raise DataError(
            f"data.tokenizer {tokenizer!r} has no chat template: set data.chat_template to "
            f"{' or '.join(map(repr, BUILT_IN))}, or to the path of a Jinja file"
        )
    return found, f"the chat template in {folder}"


def _read(path: Path) -> str:
    with file_errors(path, DataError, content="not valid UTF-8"):
        return path.read_text(encoding="utf-8")


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


class _GenerationBlocks(Extension):
    """The tag {% generation %} ... {% endgeneration %}, whose text an assistant writes."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own is not annotated either)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._blocks: list[str] = []
        self._ranges: list[tuple[int, int]] = []

    def parse(self, parser: Any) -> Node:
        """Turn the tag into a call of ``_record``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Any) -> str:
        text = caller()
        start = sum(map(len, self._blocks))
        self._ranges.append((start, start + len(text)))
        return text

    @classmethod
    @contextmanager
    def recorded(
        cls, environment: jinja2.Environment, blocks: list[str], ranges: list[tuple[int, int]]
    ) -> Generator[None]:
        """Record the ranges of blocks while ``blocks`` collects the text before them."""
        one: Any = environment.extensions[cls.identifier]
        one._blocks, one._ranges = blocks, ranges
        try:
            yield
        finally:
            one._blocks, one._ranges = [], []
