"""The options of a command that are true or false: ``--x``, ``--x true``, ``--no-x`` and ``--x false``.

tyro reads an option that may also be unset by its value alone, and all others as a flag without a value.
"""

import dataclasses
import typing
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from tyro.conf import FlagCreatePairsOff, Positional

_WORDS = ("true", "false", "none")
_POSITIONAL = typing.get_args(Positional[Path])[1]


def options_of(options: type[Any], prefix: str = "--") -> Iterator[tuple[str, Any]]:
    """The names that tyro gives to the fields of a command's options, and their types."""
    for field, hint in typing.get_type_hints(options, include_extras=True).items():
        kind, *marks = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        made = [mark.constructor_factory for mark in marks if hasattr(mark, "constructor_factory")]
        kind = next((make() for make in made if make is not None), kind)
        name = f"{prefix}{field}".replace("_", "-")
        if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
            nested = any(getattr(mark, "name", None) == "" for mark in marks)
            yield from options_of(cast(type[Any], kind), prefix if nested else f"{name}.")
        elif _POSITIONAL not in marks:
            yield name, None if FlagCreatePairsOff in marks else kind


def is_boolean(kind: Any) -> bool:
    """Whether an option is true or false, and perhaps unset."""
    return kind in (bool, bool | None)


def negated(name: str) -> str:
    """The option that sets a boolean to false, such as --mesh.no-emulate for --mesh.emulate."""
    start = max(name.rfind("."), 1) + 1
    return f"{name[:start]}no-{name[start:]}"


def spell_booleans(options: type[Any], arguments: Sequence[str]) -> Iterator[str]:
    """Spell the booleans of a command line as tyro reads them."""
    flags = {name: kind is bool for name, kind in options_of(options) if is_boolean(kind)}
    negations = {negated(name): name for name in flags}
    words = deque(arguments)
    # After a config, a word behind an option that may be unset is its value, which tyro checks.
    after_config = bool(arguments) and not arguments[0].startswith("-")
    takes_word = {name for name, flag in flags.items() if after_config and not flag}
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in negations and not equals:
            name, value = negations[name], "false"
        elif name in flags and not equals:
            is_value = name in takes_word and words and not words[0].startswith("-")
            value = words.popleft() if is_value or (words and words[0].lower() in _WORDS) else "true"
        if flags.get(name) and value.lower() in ("true", "false"):
            yield name if value.lower() == "true" else negated(name)
        else:
            yield f"{name}={value}" if name in flags else word
