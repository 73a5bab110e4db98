"""Bounds on numbers in settings and options."""

import dataclasses
import operator
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from zerojax.errors import ConfigurationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_INTEGER = 2**32 - 1
"""The largest whole number of any setting: the largest seed."""
MAX_FLOAT = (2 - 2.0**-23) * 2.0**127
"""The largest number of fp32, in which steps are computed."""
MAX_DEVICES = 1 << 20
"""The most devices of a mesh: ten times the largest existing cluster."""
MIN_TEMPERATURE = 1e-6
"""Logits that are divided by less may overflow."""
MAX_EMULATED = 4096
"""CPU devices emulated by one process; with four times as many, XLA takes minutes to start."""


def check_numbers(settings: "DataclassInstance", name: Callable[[str], str]) -> None:
    """Refuse NaN and numbers beyond 32 bits, whole or of floating point, in the fields of a dataclass.

    Args:
        settings: to check; sections inside it check themselves.
        name: from a field to its name for users, such as "train.{}".format.

    Raises:
        ConfigurationError: naming the field and its value.
    """
    for field in dataclasses.fields(settings):
        given = getattr(settings, field.name)
        for value in given if isinstance(given, tuple) else (given,):
            if isinstance(value, float) and not abs(value) <= MAX_FLOAT:
                raise ConfigurationError(f"{name(field.name)} = {value} must be a finite number of 32 bits")
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise ConfigurationError(f"{name(field.name)} must lie within {MAX_INTEGER:,} of 0")


def checked_seed(seed: int) -> np.uint32:
    """A seed.

    Raises:
        ConfigurationError: it is not a whole number from 0 to 2^32 - 1.
    """
    try:
        return np.uint32(operator.index(seed))
    except (TypeError, OverflowError):
        raise ConfigurationError(f"seed={seed!r} must be a whole number from 0 to {MAX_INTEGER:,}.") from None


def is_time(value: object) -> TypeGuard[float]:
    """Whether a value can be a Unix time, or a number of seconds, of any run: until the year 5138."""
    return isinstance(value, int | float) and 0 <= value < 1e11


def require(condition: bool, message: str) -> None:
    """Refuse a setting.

    Raises:
        ConfigurationError: with the message, unless the condition holds; in ``all_at_once`` at its end.
    """
    if condition:
        return
    if (found := _found.get()) is None:
        raise ConfigurationError(message)
    found.append(message)


_found: ContextVar[list[str] | None] = ContextVar("refused", default=None)


@contextmanager
def all_at_once() -> Generator[None]:
    """Collect what ``require`` refuses in a block, which therefore goes on, and report all of it at the end.

    Raises:
        ConfigurationError: with the one message, or a list of them.
    """
    found: list[str] = []
    token = _found.set(found)
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigurationError):
            found.append(str(error))
        elif not found:
            raise  # otherwise it may be due to a value that was refused
    finally:
        _found.reset(token)
    if found := list(dict.fromkeys(found)):
        several = f"{len(found)} settings do not fit: " * (len(found) > 1)
        raise ConfigurationError(several + "; ".join(found))
