"""Values that hold while something is traced."""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar


@contextlib.contextmanager
def holding[T](variable: ContextVar[T], value: T) -> Generator[None]:
    """Within this context the variable has the value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
