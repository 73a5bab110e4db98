"""The sharding options: what is sharded, and in which format it travels.

The fields are plain values, so that a config file can hold them. ``ZeroConfig`` refuses combinations that
cannot work or have no effect, before anything is compiled.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, get_args

from rich.table import Table

from pallas_kernels.formats import BITS, RAW
from zerojax.errors import ConfigurationError
from zerojax.formatting import html
from zerojax.validation.patterns import as_patterns, matches, refuse_idle, why_not
from zerojax.validation.spelling import dtype_name, suggests
from zerojax.zero_config.options import (
    MATMUL_WEIGHTS,
    LocalUpdates,
    Memory,
    Moments,
    Schedule,
    Sharding,
    Wire,
)
from zerojax.zero_config.rules import check_zero

COMPUTE_FORMAT = {"float32": "fp32", "bfloat16": "bf16"}
NF4 = "nf4"
NF4_BLOCK = 64

Preset = Literal["zero3", "zero++", "zero++-paper", "delta", "local"]
_FP8_MULTIPLE = 16
"""Sizes of the matrices that cuBLASLt multiplies in fp8."""

PRESETS: dict[Preset, dict[str, Any]] = {
    "zero3": {"stage": 3},
    "zero++": {"stage": 3, "weights": "int8", "hpz": True, "grads": ("int8", "int4"), "rotation": 32},
    "zero++-paper": {"stage": 3, "weights": "int8", "hpz": True, "grads": ("int4", "int4")},
    "delta": {
        "stage": 3,
        "weights": "int4",
        "weights_delta": True,
        "hpz": True,
        "grads": ("int8", "int4"),
        "grad_sync": "step",
        "rotation": 32,
        "rounding": "stochastic",
        "block_size": 128,
    },
    "local": {
        "stage": 3,
        "every": 64,
        # Of the settings tried, the best where the inner learning rate was tuned (docs/quality.md).
        "outer_learning_rate": 1.0,
        "outer_momentum": 0.5,
        "outer_delay": 2,
        "weights": "int4",
        "grads": (None, "int4"),
        "rotation": 32,
        "error_feedback": True,
        "block_size": 128,
    },
}


class PerHop[T](NamedTuple):
    """A value for each hop: over the ``node`` axis and over ``local``."""

    node: T
    local: T


@suggests
@dataclass(frozen=True, kw_only=True)
class ZeroConfig(LocalUpdates, Memory, Schedule, Wire, Sharding):
    """How a model is sharded over the mesh, and what crosses each axis.

    The options are the fields of the five groups in ``zerojax.zero_config.options``. All of them are
    arguments here.

    Attributes:
        base: the preset that supplies all options that are not set. "zero3" is exact. "zero++" sends a
            quarter of its bytes, "delta" a sixth, and "local" a hundredth, by local updates (``every``).
            "zero++-paper" is ZeRO++ as published, with int4 gradients also within nodes, and trains less
            exactly. In Python, ``ZeroConfig.preset`` sets it.

    Examples:
        >>> zero = zerojax.ZeroConfig.preset("delta", accumulate=4, accumulate_order="breadth")
        >>> zero.weights, zero.weights_delta
        ('int4', True)
    """

    base: Preset = field(default="zero3", compare=False, repr=False, metadata={"key": "preset"})

    def __post_init__(self) -> None:
        """Refuse options that cannot work.

        Raises:
            ConfigurationError: naming the field, its value and the way out.
        """
        for name, value in self._canonical().items():
            object.__setattr__(self, name, value)  # frozen for everybody else
        check_zero(self)

    @classmethod
    def preset(cls, name: Preset, **overrides: Any) -> Self:
        """A named set of options.

        Args:
            name: as ``base``. Between nodes a step sends 3M bytes with "zero3", 0.75M with "zero++" and
                "zero++-paper", 0.5M with "delta", and 0.5M in ``every`` steps (64) with "local". ``PRESETS``
                has the fields.
            **overrides: fields to set on top.

        Raises:
            ConfigurationError: there is no preset of that name.
        """
        if name not in PRESETS:
            raise ConfigurationError(f"no preset {name!r}: there are {', '.join(map(repr, PRESETS))}.")
        options: dict[str, Any] = {**PRESETS[name], "base": name, **overrides}
        return cls(**options)

    def __repr__(self) -> str:
        """The call of ``preset`` that makes an equal one; classes by their names."""
        options = {name: _shown(value) for name, value in self._changes().items()}
        return f"ZeroConfig.preset({', '.join([repr(self.base), *(f'{k}={v}' for k, v in options.items())])})"

    def _repr_html_(self) -> str:
        """A table of the preset's options and of those that differ from it, for notebooks."""
        own, table = self._changes(), Table("option", "value", "", title=f"ZeroConfig: {self.base}")
        for name in dict.fromkeys([*PRESETS[self.base], *own]):
            table.add_row(name, _shown(getattr(self, name)), "changed" if name in own else "the preset's")
        return html(table)

    def _changes(self) -> dict[str, Any]:
        """The options that differ from the preset."""
        plain, names = _plain(self.base), [field.name for field in dataclasses.fields(self) if field.compare]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(plain, name)}

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes``, which is checked like a new config."""
        return dataclasses.replace(self, **changes)

    @property
    def compute_format(self) -> str:
        """The wire format that carries ``compute_dtype`` unchanged."""
        return COMPUTE_FORMAT[str(self.compute_dtype)]

    @property
    def weight_formats(self) -> PerHop[str]:
        """Formats of the weights' two hops; the compute format where an option is None."""
        default = self.compute_format
        # With local updates ``weights`` is the format of fragments; evaluations gather exactly.
        return PerHop(node=(not self.every and self.weights) or default, local=self.local_weights or default)

    @property
    def grad_formats(self) -> PerHop[str]:
        """Formats of the gradients' two hops; the compute format where an option is None."""
        local, node = self.grads
        return PerHop(node=node or self.compute_format, local=local or self.compute_format)

    @property
    def sum_format(self) -> str:
        """Format in which gradient sums travel from their owners to all nodes.

        It is the format of the weights, which then need no hop, or the gradients' format if that has more
        bits.
        """
        return max(self.weight_formats.node, self.grad_formats.node, key=_bits)

    @functools.cached_property
    def passes(self) -> int:
        """Forward and backward passes per step: one for each micro-batch, or one for all in breadth."""
        return 1 if self.accumulate_order == "breadth" else self.accumulate

    @property
    def in_node(self) -> Self:
        """With local updates, the options of the passes within a node."""
        grads = (self.grads[0], self.grads[0])
        names = [one.name for one in dataclasses.fields(LocalUpdates)]
        unset = {name: getattr(type(self), name) for name in (*names, "error_feedback", "weights")}
        if self.grad_formats.local in RAW:
            unset |= {name: getattr(type(self), name) for name in ("rotation", "rounding")}
        return self.replace(grads=grads, **unset)

    @property
    def node_hop_once(self) -> bool:
        """Whether gradients cross nodes after the last micro-batch instead of within each."""
        return self.error_feedback or (self.grad_sync == "step" and self.passes > 1)

    def wire_format_of(self, path: str, rank: int, wanted: str) -> str:
        """The wire format of a parameter's weight or gradient, if the config asks for ``wanted``.

        Args:
            path: the parameter's path, joined by "/".
            rank: the number of dimensions of one layer.
            wanted: "fp32" ... "int2".
        """
        if rank < 2:
            return max(wanted, self.compute_format, key=_bits)
        floors = [floor for pattern, floor in self.precise if matches(pattern, path)]
        return max([wanted, *floors], key=_bits)

    def without_fp8(
        self, path: str, shape: tuple[int, ...], unit: str | None, *, of_experts: bool = False
    ) -> str | None:
        """The reason why a weight's matmuls are not computed in fp8; None if they are.

        Args:
            path: the parameter's path, joined by "/".
            shape: the shape of one layer.
            unit: the name of its unit, if it has one.
            of_experts: whether the leading axis counts experts.
        """
        if self.matmul_dtype != "fp8":
            return 'matmul_dtype is "compute"'
        if unit is None:
            return "in no unit"
        if of_experts and len(shape) != 3:
            return "no matrix of experts"
        if not of_experts and len(shape) != 2:
            return "not two-dimensional"
        if any(size % _FP8_MULTIPLE for size in shape[-2:]):
            return f"sizes are no multiples of {_FP8_MULTIPLE}"
        by_default = of_experts and self.fp8 == MATMUL_WEIGHTS
        if not by_default and (reason := why_not(self.fp8, path, "fp8")):
            return reason
        if self.is_frozen(path) and self.frozen_weights != "fp8":
            return f"frozen in {self.frozen_weights or self.compute_format}"
        return None

    def parts_of(self, path: str, experts: int, local: int) -> int:
        """The number of parts into which the weight of experts is cut: one for each device of a node, or 1.

        Args:
            path: the parameter's path, joined by "/".
            experts: the extent of its leading axis.
            local: the number of devices of a node.

        Raises:
            ConfigurationError: ``experts="local"`` and the devices do not divide the experts.
        """
        divides = experts % local == 0
        if self.experts == "local" and not divides:
            raise ConfigurationError(
                f'experts="local" spreads {path!r} over the {local} devices of a node, which do not divide '
                f'its {experts} experts: use experts="gathered", or another mesh.local.'
            )
        spreads = self.experts != "gathered" and self.stage > 0 and self.grads_hops == 2
        return local if spreads and divides else 1

    def is_frozen(self, path: str) -> bool:
        """Whether the weight at a path, joined by "/", is not trained."""
        return why_not(self.frozen, path, "frozen") is None

    def check_patterns(self, paths: Sequence[str]) -> None:
        """Refuse patterns of ``fp8`` and ``frozen`` that match none of a model's paths, default ones aside.

        Raises:
            ConfigurationError: naming them, and a few paths.
        """
        refuse_idle("ZeroConfig.fp8", self.fp8, paths, default=MATMUL_WEIGHTS)
        refuse_idle("ZeroConfig.frozen", self.frozen, paths)

    def _canonical(self) -> dict[str, Any]:
        """Dtypes and aliases under their canonical names, and a single class as a tuple."""
        return {
            "units": _classes(self.units),
            "compute_dtype": dtype_name(
                self.compute_dtype, "ZeroConfig.compute_dtype", tuple(COMPUTE_FORMAT)
            ),
            "moments": dtype_name(self.moments, "ZeroConfig.moments", get_args(Moments)),
            "weights": _sent(self.weights),
            "local_weights": _sent(self.local_weights),
            "grads": tuple(map(_sent, self.grads)),
            "precise": _floors(self.precise),
            "fp8": as_patterns("ZeroConfig.fp8", self.fp8),
            "frozen": as_patterns("ZeroConfig.frozen", self.frozen),
            "frozen_weights": _sent(self.frozen_weights),
            "host": tuple(self.host) if isinstance(self.host, list | tuple | set) else (self.host,),
        }


@functools.cache
def _plain(name: Preset) -> ZeroConfig:
    return ZeroConfig.preset(name)


def _shown(value: Any) -> str:
    """A value as Python, with classes by their names."""
    if isinstance(value, tuple) and value and all(isinstance(one, type) for one in value):
        return f"({', '.join(one.__name__ for one in value)}{',' * (len(value) == 1)})"
    return repr(value)


def _classes(given: Any) -> tuple[type, ...]:
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


def _floors(given: Iterable[Any]) -> tuple[tuple[str, str | None], ...]:
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


def _sent(given: Any) -> Any:
    """Like ``_format_name``, but "compute" becomes None: the weight is sent in the compute dtype."""
    return None if given == "compute" else _format_name(given)


def _bits(fmt: str) -> int:
    return 4 if fmt == NF4 else BITS[fmt]
