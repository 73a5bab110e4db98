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

import numpy as np
from rich.table import Table

from pallas_kernels import BITS, RAW
from pallas_kernels.formats import Format
from zerojax.errors import ConfigurationError
from zerojax.formatting import html
from zerojax.validation.arguments import suggests
from zerojax.validation.dtypes import dtype_name
from zerojax.validation.patterns import as_patterns, matches, refuse_idle, why_not
from zerojax.zero_config.rules import check_zero

MATMUL_WEIGHTS = ("*kernel", "!*embed*", "!*lm_head*", "!*norm*", "!*router*")
"""The kernels of a model's blocks: the default of ``ZeroConfig.fp8`` and ``LoRA.targets``."""

COMPUTE_FORMAT = {"float32": "fp32", "bfloat16": "bf16"}
NF4 = "nf4"
NF4_BLOCK = 64

FloorFormat = Literal[Format, "float32", "bfloat16"]
"""The formats of ``pallas_kernels.FORMATS``, and other names of the first two."""
WireFormat = Literal["compute", FloorFormat]
"""The same, and "compute" for None."""
FrozenFormat = Literal[WireFormat, "nf4"]
ComputeDtype = Literal["float32", "bfloat16", "fp32", "bf16"] | type[np.generic] | np.dtype
AccumulateOrder = Literal["depth", "breadth"]
Spread = Literal["node", "world"]
Moments = Literal["float32", "bfloat16", "float8"]
ExpertSpread = Literal["auto", "local", "gathered"]
HostStore = Literal["optimizer", "weights", "activations"]
"""What can be in host memory."""
HOST_STORES: tuple[HostStore, ...] = get_args(HostStore)
GradSync = Literal["micro", "step"]
MatmulDtype = Literal["compute", "fp8"]
Preset = Literal["zero3", "zero++", "zero++-paper", "delta", "local"]
Remat = Literal["full", "attention", "none"]
Rounding = Literal["nearest", "stochastic"]
_OUTER = ("outer_learning_rate", "outer_momentum", "outer_delay", "outer_mixing")
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
    """One of something for each hop: over the ``node`` axis and over ``local``."""

    node: T
    local: T


