"""A command's options from its command line."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tyro

from zerojax.bounds import check_numbers

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
        ZeroError: a number that no option can have.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    program = f"zerojax {command}"
    if default is None:
        read = tyro.cli(options, args=arguments, prog=program)
    else:
        read = tyro.cli(options, default=default, args=arguments, prog=program)
    check_numbers(read, lambda field: f"--{field.replace('_', '-')}")
    return read
