"""The names of dtypes that users may give."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax.numpy as jnp

from zerojax.errors import ConfigurationError

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}


def dtype_name(value: Any, option: str, allowed: Sequence[str]) -> str:
    """numpy's name of a dtype, given in any form.

    Args:
        value: a name ("bfloat16", "bf16", "BF16", "torch.bfloat16"), a dtype, or a scalar type of JAX or
            numpy (``jnp.bfloat16``).
        option: name of the option, for the message.
        allowed: numpy's names, such as "float32".

    Raises:
        ConfigurationError: it is not an allowed dtype.
    """
    name = value
    if isinstance(value, str):
        last = value.lower().rpartition(".")[2]
        name = _SHORT.get(last, last)
    if name is not None:  # numpy takes None for float64
        with suppress(TypeError, ValueError, SyntaxError):  # what numpy raises on anything else
            name = jnp.dtype(name).name
    if not isinstance(name, str) or name not in allowed:
        raise ConfigurationError(f"{option}={value!r} is not one of {', '.join(map(repr, allowed))}.")
    return name