@suggests
@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How a model is sharded over the mesh, and what crosses each axis.

    Wire formats are "fp32", "bf16", "fp8", "int8", "fp6", "int4" and "int2"; "float32", ``jnp.bfloat16`` and
    the like are other names of the first two. "compute", or None, is the format of ``compute_dtype``: the
    values that the model computes with, unchanged.

    Attributes:
        base: the preset that supplies all options that are not set. "zero3" is exact. "zero++" sends a
            quarter of its bytes, "delta" a sixth, and "local" a hundredth, by local updates (``every``).
            "zero++-paper" is ZeRO++ as published, with int4 gradients also within nodes, and trains less
            exactly. In Python, ``ZeroConfig.preset`` sets it.
        stage: 0 replicates everything, 1 shards the optimizer, 2 also the gradients, 3 also the
            parameters (ZeRO, Rajbhandari et al.).
        units: module classes whose weights are gathered just before use and dropped after
            (``zerojax.Stack`` needs no mention); one class, or a list, is kept as a tuple. Without any, the
            whole model is one unit.
        compute_dtype: the dtype of the gathered weights: bfloat16 or float32, as a name ("bfloat16", "bf16")
            or a dtype (``jnp.bfloat16``); kept as the long name. Master weights are always fp32.
        remat: the results that a unit's backward pass computes again. "full": all. "attention": all but the
            output of attention. "none": only results that fuse into their readers (element-wise operations,
            row sums, casts, layout changes); results of matmuls and kernels are kept.
        accumulate: micro-batches per optimizer step.
        accumulate_order: "depth" runs each micro-batch through the whole model before the next. "breadth"
            runs all of them through a unit before the next unit (``zerojax.schedule.breadth_first``): weights
            are gathered and gradients reduced once a step, during compute. It keeps the activations of all
            micro-batches for the backward pass, and needs units.
        weights: format of the weight all-gather over ``node`` (qwZ, ZeRO++ section 3.1).
        weights_delta: keep the secondary copy across steps and send only what changed, once per
            optimizer step (needs ``hpz``).
        delta_resync: with ``weights_delta``, send the whole weights in the local format every n
            steps; 0 never.
        local_weights: format of the all-gather over ``local`` and of the stored secondary copy.
        hpz: keep the node-local secondary copy for the backward pass (ZeRO++ section 3.2).
        grads: formats of the gradient hops over ``local`` and over ``node`` (qgZ, section 3.3).
        grads_hops: 2, or 1 for a single all-to-all over both axes (the paper's Figure 3).
        grad_sync: "micro" takes the node hop for every micro-batch, "step" once per optimizer step.
        block_size: elements that share a scale; a power of two from 64 to 2048, best a divisor of the
            model's width.
        rounding: of gradients: "nearest" (half to even) or "stochastic" (a counter hash: reproducible,
            unbiased). Weights are always rounded to nearest, which keeps their error bound smallest.
        rotation: 32 rotates gradients by a 32-wide Hadamard matrix before encoding; 0 does not.
        error_feedback: add what the node hop's encoding lost to the next step's gradient.
        chunks: into how many pipeline stages the two gradient hops are cut.
        precise: ``(pattern, format)`` pairs: where a leaf's path ("blocks/attn/kernel") matches the
            shell pattern, neither its weight nor its gradient travels in fewer bits than ``format``.
            Vectors and scalars always travel in the compute format. By default embeddings: a rare
            token's gradient, in one block with a frequent one's, would round to zero in four bits.
        matmul_dtype: "compute", or "fp8", which needs stage 3 (``zerojax.matmul.fp8``). With "fp8", matmuls
            with the weights that ``fp8`` names are computed in 8-bit floating point, forward and backward.
            These weights cross ``local`` in the form that such a matmul reads. They cross ``node`` in that
            form too, unless differences or fewer than 8 bits are sent there.
        fp8: shell patterns of paths: with ``matmul_dtype="fp8"`` the weights to use it for, among the
            two-dimensional ones of units, and matrices of experts, whose sizes are multiples of 16. The last
            pattern that matches decides; one that begins with "!" leaves the weight out. The default takes
            all experts.
        frozen: shell patterns of paths, read like ``fp8``: the weights that are not trained. They have no
            master weight, optimizer state or gradient. Needs stage 3. In a config with adapters ([lora]), all
            weights by default.
        frozen_weights: the format in which frozen weights are stored and gathered over ``local``: a wire
            format or "nf4" (QLoRA; blocks of 64). ``precise`` holds for them too.
        frozen_spread: where a frozen weight is stored once. "node": in each node, so that it never crosses
            nodes. "world": over all devices, which saves memory; the forward and the backward pass then also
            gather it over ``node``.
        matrix_spread: where a matrix that the optimizer needs whole (Muon) has its master weight and
            momentum, at stage 3. "node": in each node, so that neither the weight nor its update crosses
            nodes, and a step sends no more than with AdamW. "world": over all devices, which saves memory;
            the momentum and the update then cross nodes in the compute format.
        state_spread: where the master weights and the optimizer's state are, at stage 3. "world": once, over
            all devices. "node": in each node, which then holds nothing that the others lack. Gradient sums
            go to all nodes in place of the weights, in the weights' format, or in the gradients' format if
            that has more bits. A step of "delta" sends as much as with "world".
        moments: the dtype of the optimizer's moments (Adam's two, a momentum): "float32", or "bfloat16" or
            "float8", rounded stochastically, which take half or a quarter of their memory
            (``zerojax.optim.low_precision``).
        experts: where the weights of experts (``zerojax.Experts``) are whole. "local" spreads them over the
            devices of a node. A device then holds some of the experts and receives the tokens for them, so
            that neither these weights nor their gradients travel within a node. "gathered" gathers them for
            every device like other weights. "auto" is "local" if the devices of a node divide the experts.
        host: what is kept in page-locked host memory and copied to the device one layer at a time.
            "optimizer": the master weights and the optimizer's state; the device keeps the weights that
            passes read, 2 bytes a parameter in bfloat16 over all devices. With local updates also the outer
            weights. "weights": the frozen weights, and with "optimizer" the trained weights that passes read.
            "activations": the residuals of a ``Stack``. Results are the same as without.
        host_activations: with "activations" in host, the fraction of each layer's residuals that is there.
            The rest stays on the device, if a host has no room for all.
        update_in_backward: let the backward pass of each ``Stack`` update a layer as soon as its gradients
            are final. Gradients of all layers then never exist at once, and copies of the optimizer's state
            run beside the layers. Needs "optimizer" in host, one backward pass a step, and an optimizer
            without norms of gradients. A step whose loss is a spike or not finite is skipped as always. If a
            gradient is not finite, "skipped" is 1: neither its layer is updated, nor earlier layers of the
            stack, nor parameters outside of stacks. Later layers have been updated by then.
        sequence_parallel: how many neighbouring devices of a node share a row of tokens: 1, or a divisor of
            the devices of a node. Each computes with its part of the tokens, and attention exchanges heads
            between them (``zerojax.attention``); nothing more crosses nodes.
        every: 0, or for local updates the number of steps in which each weight crosses nodes once (DiLoCo,
            Douillard et al., 2023; Streaming DiLoCo, 2025). Every node trains weights that only it has. Each
            step exchanges what the nodes have learnt about one fragment, 1/``every`` of all elements, and
            owners apply the mean to the outer weights. Evaluations read the outer weights. ``grads`` (over
            ``node``) is then the format of what is learnt, on its way to the owners. ``weights`` is the
            format of the outer weights' change, on its way back. Each node holds the whole state, spread over
            its devices.
        outer_learning_rate: of the outer weights' SGD with Nesterov momentum.
        outer_momentum: its momentum.
        outer_delay: steps between sending a fragment and using the result. 0 exchanges at the end of each
            step, which waits for the network. 1 sends at the beginning of a step and uses the result at its
            end. With 2 or more, each of the two hops has a whole step to hide behind. What a node learns
            about a fragment in these steps is replaced, so with ``outer_mixing`` 0 they must be fewer than
            ``every``.
        outer_mixing: the fraction of a node's own fragment that stays when it takes up the outer weights; 0
            replaces all of it (Streaming DiLoCo, equation 3).

    Examples:
        >>> zero = zerojax.ZeroConfig.preset("delta", accumulate=4, accumulate_order="breadth")
        >>> zero.weights, zero.weights_delta
        ('int4', True)
    """

    base: Preset = field(default="zero3", compare=False, repr=False, metadata={"key": "preset"})
    stage: Literal[0, 1, 2, 3] = 3
    units: tuple[type, ...] = field(default=(), metadata={"key": None})  # from the model
    compute_dtype: ComputeDtype = "bfloat16"
    remat: Remat = "full"
    accumulate: int = field(default=1, metadata={"key": None})  # train.accumulate
    accumulate_order: AccumulateOrder = "depth"
    weights: WireFormat | None = None
    weights_delta: bool = False
    delta_resync: int = 0
    local_weights: WireFormat | None = None
    hpz: bool = False
    grads: tuple[WireFormat | None, WireFormat | None] = (None, None)
    grads_hops: Literal[1, 2] = 2
    grad_sync: GradSync = "micro"
    block_size: int = 256
    rounding: Rounding = "nearest"
    rotation: Literal[0, 32] = 0
    error_feedback: bool = False
    chunks: int = 1
    precise: tuple[tuple[str, FloorFormat], ...] = (("*embed*", "int8"), ("*router*", "bf16"))
    matmul_dtype: MatmulDtype = "compute"
    fp8: tuple[str, ...] = MATMUL_WEIGHTS
    frozen: tuple[str, ...] = ()
    frozen_weights: FrozenFormat | None = None
    frozen_spread: Spread = "node"
    matrix_spread: Spread = "node"
    state_spread: Spread = "world"
    moments: Moments = "float32"
    experts: ExpertSpread = "auto"
    host: tuple[HostStore, ...] = ()
    host_activations: float = 1.0
    update_in_backward: bool = False
    sequence_parallel: int = 1
    every: int = 0
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    outer_delay: int = 0
    outer_mixing: float = 0.0

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
        return cls(**{**PRESETS[name], "base": name, **overrides})

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
        """The options that differ from the preset's."""
        plain, names = _plain(self.base), [field.name for field in dataclasses.fields(self) if field.compare]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(plain, name)}

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes``, checked again."""
        return dataclasses.replace(self, **changes)

    @property
    def compute_format(self) -> str:
        """The wire format that carries ``compute_dtype`` unchanged."""
        return COMPUTE_FORMAT[str(self.compute_dtype)]

    @property
    def weight_formats(self) -> PerHop[str]:
        """Formats of the weight gather, None resolved."""
        default = self.compute_format
        # With local updates ``weights`` is the format of fragments; evaluations gather exactly.
        return PerHop(node=(not self.every and self.weights) or default, local=self.local_weights or default)

    @property
    def grad_formats(self) -> PerHop[str]:
        """Formats of the gradient hops, None resolved."""
        local, node = self.grads
        return PerHop(node=node or self.compute_format, local=local or self.compute_format)

    @property
    def sum_format(self) -> str:
        """Format in which gradient sums travel from their owners to all nodes.

        It is the format of the weights, which then need no hop, or the gradients' format if that has more
        bits.
        """
        return max(self.weight_formats.node, self.grad_formats.node, key=_bits)

    @property
    def passes(self) -> int:
        """Forward and backward passes per step: one for each micro-batch, or one for all in breadth."""
        return 1 if self.accumulate_order == "breadth" else self.accumulate

    @property
    def in_node(self) -> Self:
        """The options of one node's passes, with local updates."""
        grads = (self.grads[0], self.grads[0])
        unset = {name: getattr(type(self), name) for name in (*_OUTER, "every", "error_feedback", "weights")}
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
