"""Parsing of a command's options."""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from zerojax.errors import ConfigurationError
from zerojax.validation.bounds import all_at_once, check_numbers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RunPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
"""The folder of a run, as the first word of a command line."""

_REGISTRY = ConstructorRegistry()
_BOOLEANS = {"true": True, "false": False}


@_REGISTRY.primitive_rule
def _boolean(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool] | None:
    """A boolean that may be missing, spelled as in TOML; tyro alone takes "True" and "False" only."""
    if info.type is not bool:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{true,false}",
        instance_from_str=lambda words: _read_boolean(words[0]),
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
    )


def _read_boolean(word: str) -> bool:
    if word.lower() not in _BOOLEANS:
        raise ValueError(f"{word!r} is neither true nor false")
    return _BOOLEANS[word.lower()]


def read_options[Options: "DataclassInstance"](
    options: type[Options], command: str, arguments: Sequence[str], default: Options | None = None
) -> Options:
    """Read a command line.

    Args:
        options: the class of the command's options, documented for --help.
        command: name of the command.
        arguments: of the command line.
        default: values that the command line overrides; by default those of the class.

    Raises:
        ConfigurationError: an invalid value of a setting.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    program, errors = f"zerojax {command}", io.StringIO()
    try:
        with redirect_stderr(errors), all_at_once():
            if default is None:
                read = tyro.cli(options, args=arguments, prog=program, registry=_REGISTRY)
            else:
                read = tyro.cli(options, default=default, args=arguments, prog=program, registry=_REGISTRY)
    except SystemExit as end:
        if (refusal := _cause(end)) is not None:
            raise refusal from None
        sys.stderr.write(errors.getvalue())
        raise
    check_numbers(read, lambda field: f"--{field.replace('_', '-')}")
    return read


def _cause(end: BaseException) -> ConfigurationError | None:
    """The error of one of our sections that made tyro exit: tyro prints such an error in a box."""
    cause: BaseException | None = end
    while cause is not None and not isinstance(cause, ConfigurationError):
        cause = cause.__context__
    return cause
