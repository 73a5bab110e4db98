"""Dtypes as users may spell them."""

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
