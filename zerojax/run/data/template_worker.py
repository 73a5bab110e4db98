"""Renders chat templates: ``python template_worker.py SECONDS BYTES``.

A chat template is a program that comes with a model, and Jinja does not limit its computing. This process has
a limit of computing time, SECONDS for each text, and a limit of memory, BYTES. It is started by its path, so
that it does not import JAX.

The standard input has pickled requests: the source of a template, and the variables of each text to render.
The response to a request is a line of JSON, {"texts": [[text, ranges], ...]} or {"error": message}. A text
that is the beginning of the first text is replaced by its length. The ranges are the characters in ``{%
generation %}`` blocks.
"""

import json
import pickle
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_CHARS = 1 << 26  # of a text
_MAX_ERROR_LENGTH = 1000

Ranges = list[tuple[int, int]]


class GenerationBlocks(Extension):
    """The tag {% generation %} ... {% endgeneration %} around text that the assistant writes.

    ``written`` counts the characters so far, ``ranges`` are the places of the blocks.
    """

    tags = {"generation"}  # noqa: RUF012  (Jinja's own is not annotated either)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.written = 0
        self.ranges: Ranges = []

    def parse(self, parser: Any) -> Node:
        """Turn the tag into a call of ``_record``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Any) -> str:
        text = caller()
        self.ranges.append((self.written, self.written + len(text)))
        return text


def raise_exception(message: str) -> str:
    """Refuse a conversation; called by templates."""
    raise jinja2.TemplateError(message)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
)
# Jinja's own filter would escape HTML.
ENVIRONMENT.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
_FUNCTIONS: dict[str, Any] = {
    "raise_exception": raise_exception,
    "strftime_now": lambda format: datetime.now().strftime(format),  # templates pass "format"
}
ENVIRONMENT.globals |= _FUNCTIONS
compiled = lru_cache(maxsize=8)(ENVIRONMENT.from_string)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> tuple[str, Ranges]:
    """A text, and the ranges of its generation blocks. Raises ValueError if it is far too long."""
    blocks: Any = ENVIRONMENT.extensions[GenerationBlocks.identifier]
    pieces, ranges = list[str](), Ranges()
    blocks.written, blocks.ranges = 0, ranges
    for piece in template.generate(variables):
        pieces.append(piece)
        blocks.written += len(piece)
    text = "".join(pieces)
    if len(text) > _MAX_CHARS:
        raise ValueError(f"it writes more than {_MAX_CHARS:,} characters")
    return text, ranges


def respond(source: str, every: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """The texts of each set of variables, in at most ``seconds`` of CPU time each; or an error's message."""
    first, texts = "", list[tuple[str | int, Ranges]]()
    try:
        for variables in every:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            text, ranges = render(compiled(source), variables)
            first = first if texts else text
            texts.append((len(text) if texts and first.startswith(text) else text, ranges))
    except MemoryError:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return {"error": f"it needs more than {limit >> 20} MiB: set data.chat_template to another template"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except jinja2.TemplateError as error:
        return {"error": str(error)[:_MAX_ERROR_LENGTH]}
    except Exception as error:  # whatever Python's own operations raise
        return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"texts": texts}


def main(seconds: str, memory: str) -> None:
    """Respond to requests until the input ends: ``seconds`` of CPU for each text, ``memory`` bytes in all."""
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), resource.getrlimit(resource.RLIMIT_AS)[1]))
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError):
        while True:
            source, every = pickle.load(requests)
            responses.write(json.dumps(respond(source, every, float(seconds))).encode() + b"\n")
            responses.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
