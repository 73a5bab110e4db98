"""Chat templates: Jinja programs that turn a conversation into the text that a model was trained on.

Hugging Face tokenizers carry one, as "chat_template" in tokenizer_config.json or as chat_template.jinja.
Templates are rendered as in ``transformers`` (``apply_chat_template`` with ``tokenize=False``). They run in
Jinja's sandbox, without access to files or to Python's internals, and in a process with limits of time and
memory.
"""

import atexit
import json
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

from zerojax.errors import errors_at, file_errors
from zerojax.run.data import template_worker
from zerojax.run.data.formats import DataError, user_path
from zerojax.run.data.tokenizer import SETTINGS, read_settings
from zerojax.validation.untrusted import printable, short

TEMPLATE = "chat_template.jinja"
"""The template's file beside a tokenizer.json, as in Hugging Face's folders."""

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

_PROBE = "0f2c9a71"  # content that no template writes itself
_MAX_CHARS = 1 << 20  # of a template
_STRETCH = 32  # messages
_TOOLS = re.compile(r"\btools\b")
_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Ranges = tuple[tuple[int, int], ...]


class TemplateProcess:
    """A process that renders texts. It starts on first use, and again after it has ended.

    It ends with this process, or when the time for a text is over.

    Args:
        seconds: computing time that a text may take.
        memory: bytes that the process may use; only Linux enforces this.
    """

    def __init__(self, seconds: float = 10.0, memory: int = 1 << 30) -> None:
        self._seconds = seconds
        self._memory = memory
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def render(self, source: str, every: Sequence[Mapping[str, Any]]) -> list[tuple[str, Ranges]]:
        """Texts by a template, and the ranges of the characters in its generation blocks.

        ``every`` has the variables of each text.
        """
        with self._lock:
            response = self._exchange(pickle.dumps((source, every), pickle.HIGHEST_PROTOCOL))
        if "error" in response:
            raise DataError(printable(response["error"]))
        texts = response["texts"]
        whole = texts[0][0]
        return [
            (whole[:text] if isinstance(text, int) else text, tuple((start, end) for start, end in ranges))
            for text, ranges in texts
        ]

    def close(self) -> int:
        """End the process; returns its exit code, which is negative for a signal."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        process.communicate()
        return process.returncode

    def _exchange(self, request: bytes) -> dict[str, Any]:
        try:
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it has ended
            line = b""
        except BaseException:
            self.close()  # the next request would read this one's response
            raise
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self.close()
        if code == -signal.SIGPROF:
            raise DataError(
                f"rendering one text takes more than {self._seconds:g} s: set data.chat_template to another "
                "template"
            )
        raise DataError(f"the process that renders it has ended (exit code {code})")

    def _start(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-P", template_worker.__file__, str(self._seconds), str(self._memory)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)


_PROCESS = TemplateProcess()


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        source: the Jinja source.
        special_tokens: "bos_token" and "eos_token", if the tokenizer has them.
        name: the name of its file or setting, for messages.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    name: str = "the chat template"

    def render(
        self, messages: Sequence[Message], *, tools: Tools = None, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with "role" and "content", and perhaps other keys that the template knows. The
                content is a text, a list of texts as {"type": "text", "text": ...}, or None in a message with
                tool calls.
            tools: descriptions of the functions that the assistant may call, as JSON schemas.
            add_generation_prompt: end with the text that begins a response.
        """
        ((text, _),) = self._render(messages, tools, [(len(messages), add_generation_prompt)])
        return text

    def render_targets(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, Ranges]:
        """The text of a conversation, and the ranges of its characters that the assistant writes.

        If the template has ``{% generation %}`` blocks, these are the ranges. Otherwise a range is the text
        that an assistant's message adds after the generation prompt. Both include the end of the turn.
        Messages with ``"weight": 0`` are left out (OpenAI's format).
        """
        written = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [number for number in written if messages[number].get("weight") != 0]
        if not self._has_blocks:
            text, ranges = self._in_stretches(messages, tools, turns) or self._turns(messages, tools, turns)
            return text, _written(ranges)
        ((text, blocks),) = self._render(messages, tools, [(len(messages), False)])
        if len(turns) == len(written):
            return text, _written(blocks)
        if len(blocks) != len(written):
            raise DataError(
                f"{self.name} marks {len(blocks)} texts in {len(written)} messages of the assistant, so "
                "those with weight 0 are not known: remove them"
            )
        return text, _written(one for n, one in zip(written, blocks, strict=True) if n in turns)

    def _turns(
        self, messages: Sequence[Message], tools: Tools, turns: Iterable[int]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the ranges of the messages ``turns`` in it."""
        cuts = [cut for n in turns for cut in ((n, True), (n + 1, False))]
        (text, _), *others = self._render(messages, tools, [(len(messages), False), *cuts])
        ranges: list[tuple[int, int]] = []
        for number, (before, _), (after, _) in zip(turns, others[::2], others[1::2], strict=True):
            if not (after.startswith(before) and text.startswith(after)):
                raise self._break(messages, tools, number)
            ranges.append((len(before), len(after)))
        return text, ranges

    def _in_stretches(
        self, messages: Sequence[Message], tools: Tools, turns: Sequence[int]
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """Like ``_turns``, in a time that is linear in the number of messages.

        Each stretch is rendered after the first messages alone. None if the conversation is short, or if the
        texts of the stretches do not make up its text.
        """
        first, *starts = _starts(messages)
        if not starts:
            return None
        try:
            whole = self.render(messages, tools=tools)
            begin = self.render(messages[:first], tools=tools)
            ranges, end = list[tuple[int, int]](), len(begin)
            for start, stop in pairwise([first, *starts, len(messages)]):
                own = [n - start + first for n in turns if n < stop and (n >= start or start == first)]
                text, found = self._turns([*messages[:first], *messages[start:stop]], tools, own)
                added = text[len(begin) :]
                if not (text.startswith(begin) and whole.startswith(added, end)):
                    return None
                ranges += [(at + end - len(begin), to + end - len(begin)) for at, to in found]
                end += len(added)
        except DataError:
            return None
        return (whole, ranges) if end == len(whole) else None

    def render_response(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, Ranges]:
        """The text of a conversation, and the ranges in its last message that the assistant writes.

        The ranges are as for ``render_targets``, and begin after the generation prompt. Earlier responses may
        be written differently than they were at the end of a conversation.
        """
        last = len(messages) - 1
        # The generation prompt may end with more than the text before a response, such as "<think>". Blocks
        # still say where the response begins.
        prompts = (True, False) if self._has_blocks else (True,)
        cuts = [(last + 1, False), *((last, prompt) for prompt in prompts)]
        (text, blocks), *befores = self._render(messages, tools, cuts)
        for before, _ in befores:
            if text.startswith(before):
                ranges = blocks if self._has_blocks else ((0, len(text)),)
                return text, _written((max(start, len(before)), end) for start, end in ranges)
        raise self._break(messages, tools, last)

    @cached_property
    def _has_blocks(self) -> bool:
        """Whether ``{% generation %}`` blocks mark the assistant's text."""
        return _BLOCK.search(self.source) is not None

    def _break(self, messages: Sequence[Message], tools: Tools, number: int) -> DataError:
        """The error that an assistant's message does not continue the text of the messages before it."""
        cuts = (number, False), (number, True), (number + 1, False)
        (before, _), (prompt, _), (after, _) = self._render(messages, tools, cuts)
        way_out = "write them alike"
        if not self._has_blocks:
            way_out = "mark what the assistant writes by {% generation %} ... {% endgeneration %}"
        way_out += " in a copy of the template, and give its path as data.chat_template"
        if after.startswith(before) and not after.startswith(prompt):
            return DataError(
                f"{self.name} ends a prompt with {short(prompt[len(before) :])}, but writes a response as "
                f"{short(after[len(before) :])}, which does not begin like that: {way_out}"
            )
        return DataError(
            f"{self.name} writes the messages up to {number} differently when others follow: {way_out}"
        )

    @cached_property
    def turn_end(self) -> str:
        """The text that the template writes after the content of an assistant's message.

        Raises:
            DataError: there is none, or it would not count in the loss, so that a model would not learn to
                stop.
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
        """``turn_end`` without surrounding blanks, unless it is all blanks: a model writes just this."""
        return self.turn_end.strip() or self.turn_end

    def after_response(self, messages: Sequence[Message]) -> str:
        """The text between an assistant's message and the next response, with ``messages`` in between.

        Raises:
            DataError: the template leaves out the earlier response.
        """
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        _, found, after = self.render([*probe, *messages], add_generation_prompt=True).partition(_PROBE)
        if not found:
            raise DataError(
                f"{self.name} leaves out a response that messages follow: set data.chat_template to "
                "another one"
            )
        return after

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads contents that are lists of texts."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            text, _ = self._run(
                [{"role": role, "content": parts} for role in ("user", "assistant")], None, [(2, False)]
            )[0]
        except DataError:
            return False
        return text.count(_PROBE) == 2 and not re.search("['\"]type['\"]", text)

    def _render(
        self, messages: Sequence[Message], tools: Tools, cuts: Iterable[tuple[int, bool]]
    ) -> list[tuple[str, Ranges]]:
        """The texts of a conversation's first messages, and the ranges of their blocks.

        Each of ``cuts`` is the number of messages in a text, and whether the text ends with the generation
        prompt.
        """
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
        return self._run(plain, tools, cuts)

    def _run(
        self, messages: Sequence[Message], tools: Tools, cuts: Iterable[tuple[int, bool]]
    ) -> list[tuple[str, Ranges]]:
        common = {"tools": tools, "documents": None, **self.special_tokens}
        every = [
            common | {"messages": messages[:count], "add_generation_prompt": prompt} for count, prompt in cuts
        ]
        with errors_at(self.name):
            return _PROCESS.render(self.source, every)


def _starts(messages: Sequence[Message]) -> list[int]:
    """The numbers of messages that begin a stretch: the one after the first response, and later ones like it.

    Each follows a response, and has the same role.
    """
    starts = list[int]()
    for number, (before, message) in enumerate(pairwise(messages), 1):
        if before["role"] == "assistant" and (
            not starts or (number - starts[-1] >= _STRETCH and message["role"] == messages[starts[0]]["role"])
        ):
            starts.append(number)
    return starts or [len(messages)]


def _written(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found = tuple((start, end) for start, end in ranges if start < end)
    if not found:
        raise DataError("no message of the assistant counts, so there is nothing to learn: remove the row")
    return found


def text_of_content(content: Any) -> str:
    """The text of a message's content, which may be a list of texts or None."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def find_template(folder: Path) -> ChatTemplate | None:
    """The chat template in a tokenizer's folder, without special tokens; None if there is none.

    Raises:
        DataError: it cannot be read, or is no text.
    """
    path, settings = folder / TEMPLATE, folder / SETTINGS
    if path.is_file():
        return _read(path)
    found = read_settings(settings).get("chat_template")
    if isinstance(found, list):  # several templates with names
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise DataError(f"{settings}: chat_template = {short(found)} should be a string")
    return None if found is None else ChatTemplate(found, name=f"the chat template in {settings}")


def load_template(setting: str, tokenizer: str) -> ChatTemplate:
    """The chat template that the settings choose, without special tokens.

    ``setting`` is data.chat_template: "tokenizer", the name of a built-in one, or the path of a Jinja file.
    ``tokenizer`` is data.tokenizer.
    """
    if setting in BUILT_IN:
        return ChatTemplate(BUILT_IN[setting], name=f'data.chat_template "{setting}"')
    if setting != "tokenizer":
        path = user_path(setting)
        if not path.is_file():
            known = ", ".join(map(repr, BUILT_IN))
            raise DataError(
                f"data.chat_template {setting!r} must be 'tokenizer', {known} or an existing file"
            )
        return _read(path)
    found = None if tokenizer in ("byte", "bpe") else find_template(user_path(tokenizer).parent)
    if found is None:
        raise DataError(
            f"data.tokenizer {tokenizer!r} has no chat template: set data.chat_template to "
            f"{' or '.join(map(repr, BUILT_IN))}, or to the path of a Jinja file"
        )
    return found


def _read(path: Path) -> ChatTemplate:
    with file_errors(path, DataError, content="not valid UTF-8"), path.open(encoding="utf-8") as file:
        source = file.read(_MAX_CHARS + 1)
    if len(source) > _MAX_CHARS:
        raise DataError(
            f"{path}: more than {_MAX_CHARS:,} characters, more than any chat template has: name another file"
        )
    return ChatTemplate(source, name=f"the chat template in {path}")
