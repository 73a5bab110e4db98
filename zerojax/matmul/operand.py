"""A weight in the form in which a product reads it, and how code recognises it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import core
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num, UInt8

from zerojax.matmul import fp8

Params = Mapping[str, Any]
"""The parameters of a primitive, by name."""


@dataclass(frozen=True)
class Fp8Operand:
    """A weight, or what transposes, reshapes and slices made of it, on its way to an fp8 product.

    Attributes:
        codes: e4m3, as bytes.
        gradient: zeros that nothing reads, whose cotangent is the weight's gradient: codes have none.
        scale: of the whole weight.
        name: of the weight.
        trained: whether the weight has a gradient.
    """

    codes: UInt8[Array, "..."]
    gradient: Num[Array, "..."]
    scale: Float[Array, ""]
    name: str
    trained: bool = True

    kind = "is kept in fp8"
    way_out = "ZeroConfig(fp8=(..., '!{name}'))"

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """The array that the model believes it has."""
        return jax.ShapeDtypeStruct(self.gradient.shape, self.gradient.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that the model believes it has."""
        return self.aval.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array that the model believes it has."""
        return self.aval.dtype

    def moved(self, primitive: core.Primitive, params: Params) -> "list[Fp8Operand]":
        """The operands that a primitive makes, which only moves elements."""
        parts = (array_moved(x, primitive, params) for x in (self.codes, self.gradient))
        return [replace(self, codes=codes, gradient=own) for codes, own in zip(*parts, strict=True)]

    def product(self, x: Array, x_axes: Sequence[int], axes: Sequence[int], equation: core.JaxprEqn) -> Array:
        """``x`` times the weight, summed over ``x_axes`` and the weight's ``axes``, in the dtype of
        ``equation``.

        The result has the free axes of ``x``, then the free axes of the weight.
        """
        x_free = [axis for axis in range(x.ndim) if axis not in x_axes]
        free = [axis for axis in range(self.codes.ndim) if axis not in axes]
        size = math.prod(self.codes.shape[axis] for axis in axes)
        tokens = lax.transpose(x, (*x_free, *x_axes)).reshape(-1, size)
        codes, gradient = (
            lax.transpose(w, (*axes, *free)).reshape(size, -1) for w in (self.codes, self.gradient)
        )
        result = equation.outvars[0].aval
        assert isinstance(result, ShapedArray)
        out = cast(Array, fp8.product(tokens, codes, self.scale, gradient, result.dtype, self.trained))
        return out.reshape(*(x.shape[axis] for axis in x_free), *(self.codes.shape[axis] for axis in free))

    def astype(self, dtype: DTypeLike) -> "Fp8Operand":
        """The same weight to a model that computes in another dtype."""
        return replace(self, gradient=self.gradient.astype(dtype))

    def decoded(self) -> Num[Array, "..."]:
        """The weight as an array: the codes over the scale, in the dtype that the model expects."""
        return (fp8.decode(self.codes, jnp.float32) / self.scale).astype(self.dtype)

    def kept(self) -> "Fp8Operand":
        """The operand for a backward pass, without the zeros of ``gradient``: only its dtype is read."""
        return replace(self, gradient=self.gradient[:0])

    def cotangent(self, gradient: Num[Array, "..."]) -> "Fp8Operand":
        """The cotangent of the operand, from the gradient of the weight."""
        none: Any = np.zeros(self.codes.shape, jax.dtypes.float0)
        return replace(self, codes=none, gradient=gradient, scale=jnp.zeros_like(self.scale))


jax.tree_util.register_dataclass(Fp8Operand, ["codes", "gradient", "scale"], ["name", "trained"])


@dataclass(frozen=True)
class ArrayOperand:
    """A weight that is an array, unsharded, or what data movement made of it."""

    weight: Num[Array, "..."]

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """The array that the model has."""
        return jax.ShapeDtypeStruct(self.weight.shape, self.weight.dtype)

    def moved(self, primitive: core.Primitive, params: Params) -> list[Self]:
        """The operands that a primitive makes, which only moves elements."""
        return [type(self)(x) for x in array_moved(self.weight, primitive, params)]

    def product(self, x: Array, x_axes: Sequence[int], axes: Sequence[int], equation: core.JaxprEqn) -> Array:
        """``x`` times the weight; see ``Fp8Operand.product``."""
        params = equation.params
        return lax.dot_general(
            x, self.weight, ((tuple(x_axes), tuple(axes)), ((), ())),
            precision=params["precision"], preferred_element_type=params["preferred_element_type"],
        )  # fmt: skip

    def astype(self, dtype: DTypeLike) -> Self:
        """The same weight to a model that computes in another dtype."""
        return type(self)(self.weight.astype(dtype))


@dataclass(frozen=True)
class LayerOperand(ArrayOperand):
    """One layer of a stacked weight, or what data movement made of it, which products read where it lies.

    XLA passes a layer of a stack to cuBLAS by its address, unless cuBLAS also adds a bias or applies GELU to
    the product: then it copies the layer first. So neither is fused into these products. A bias or a GELU
    of a few tokens costs less than a copy of the weight; everything but a product reads the array.
    """

    def product(self, x: Array, x_axes: Sequence[int], axes: Sequence[int], equation: core.JaxprEqn) -> Array:
        """``x`` times the weight; see ``Fp8Operand.product``."""
        # Nothing is fused into a product behind a barrier.
        return lax.optimization_barrier(super().product(x, x_axes, axes, equation))


for _kind in (ArrayOperand, LayerOperand):
    jax.tree_util.register_dataclass(_kind, ["weight"], [])


def array_moved(weight: Array, primitive: core.Primitive, params: Params) -> list[Array]:
    """The results of a primitive that only moves elements, such as a transpose or a slice."""
    made = primitive.bind(weight, **params)
    return made if primitive.multiple_results else [made]
