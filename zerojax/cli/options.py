"""A command's options from its command line."""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import TYPE_CHECKING

import tyro

from zerojax.errors import ZeroError
from zerojax.validation.bounds import check_numbers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def read_options[Options: "DataclassInstance"](
    options: type[Options], command: str, arguments: Sequence[str], default: Options | None = None
) -> Options:
    """Read a command line.

    Args:
        options: the class of the command's options, documented for --help.
        command: its name.
        arguments: of the command line.
        default: the options before the command line has its say; by default those of the class.

    Raises:
        ZeroError: a value that a setting cannot have.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    program, said = f"zerojax {command}", io.StringIO()
    try:
        with redirect_stderr(said):
            if default is None:
                read = tyro.cli(options, args=arguments, prog=program)
            else:
                read = tyro.cli(options, default=default, args=arguments, prog=program)
    except SystemExit as end:
        if (refusal := _refusal_behind(end)) is not None:
            raise refusal from None
        sys.stderr.write(said.getvalue())
        raise
    check_numbers(read, lambda field: f"--{field.replace('_', '-')}")
    return read


def _refusal_behind(end: BaseException) -> ZeroError | None:
    """Of our own sections: tyro draws a box around such an error, and ends the program."""
    cause: BaseException | None = end
    while cause is not None and not isinstance(cause, ZeroError):
        cause = cause.__context__
    return cause
