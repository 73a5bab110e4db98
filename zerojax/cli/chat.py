"""``zerojax chat RUN``: talk to a trained run in the terminal."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from zerojax.cli.options import read_options
from zerojax.cli.sample import SamplingOptions
from zerojax.errors import ConfigurationError
from zerojax.generation import stream
from zerojax.run.config import RunConfig
from zerojax.run.data.chat_template import ChatTemplate
from zerojax.run.data.dataset import open_template, open_tokenizer
from zerojax.run.data.responses import ResponseEnd
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.run.run_dir import RunFolder

_UNFINISHED = "\ufffd"  # a character whose last bytes have not arrived yet


@dataclass(frozen=True)
class Options(SamplingOptions):
    """Talk to a run's latest checkpoint, on one device: each line of the input is a message.

    A run trained on conversations sees the whole conversation; if it is too long for the context, the oldest
    messages are dropped. A run trained on prompts and completions sees each line by itself.

    Attributes:
        system: System message at the beginning of the conversation.
    """

    system: str | None = None


def run(arguments: list[str]) -> None:
    """Restore the newest checkpoint, and respond to each line of the input."""
    options = read_options(Options, "chat", arguments)
    how, folder = options.sampling, RunFolder(options.run)
    dialogue = _open_dialogue(folder.read_config(), folder, options)
    model = options.open_model(folder)
    keys = jax.random.key(options.seed)
    for turn, line in enumerate(_lines()):
        prompt = dialogue.ask(line)
        key = jax.random.fold_in(keys, turn)
        new = stream(model, prompt, options.tokens, key=key, how=how, stop=dialogue.end.token)
        response = ""
        for piece in dialogue.read(new):
            response += piece
            print(piece, end="", flush=True)
        print(flush=True)
        dialogue.add_response(response)


def _lines() -> Iterator[str]:
    """The user's messages, with a prompt before each if they are typed."""
    typed = sys.stdin.isatty()
    while True:
        if typed:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            if typed:
                print()
            return
        if line.strip():
            yield line.rstrip("\r\n")


class Dialogue:
    """The conversation so far, from which the next prompt is made.

    Without a template, each line is a prompt by itself. The oldest messages are dropped to keep a prompt to
    ``longest`` tokens. ``end`` is the end of a response.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        system: str | None = None,
        longest: int,
    ) -> None:
        self.end = ResponseEnd.of(tokenizer, template)
        self._tokenizer = tokenizer
        self._template = template
        self._longest = longest
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = []

    def ask(self, line: str) -> np.ndarray:
        """Add a message of the user.

        Returns the prompt's tokens, int32; the oldest turns are dropped if needed.
        """
        if self._template is None:
            prompt = self._tokenizer.encode(line.encode(errors="replace"))
            return np.asarray([self._tokenizer.begin_of_text, *prompt], np.int32)
        self._messages.append({"role": "user", "content": line})
        while True:
            text = self._template.render([*self._first, *self._messages], add_generation_prompt=True)
            prompt = self._tokenizer.encode(text.encode(errors="replace")).astype(np.int32)
            if len(prompt) <= self._longest or len(self._messages) == 1:
                return prompt
            del self._messages[:2]  # a question and its response

    def add_response(self, response: str) -> None:
        """Add the response to the conversation."""
        self._messages.append({"role": "assistant", "content": response})

    def read(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yields a response's text in pieces as its tokens arrive, without blanks at the start."""
        ids: list[int] = []
        shown = 0
        text, ended = "", False
        for token in tokens:
            ids.append(token)
            text, ended = self.end.read(self._tokenizer, ids)
            text = text.lstrip()
            if ended:
                break
            certain = text.rstrip(_UNFINISHED)
            if self.end.text:  # the text so far may end with the beginning of that text
                certain = certain[: max(shown, len(certain) - len(self.end.text) + 1)]
            yield certain[shown:]
            shown = max(shown, len(certain))
        yield text[shown:]


def _open_dialogue(config: RunConfig, folder: RunFolder, options: Options) -> Dialogue:
    """A conversation in the form that the run was trained on."""
    kinds = {one.kind for one in config.data.sources}
    tokenizer = open_tokenizer(config.data, folder.data)
    context = config.model.max_seq_len  # a response may be longer than the rest: generation then moves on
    longest = max(context // 2, context - options.tokens)
    if "chat" in kinds:
        template = open_template(config.data, folder.data)
    elif "completion" in kinds:
        if options.system is not None:
            raise ConfigurationError(
                f"--system is for conversations, and {folder.path} completes single prompts (data.kind): "
                "leave it out"
            )
        template = None
    else:
        try:
            template = open_template(config.data, folder.data)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{folder.path} was trained on plain text, and its tokenizer has no chat template: use "
                "zerojax sample, or train on conversations (data.kind)"
            ) from error
    return Dialogue(tokenizer, template, system=options.system, longest=longest)
