"""Low-rank adapters: trained matrices A and B for a frozen weight W, which acts as ``W + scale A B``.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), section 4.1. A product
with W gets a second, narrow product: ``x W + scale (x A) B``. The sum ``W + scale A B`` is not computed,
and neither is the gradient of W, which costs a third of an ordinary backward pass. Only for experts they are,
layer by layer: each has an adapter of its own, and the grouped products of a mixture read one array.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from zerojax.errors import ConfigurationError
from zerojax.matmul.operand import ArrayOperand, Fp8Operand, Params
from zerojax.validation.arguments import suggests
from zerojax.validation.bounds import check_numbers
from zerojax.validation.patterns import as_patterns, matches, why_not
from zerojax.zero_config.config import MATMUL_WEIGHTS

A, B = "lora_a", "lora_b"
"""Names of an adapter's two parameters, below the path of their weight."""
SUM = "zerojax: product with a weight and its adapter"
"""The name under which rematerialisation keeps the sum of two parts alone (``zerojax.schedule.remat``)."""

ATTENTION_INPUTS = {"query/kernel": 1, "key/kernel": 1, "value/kernel": 1, "out/kernel": 2}
"""The ends of the paths of Flax's three-dimensional attention kernels -> how many axes are inputs."""


@suggests
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Which frozen weights get adapters, and of what kind.

    Attributes:
        rank: the columns of A and rows of B; in a config 0, the default, means no adapters.
        alpha: A B is multiplied by alpha / rank.
        targets: shell patterns of paths ("blocks/attn/kernel") among the two-dimensional weights of units,
            the three-dimensional ones of Flax's attention ("query", "key", "value", "out"), and those of
            experts (``zerojax.Experts``: "*/gate", "*/up", "*/down"), which the default leaves out. The last
            pattern that matches decides; one that begins with "!" leaves the weight out.
        dropout: probability of zeroing an element of the input of A in training. Each read drops other
            elements, but the iterations of a loop (``jax.lax.scan``) of the model's own around a unit drop
            the same ones.
        rslora: multiply by alpha / sqrt(rank) instead (Kalajdzievski, arXiv:2312.03732).
        pieces: ``(pattern, columns, rank, alpha)``, for other ranks and alphas. The tuples whose pattern
            matches a weight's path divide its columns (outputs) in order: each gives an adapter to that many
            of them, 0 to all that are left; rank 0 gives none. So query, key and value, which are one weight,
            get adapters of their own, as in PEFT.

    Examples:
        >>> lora = zerojax.LoRA(rank=8, alpha=16, targets=("*kernel", "!*router*"))
        >>> zero = zerojax.ZeroConfig(frozen=("*",), frozen_weights="nf4")  # QLoRA, with ``lora=lora``
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = MATMUL_WEIGHTS
    dropout: float = 0.0
    rslora: bool = False
    pieces: tuple[tuple[str, int, int, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            ConfigurationError: naming the field and its value.
        """
        object.__setattr__(self, "targets", as_patterns("LoRA.targets", self.targets))
        check_numbers(self, "LoRA.{}".format)
        if self.rank < 1:
            raise ConfigurationError(f"LoRA.rank={self.rank} must be at least 1.")
        for alpha in (self.alpha, *(alpha for *_, alpha in self.pieces)):
            if not (math.isfinite(alpha) and alpha > 0):
                raise ConfigurationError(f"LoRA.alpha={alpha} must be a positive number.")
        if bad := [piece for piece in self.pieces if min(piece[1:3]) < 0]:
            raise ConfigurationError(f"LoRA.pieces has {bad[0]}: columns and rank must be 0 or more.")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"LoRA.dropout={self.dropout} must be from 0 to below 1.")
        if not self.targets:
            raise ConfigurationError("LoRA.targets is empty: name the weights that get adapters.")

    @property
    def scale(self) -> float:
        """What A B is multiplied by, where ``pieces`` has nothing else."""
        return self.scale_of(self.rank, self.alpha)

    def scale_of(self, rank: int, alpha: float) -> float:
        """What A B of a rank and an alpha is multiplied by."""
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def alpha_of(self, rank: int, scale: float) -> float:
        """The inverse of ``scale_of``."""
        return scale * (math.sqrt(rank) if self.rslora else rank)

    def pieces_of(self, path: str, columns: int) -> "tuple[Piece, ...]":
        """The adapters of a weight, for one range of columns after the other; those of rank 0 are left out.

        Args:
            path: the weight's path, joined by "/".
            columns: the weight's.

        Raises:
            ConfigurationError: ``pieces`` has too few columns or too many.
        """
        own = [piece[1:] for piece in self.pieces if matches(piece[0], path)] or [(0, self.rank, self.alpha)]
        found: list[Piece] = []
        start = first = 0
        for width, rank, alpha in own:
            stop = start + (width or columns - start)
            if not start < stop <= columns:
                break
            if rank:
                scale = self.scale_of(rank, alpha)
                found.append(Piece(slice(start, stop), slice(first, first + rank), scale))
            start = stop
            first += rank
        else:
            if start == columns:
                return tuple(found)
        widths = " + ".join(str(width) for width, *_ in own)
        raise ConfigurationError(f"LoRA.pieces has {widths} columns for {path!r}, which has {columns}.")

    def without(
        self, path: str, shape: Sequence[int], unit: str | None, *, of_experts: bool = False
    ) -> str | None:
        """Why a weight has no adapter; None if it has one.

        Args:
            path: the weight's path, joined by "/".
            shape: of one layer's weight.
            unit: the name of its unit, if it has one.
            of_experts: whether its leading axis is the expert's.

        Raises:
            ConfigurationError: experts with dropout.
        """
        if reason := why_not(self.targets, path, "targets"):
            return reason
        if unit is None:
            return "in no unit"
        if of_experts:
            if len(shape) != 3:
                return "no matrix of experts"
            if self.dropout:
                raise ConfigurationError(
                    f"LoRA.dropout={self.dropout} cannot be applied to {path!r}: adapters of experts are "
                    "added to their weights. Set it to 0, or leave the weight out by "
                    f"targets=(..., '!{path}')."
                )
            shape = shape[1:]
        if not (inputs := input_axes(path, shape)):
            return "neither two-dimensional nor a kernel of attention"
        return None if self.pieces_of(path, math.prod(shape[inputs:])) else "of rank 0 in LoRA.pieces"

    def shapes(self, path: str, shape: Sequence[int]) -> Mapping[str, tuple[int, ...]]:
        """The shapes of A and B for a weight that is ``[inputs, outputs]``, or is reshaped to that.

        For experts, ``[experts, inputs, outputs]``, both have a leading axis of experts.

        A has the columns of all pieces side by side. B is their block-diagonal matrix without what lies
        outside the blocks: each piece has the first rows of its own columns, and the rest of them is zero.
        """
        if not input_axes(path, shape):
            own = self.shapes(path, shape[1:])
            return {name: (shape[0], *each) for name, each in own.items()}
        inputs = math.prod(shape[: input_axes(path, shape)])
        columns = math.prod(shape) // inputs
        ranks = [piece.rank for piece in self.pieces_of(path, columns)]
        return {A: (inputs, sum(ranks)), B: (max(ranks, default=0), columns)}

    def init(
        self, key: Array, path: str, shape: Sequence[int], stack: Sequence[int] = ()
    ) -> dict[str, Array]:
        """First values: A uniform within 1/sqrt(inputs), as PEFT draws it; B zero, so that A B is.

        Args:
            key: a random key.
            path: of the weight, joined by "/".
            shape: of the weight.
            stack: as ``ParamShape.stack``.

        Returns:
            fp32, by the names of ``shapes``.
        """
        shapes = self.shapes(path, shape)
        bound = 1 / math.sqrt(shapes[A][-2])
        return {
            A: jax.random.uniform(key, (*stack, *shapes[A]), jnp.float32, -bound, bound),
            B: jnp.zeros((*stack, *shapes[B]), jnp.float32),
        }


class Piece(NamedTuple):
    """The adapter of some of a weight's columns.

    Attributes:
        columns: of the weight, and of B.
        ranks: the columns of A.
        scale: what A B is multiplied by.
    """

    columns: slice
    ranks: slice
    scale: float

    @property
    def rank(self) -> int:
        """The number of columns of A, and of rows of B."""
        return self.ranks.stop - self.ranks.start


def input_axes(path: str, shape: Sequence[int]) -> int:
    """How many of a weight's axes, from the first on, are inputs of its products; 0 if that is not known.

    The path is joined by "/", and the shape that of one layer.
    """
    if len(shape) == 3:
        return next((axes for end, axes in ATTENTION_INPUTS.items() if f"/{path}".endswith(f"/{end}")), 0)
    return int(len(shape) == 2)


def merged(
    weight: Array | np.ndarray, a: Array | np.ndarray, b: Array | np.ndarray, lora: LoRA, path: str
) -> np.ndarray:
    """``weight + scale a b``, computed in fp32 on the host and rounded to the weight's dtype.

    Args:
        weight: ``[.., inputs, outputs]``, or with more axes for inputs or outputs.
        a: ``[.., inputs, rank]``.
        b: ``[.., rank, outputs]``.
        lora: gives the scale, and the pieces.
        path: of the weight, joined by "/".
    """
    a = np.asarray(a, np.float32)
    b = np.asarray(b, np.float32)
    product = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for columns, ranks, scale in lora.pieces_of(path, b.shape[-1]):
        part = a[..., ranks] @ b[..., : ranks.stop - ranks.start, columns]
        product[..., columns] = np.float32(scale) * part
    return (np.asarray(weight, np.float32) + product.reshape(weight.shape)).astype(weight.dtype)


def with_adapters(
    weight: Float[Array, "experts inputs outputs"],
    a: Float[Array, "experts inputs rank"],
    b: Float[Array, "experts rank outputs"],
    lora: LoRA,
    path: str,
) -> Float[Array, "experts inputs outputs"]:
    """``weight + scale a b`` for each expert, in the weight's dtype, summed in fp32.

    ``a`` and ``b`` are as in ``LoRA.shapes``; the path is joined by "/".
    """
    wide = weight.astype(jnp.float32)
    for columns, ranks, scale in lora.pieces_of(path, weight.shape[-1]):
        own = a[..., ranks], b[..., : ranks.stop - ranks.start, columns]
        part = scale * jnp.einsum("eir,ero->eio", *own, preferred_element_type=jnp.float32)
        after = weight.shape[-1] - columns.stop
        wide += jnp.pad(part, ((0, 0), (0, 0), (columns.start, after)))
    return wide.astype(weight.dtype)


def _scaled(a: Array, b: Array, lora: LoRA, path: str) -> tuple[Array, Array]:
    """A transposed and multiplied by the scale, and B with its blocks on the diagonal: ``[rank, ..]``."""
    pieces = lora.pieces_of(path, b.shape[-1])
    scales = np.repeat([piece.scale for piece in pieces], [piece.rank for piece in pieces])
    scale = scales[:, None] if len({*scales}) > 1 else scales[0]
    if [piece.columns for piece in pieces] != [slice(0, b.shape[-1])]:
        rows = [
            jnp.pad(
                b[: piece.rank, piece.columns],
                ((0, 0), (piece.columns.start, b.shape[-1] - piece.columns.stop)),
            )
            for piece in pieces
        ]
        b = jnp.concatenate(rows)
    return a.T * jnp.asarray(scale, a.dtype), b


@dataclass(frozen=True)
class LowRankOperand:
    """A weight with an adapter, or what data movement made of both, on its way to a product.

    Every axis of the weight belongs to A or to B: ``factors`` says which. Each factor has the axes that
    belong to it, in the weight's order, behind that of the rank.

    Attributes:
        base: the weight: an array or another operand.
        a: ``[rank, ..]``, multiplied by the scale.
        b: ``[rank, ..]``.
        seed: of dropout's random bits.
        factors: "a" or "b" for each axis of the weight.
        dropout: the probability.
        name: of the weight.
        reads: numbers of products, each of which drops other elements.
    """

    base: ArrayOperand | Fp8Operand
    a: Float[Array, "rank ..."]
    b: Float[Array, "rank ..."]
    seed: UInt32[Array, ""]
    factors: str
    dropout: float
    name: str
    reads: Iterator[int] = field(default_factory=itertools.count)

    kind = "has an adapter"
    way_out = "LoRA(targets=(..., '!{name}'))"

    @classmethod
    def of(
        cls, weight: Array | ArrayOperand | Fp8Operand, a: Array, b: Array, seed: Array, lora: LoRA, name: str
    ) -> "LowRankOperand":
        """From ``[inputs, rank]`` and ``[rank, outputs]``."""
        base = weight if isinstance(weight, ArrayOperand | Fp8Operand) else ArrayOperand(weight)
        shape = base.aval.shape
        cut = input_axes(name, shape)
        first, second = _scaled(a, b, lora, name)
        first, second = (x.reshape(-1, *own) for x, own in ((first, shape[:cut]), (second, shape[cut:])))
        factors = "a" * cut + "b" * (len(shape) - cut)
        return cls(base, first, second, seed, factors, lora.dropout, name)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """The array that the model believes it has."""
        return self.base.aval

    def in_tile(self, number: Array) -> "LowRankOperand":
        """The same weight to a tile of tokens, which drops elements of its own."""
        seed = self.seed ^ (number.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
        return replace(self, seed=seed) if self.dropout else self

    def astype(self, dtype: DTypeLike) -> "LowRankOperand":
        """The same weight to a model that computes in another dtype."""
        return self._with(self.base.astype(dtype), self.a.astype(dtype), self.b.astype(dtype), self.factors)

    def moved(self, primitive: core.Primitive, params: Params) -> "list[LowRankOperand] | None":
        """The operands that a primitive makes which only moves elements; None if it mixes axes of A and B."""
        factors = self.factors
        match primitive.name:
            case "transpose":
                order = params["permutation"]
                after = "".join(factors[axis] for axis in order)
                a, b = self._each(lambda x, own: lax.transpose(x, (0, *(own[i] for i in order if i in own))))
            case "reshape" if params["dimensions"] is None:
                if (parts := self._reshaped(params["new_sizes"])) is None:
                    return None
                a, b, after = parts
            case "squeeze":
                gone = [axis % len(factors) for axis in params["dimensions"]]
                after = "".join(which for axis, which in enumerate(factors) if axis not in gone)
                a, b = self._each(lambda x, own: lax.squeeze(x, [own[i] for i in gone if i in own]))
            case "slice" | "split" | "rev":
                bases = self.base.moved(primitive, params)
                a, b = self._each(functools.partial(_parts, primitive, params))
                return [self._with(*parts, factors) for parts in zip(bases, a, b, strict=True)]
            case "copy" | "name":
                a, b = self.a, self.b
                after = factors
            case _:
                return None
        return [self._with(self.base.moved(primitive, params)[0], a, b, after)]

    def product(
        self, x: Array, x_axes: Sequence[int], axes: Sequence[int], equation: core.JaxprEqn
    ) -> Array | None:
        """``x`` times the weight, of shape ``[*free axes of x, *free axes of the weight]``.

        Returns:
            The product; None if it contracts axes of both A and B, or not all of one.
        """
        contracted = {self.factors[axis] for axis in axes}
        if len(contracted) != 1 or {*axes} != {i for i, own in enumerate(self.factors) if own in contracted}:
            return None
        base = self.base.product(x, x_axes, axes, equation)
        # x W, which contracts the axes of A, needs (x A) B; x W^T, which contracts those of B, (x B^T) A^T.
        first, second = (self.a, self.b) if contracted == {"a"} else (self.b, self.a)
        own = [axis for axis, which in enumerate(self.factors) if which in contracted]
        dropped = _dropped(x, self.seed, next(self.reads), self.dropout)
        inner = tuple(x_axes), tuple(own.index(axis) + 1 for axis in axes)
        narrow = lax.dot_general(dropped, first, (inner, ((), ())), preferred_element_type=x.dtype)
        last = ((narrow.ndim - 1,), (0,))
        wide = lax.dot_general(narrow, second, (last, ((), ())), preferred_element_type=base.dtype)
        return checkpoint_name(base + wide, SUM)

    def _with(self, base: ArrayOperand | Fp8Operand, a: Array, b: Array, factors: str) -> "LowRankOperand":
        return LowRankOperand(base, a, b, self.seed, factors, self.dropout, self.name, self.reads)

    def _each[T](self, change: Callable[[Array, dict[int, int]], T]) -> tuple[T, T]:
        """``change(factor, own)`` of A and of B; ``own`` gives, for an axis of the weight, the factor's."""

        def one(which: str, factor: Array) -> T:
            axes = [axis for axis, owner in enumerate(self.factors) if owner == which]
            return change(factor, {axis: i + 1 for i, axis in enumerate(axes)})

        return one("a", self.a), one("b", self.b)

    def _reshaped(self, target: Sequence[int]) -> tuple[Array, Array, str] | None:
        """A, B and ``factors`` after axes are split or joined, those of A and of B each for themselves."""
        first = self.factors[0] if self.factors else "a"
        count = len(self.factors) - len(self.factors.lstrip(first))
        if first in self.factors[count:]:
            return None
        sizes = self.aval.shape
        wanted = math.prod(sizes[:count])
        for cut in range(len(target) + 1):
            if math.prod(target[:cut]) == wanted and math.prod(target[cut:]) == math.prod(sizes[count:]):
                second = "b" if first == "a" else "a"
                parts = {first: target[:cut], second: target[cut:]}
                a, b = (x.reshape(x.shape[0], *parts[which]) for which, x in (("a", self.a), ("b", self.b)))
                return a, b, first * cut + second * (len(target) - cut)
        return None


jax.tree_util.register_dataclass(
    LowRankOperand, ["base", "a", "b", "seed"], ["factors", "dropout", "name", "reads"]
)


def _parts(primitive: core.Primitive, params: Params, x: Array, own: Mapping[int, int]) -> list[Array]:
    """A slice, a split or a reversal of a weight's axes, applied to those that a factor has."""
    match primitive.name:
        case "rev":
            return [lax.rev(x, [own[axis] for axis in params["dimensions"] if axis in own])]
        case "split":
            if params["axis"] not in own:
                return [x] * len(params["sizes"])
            return list(lax.split(x, params["sizes"], own[params["axis"]]))
    start = [0] * x.ndim
    limit = list(x.shape)
    strides = [1] * x.ndim
    for axis, place in own.items():
        start[place], limit[place] = params["start_indices"][axis], params["limit_indices"][axis]
        strides[place] = (params["strides"] or [1] * len(params["start_indices"]))[axis]
    return [lax.slice(x, start, limit, strides)]


def _dropped(x: Array, seed: Array, number: int, rate: float) -> Array:
    """Dropout: each element is zero with probability ``rate``, the others grow by 1 / (1 - rate)."""
    if not rate:
        return x
    key = jax.random.wrap_key_data(jnp.stack([seed, seed ^ jnp.uint32(0x10A + number)]), impl="threefry2x32")
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / jnp.asarray(1 - rate, x.dtype), 0)
