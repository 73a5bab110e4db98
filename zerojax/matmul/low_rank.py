"""A weight and its low-rank adapter on their way to a product: ``x W + scale (x A) B``.

The sum ``W + scale A B`` is not computed, and neither is the gradient of W, which costs a third of an
ordinary backward pass. Experts are the exception: their sums are computed layer by layer, because each expert
has its own adapter, and the grouped products of a mixture read one array.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from zerojax.matmul.lora import LoRA, Piece, input_axes
from zerojax.matmul.operand import ArrayOperand, Fp8Operand, Params

SUM = "zerojax: product with a weight and its adapter"
"""The name under which rematerialisation keeps the sum of two parts alone (``zerojax.schedule.remat``)."""


def with_adapters(
    weight: Float[Array, "experts inputs outputs"],
    a: Float[Array, "experts inputs rank"],
    b: Float[Array, "experts rank outputs"],
    lora: LoRA,
    path: str,
) -> Float[Array, "experts inputs outputs"]:
    """``weight + scale a b`` for each expert, in the weight's dtype, summed in fp32; see ``LoRA.shapes``."""
    wide = weight.astype(jnp.float32)
    for piece in lora.pieces_of(path, weight.shape[-1]):
        own = a[..., piece.ranks], b[..., : piece.rank, piece.columns]
        part = piece.scale * jnp.einsum("eir,ero->eio", *own, preferred_element_type=jnp.float32)
        wide += _at_columns(part, piece, weight.shape[-1])
    return wide.astype(weight.dtype)


def _at_columns(x: Array, piece: Piece, columns: int) -> Array:
    """A piece's columns among zeros, as many as the whole weight has."""
    around = (piece.columns.start, columns - piece.columns.stop)
    return jnp.pad(x, (*((0, 0) for _ in x.shape[1:]), around))


def _scaled(a: Array, b: Array, lora: LoRA, path: str) -> tuple[Array, Array]:
    """A transposed and multiplied by the scale, and B with its blocks on the diagonal: ``[rank, ..]``."""
    pieces = lora.pieces_of(path, b.shape[-1])
    scales = np.repeat([piece.scale for piece in pieces], [piece.rank for piece in pieces])
    scale = scales[:, None] if len({*scales}) > 1 else scales[0]
    if [piece.columns for piece in pieces] != [slice(0, b.shape[-1])]:
        b = jnp.concatenate([_at_columns(b[: x.rank, x.columns], x, b.shape[-1]) for x in pieces])
    return a.T * jnp.asarray(scale, a.dtype), b


@dataclass(frozen=True)
class LowRankOperand:
    """A weight with an adapter on its way to a product, both moved alike.

    Every axis of the weight belongs to A or to B. A factor has first the axis of the rank, and then its axes
    in the weight's order.

    Attributes:
        base: the weight: an array or another operand.
        a: ``[rank, ..]``, multiplied by the scale.
        b: ``[rank, ..]``.
        seed: seeds dropout.
        factors: "a" or "b" for each axis of the weight.
        dropout: the probability.
        name: the weight's name.
        reads: numbers the products, so that each drops other elements.
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
        """From A ``[inputs, rank]`` and B ``[rank, outputs]``; ``seed`` is for dropout."""
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
        """The weight for a tile of tokens; each tile drops other elements."""
        seed = self.seed ^ (number.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
        return replace(self, seed=seed) if self.dropout else self

    def astype(self, dtype: DTypeLike) -> "LowRankOperand":
        """The weight for a model that computes in another dtype."""
        base, a, b = (x.astype(dtype) for x in (self.base, self.a, self.b))
        return replace(self, base=base, a=a, b=b)

    def moved(self, primitive: core.Primitive, params: Params) -> "list[LowRankOperand] | None":
        """The results of a primitive that only moves elements; None if it mixes axes of A and B."""
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
                parts = zip(bases, a, b, strict=True)
                return [replace(self, base=base, a=own, b=other) for base, own, other in parts]
            case "copy" | "name":
                a, b = self.a, self.b
                after = factors
            case _:
                return None
        return [replace(self, base=self.base.moved(primitive, params)[0], a=a, b=b, factors=after)]

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
        # x W contracts the axes of A and adds (x A) B; x W^T contracts the axes of B and adds (x B^T) A^T.
        first, second = (self.a, self.b) if contracted == {"a"} else (self.b, self.a)
        own = [axis for axis, which in enumerate(self.factors) if which in contracted]
        dropped = _dropped(x, self.seed, next(self.reads), self.dropout)
        inner = tuple(x_axes), tuple(own.index(axis) + 1 for axis in axes)
        narrow = lax.dot_general(dropped, first, (inner, ((), ())), preferred_element_type=x.dtype)
        last = ((narrow.ndim - 1,), (0,))
        wide = lax.dot_general(narrow, second, (last, ((), ())), preferred_element_type=base.dtype)
        return checkpoint_name(base + wide, SUM)

    def _each[T](self, change: Callable[[Array, dict[int, int]], T]) -> tuple[T, T]:
        """``change(factor, own)`` of A and of B; ``own`` maps axes of the weight to the factor's axes."""

        def one(which: str, factor: Array) -> T:
            axes = [axis for axis, owner in enumerate(self.factors) if owner == which]
            return change(factor, {axis: i + 1 for i, axis in enumerate(axes)})

        return one("a", self.a), one("b", self.b)

    def _reshaped(self, target: Sequence[int]) -> tuple[Array, Array, str] | None:
        """A, B and ``factors`` after axes of A, or axes of B, are split or joined."""
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
    """Apply a slice, a split or a reversal of a weight's axes to the axes that a factor has."""
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
