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
"""The largest fp32 number, because steps compute in fp32."""
MAX_DEVICES = 1 << 20
"""The most devices of a mesh: ten times the largest existing cluster."""
MIN_TEMPERATURE = 1e-6
"""The lowest temperature. Logits divided by a lower one may overflow."""
MAX_EMULATED = 4096
"""The most CPU devices emulated by one process. With four times as many, XLA takes minutes to start."""


def check_scalars(settings: "DataclassInstance", name: Callable[[str], str]) -> None:
    """Refuse NaN, numbers beyond 32 bits, and switches that are not bools, in the fields of a dataclass.

    Args:
        settings: the dataclass. Its nested sections check themselves.
        name: maps a field to its name for users, such as "train.{}".format.
    """
    for field in dataclasses.fields(settings):
        given = getattr(settings, field.name)
        if field.type in (bool, "bool") and not isinstance(given, bool | np.bool_):
            raise ConfigurationError(f"{name(field.name)} = {given!r} must be true or false")
        for value in given if isinstance(given, tuple) else (given,):
            if isinstance(value, float) and not abs(value) <= MAX_FLOAT:
                raise ConfigurationError(f"{name(field.name)} = {value} must be a finite number of 32 bits")
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise ConfigurationError(
                    f"{name(field.name)} must be between -{MAX_INTEGER:,} and {MAX_INTEGER:,}"
                )


def checked_seed(seed: int) -> np.uint32:
    """The seed as uint32. Refuse anything but whole numbers from 0 to 2^32 - 1."""
    try:
        return np.uint32(operator.index(seed))
    except (TypeError, OverflowError):
        raise ConfigurationError(f"seed={seed!r} must be a whole number from 0 to {MAX_INTEGER:,}.") from None


def is_time(value: object) -> TypeGuard[float]:
    """Whether a value is a plausible Unix time or number of seconds, up to the year 5138."""
    return isinstance(value, int | float) and 0 <= value < 1e11


def require(condition: bool, message: str) -> None:
    """Refuse a setting unless the condition holds, or in ``all_at_once`` at the end of the block."""
    if condition:
        return
    if (found := _found.get()) is None:
        raise ConfigurationError(message)
    found.append(message)


_found: ContextVar[list[str] | None] = ContextVar("refused", default=None)


@contextmanager
def all_at_once() -> Generator[None]:
    """Collect the messages of ``require`` in a block, so that the user sees all faults at once.

    Raises:
        ConfigurationError: with all messages, at the end of the block.
    """
    found: list[str] = []
    token = _found.set(found)
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigurationError):
            found.append(str(error))
        elif not found:
            raise  # after a refused value the error may be a consequence of that value
    finally:
        _found.reset(token)
    if found := list(dict.fromkeys(found)):
        several = f"{len(found)} settings cannot be used: " * (len(found) > 1)
        raise ConfigurationError(several + "; ".join(found))
