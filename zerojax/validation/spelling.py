"""What users may misspell: the names of arguments, and dtypes."""

import difflib
import functools
import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax.numpy as jnp

from zerojax.errors import ConfigurationError

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}


def dtype_name(value: Any, option: str, allowed: Sequence[str]) -> str:
    """NumPy's name of a dtype in any spelling.

    Args:
        value: a name ("bfloat16", "bf16", "BF16", "torch.bfloat16"), a dtype, or a scalar type of JAX or
            NumPy (``jnp.bfloat16``).
        option: name of the option, for the message.
        allowed: the allowed names in NumPy, such as "float32".
    """
    name = value
    if isinstance(value, str):
        last = value.lower().rpartition(".")[2]
        name = _SHORT.get(last, last)
    if name is not None:  # NumPy reads None as float64
        with suppress(TypeError, ValueError, SyntaxError):  # NumPy's errors for other values
            name = jnp.dtype(name).name
    if not isinstance(name, str) or name not in allowed:
        raise ConfigurationError(f"{option}={value!r} is not one of {', '.join(map(repr, allowed))}.")
    return name


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
