"""Suggests the most similar keyword argument for an unknown one."""

import difflib
import functools
import inspect
from typing import Any


def suggests[T](given: T) -> T:
    """Decorate a function, or a class's constructor, to suggest an argument in place of an unknown one.

    Raises:
        TypeError: (the decorated function) an argument is unknown. The message has the most similar argument,
            or all of them.
    """
    function: Any = given
    if isinstance(function, type):
        setattr(function, "__init__", suggests(function.__init__))  # noqa: B010  (type checkers know it as read only)
        return given
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if unknown := [name for name in kwargs if name not in known]:
            nearest = difflib.get_close_matches(unknown[0], known, n=1)
            way = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(known)}"
            raise TypeError(f"{called} has no argument {unknown[0]!r}: {way}")
        return function(*args, **kwargs)

    result: Any = checked
    return result
