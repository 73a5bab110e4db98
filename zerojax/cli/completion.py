"""``zerojax completion SHELL``: prints a script that completes the command line in bash or zsh."""

import importlib
from collections.abc import Iterator
from typing import Any

from zerojax.cli import COMMANDS
from zerojax.cli.booleans import is_boolean, negated, options_of
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


def _options(kind: type[Any]) -> Iterator[str]:
    """The options of a command, with the negations of its booleans."""
    for name, of in options_of(kind):
        yield name
        if is_boolean(of):
            yield negated(name)
