"""``zerojax completion SHELL``: prints a script that completes the command line in bash or zsh."""

import dataclasses
import importlib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tyro.conf import FlagCreatePairsOff, Positional

from zerojax.cli import COMMANDS
from zerojax.errors import ConfigurationError
from zerojax.run.config import known_configs

_ZSH = "autoload -U +X bashcompinit && bashcompinit"

_SCRIPT = """\
_zerojax() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
        [[ $word == -* ]] || words=
        [ "$COMP_CWORD" -ne 2 ] || words="$words {configs}"
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _zerojax zerojax
"""


def run(arguments: list[str]) -> None:
    """Print the completion script of a shell."""
    if arguments not in (["bash"], ["zsh"]):
        raise ConfigurationError("completion: name the shell: zerojax completion bash, or zsh")
    cases = [
        f'            {name}) words="{" ".join(_options(kind))}" ;;'
        for name, (module, _) in COMMANDS.items()
        if (kind := getattr(importlib.import_module(module), "Options", None)) is not None
    ]
    if arguments == ["zsh"]:
        print(_ZSH)
    print(
        _SCRIPT.format(
            commands=" ".join(COMMANDS), cases="\n".join(cases), configs=" ".join(known_configs())
        ),
        end="",
    )


def _options(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """The options of a command, with the names that tyro gives to its dataclass's fields."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        own, *marks = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        made = next(
            (mark.constructor_factory for mark in marks if hasattr(mark, "constructor_factory")), None
        )
        own = own if made is None else made()
        if dataclasses.is_dataclass(own) or typing.is_typeddict(own):
            nested = any(getattr(mark, "name", None) == "" for mark in marks)
            yield from _options(typing.cast(type[Any], own), prefix if nested else f"{prefix}{name}.")
        elif not any(mark in typing.get_args(Positional[Path])[1:] for mark in marks):
            option = name.replace("_", "-")
            yield f"--{prefix}{option}".replace("_", "-")
            if own is bool and FlagCreatePairsOff not in marks:
                yield f"--{prefix}no-{option}".replace("_", "-")
