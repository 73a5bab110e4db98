"""The values of a ``ZeroConfig``: their names, and what else may be given for them."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from pallas_kernels import BITS, FORMATS
from zerojax.errors import ConfigurationError
from zerojax.validation.dtypes import dtype_name

MATMUL_WEIGHTS = ("*kernel", "!*embed*", "!*lm_head*", "!*norm*", "!*router*")
"""The kernels of a model's blocks: the default of ``ZeroConfig.fp8`` and ``LoRA.targets``."""

COMPUTE_FORMAT = {"float32": "fp32", "bfloat16": "bf16"}
NF4 = "nf4"
NF4_BLOCK = 64
FROZEN_FORMATS = (*FORMATS, NF4)

FloorFormat = Literal["fp32", "bf16", "fp8", "int8", "fp6", "int4", "int2", "float32", "bfloat16"]
"""The formats of ``pallas_kernels.FORMATS``, and other names of the first two."""
WireFormat = Literal["compute", FloorFormat]
"""The same, and "compute" for None."""
FrozenFormat = Literal[WireFormat, "nf4"]
ComputeDtype = Literal["float32", "bfloat16", "fp32", "bf16"] | type[np.generic] | np.dtype
AccumulateOrder = Literal["depth", "breadth"]
Spread = Literal["node", "world"]
Moments = Literal["float32", "bfloat16"]
ExpertSpread = Literal["auto", "local", "gathered"]
HostStore = Literal["optimizer", "weights", "activations"]
"""What can be in host memory."""
HOST_STORES: tuple[HostStore, ...] = get_args(HostStore)
GradSync = Literal["micro", "step"]
MatmulDtype = Literal["compute", "fp8"]
Preset = Literal["zero3", "zero++", "zero++-paper", "delta", "local"]
Remat = Literal["full", "attention", "none"]
Rounding = Literal["nearest", "stochastic"]

OUTER = ("outer_learning_rate", "outer_momentum", "outer_delay", "outer_mixing")
"""The fields of local updates, besides ``every``."""


class PerHop[T](NamedTuple):
    """One of something for each hop: over the ``node`` axis and over ``local``."""

    node: T
    local: T


def as_classes(given: Any) -> tuple[type, ...]:
    """The classes of ``units``, from one or several."""
    classes = tuple(given) if isinstance(given, list | tuple | set | frozenset) else (given,)
    for one in classes:
        if not isinstance(one, type):
            name = one if isinstance(one, str) else type(one).__name__
            raise ConfigurationError(
                f"ZeroConfig.units={given!r} must hold classes, and {one!r} is none: name the class of the "
                f"model's blocks itself, such as units=({name},)."
            )
    return classes


def as_floors(given: Iterable[Any]) -> tuple[tuple[str, str | None], ...]:
    """The pairs of ``precise``, their formats by canonical names."""
    pairs = list(given)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ConfigurationError(
            f"ZeroConfig.precise={given!r}: give pairs of a pattern and a format, such as "
            '(("*embed*", "int8"),).'
        )
    return tuple((pattern, _format_name(floor)) for pattern, floor in pairs)


def _format_name(given: Any) -> Any:
    """A wire format's name from the name or a dtype; other values are returned unchanged."""
    with suppress(ConfigurationError):
        return COMPUTE_FORMAT[dtype_name(given, "", tuple(COMPUTE_FORMAT))]
    return given


def as_format(given: Any) -> Any:
    """As ``_format_name``, of a format that may be the one of ``compute_dtype``: None."""
    return None if given == "compute" else _format_name(given)


def bits_of(fmt: str) -> int:
    """Of an element in a format, scales aside."""
    return 4 if fmt == NF4 else BITS[fmt]
