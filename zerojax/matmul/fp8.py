"""8-bit floating point with one scale per tensor: codes, scales, and the products of a layer with a weight.

Weights and activations are e4m3 (4 bits of exponent, largest value 448). Gradients of activations are e5m2 (5
bits, 57344). See section 3 of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022). A tensor is
multiplied by a scale that takes its largest magnitude close to the largest value. Scales are powers of two:
they round nothing, and a weight that does not change keeps its code while others do.

On a GPU with fp8 units XLA turns each product here into one cuBLASLt call (``__cublas$lt$matmul$f8``).
Elsewhere the same codes are multiplied in the dtype of the activations: the results differ only in the
order of sums.
"""

import functools
import re
from typing import NamedTuple, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num, PyTree, UInt8

from pallas_kernels import cast_transpose
from zerojax.errors import ConfigurationError

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
SCALE = "zerojax: scale of fp8 activations"
"""The name under which rematerialisation keeps the scales of activations (``zerojax.schedule.remat``)."""


def has_fp8(device: object) -> bool:
    """Whether a device multiplies fp8 itself: NVIDIA's GPUs of compute capability 8.9 and above."""
    capability = re.match(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return capability is not None and (int(capability[1]), int(capability[2])) >= (8, 9)


def scale_for(peak: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """The largest power of two that takes ``peak`` to at most the largest value of an fp8 dtype.

    Args:
        peak: largest magnitudes, fp32. Where one is 0, infinite or NaN, the scale is 1.
        dtype: ``E4M3`` or ``E5M2``.

    Returns:
        fp32, at most 2^100, so that its inverse is a normal number.
    """
    fraction, exponent = np.frexp(float(jnp.finfo(dtype).max))
    own, power = jnp.frexp(peak.astype(jnp.float32))
    power = int(exponent) - power - (own > np.float32(fraction))
    scale = jnp.ldexp(jnp.float32(1), jnp.minimum(power, 100))
    return jnp.where((peak > 0) & jnp.isfinite(peak), scale, 1)


def encode(x: Float[Array, "..."], scale: Float[Array, "..."] | float = 1) -> UInt8[Array, "..."]:
    """The e4m3 codes of ``x * scale``, as bytes, clipped to 448; NaN stays NaN."""
    top = float(jnp.finfo(E4M3).max)
    scaled = jnp.clip(x.astype(jnp.float32) * scale, -top, top)
    return lax.bitcast_convert_type(scaled.astype(E4M3), jnp.uint8)


def decode(codes: UInt8[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """The numbers of codes, still multiplied by the scale; exact in bf16 and wider."""
    return lax.bitcast_convert_type(codes, E4M3).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def product(
    x: Num[Array, "tokens k"],
    codes: UInt8[Array, "k n"],
    scale: Float[Array, ""],
    gradient: Num[Array, "k n"],
    dtype: DTypeLike,
    trained: bool = True,
) -> Num[Array, "tokens n"]:
    """``x`` times a weight, both in e4m3, summed in fp32.

    The backward pass multiplies the cotangent, in e5m2, with the weight and with ``x`` in the same codes. The
    weight's gradient is summed without fast accumulation, which would lose several percent of it.

    Args:
        x: activations.
        codes: the weight's codes, made with ``scale``; they have no gradient.
        scale: the weight's scale.
        gradient: never read: its cotangent is the weight's gradient, and has its dtype.
        dtype: the result's dtype.
        trained: whether the weight's gradient is wanted; otherwise it is zero.
    """
    return _forward(x, codes, scale, gradient, dtype, trained)[0]


class _Residuals(NamedTuple):
    """The residuals of a product.

    Attributes:
        x: the activations in e4m3; None if the weight's gradient is not wanted.
        x_scale: their scale.
        codes: the weight's codes.
        scale: the weight's scale.
        like: no elements of the activations and of ``gradient``: their dtypes, and that they have cotangents.
    """

    x: Num[Array, "tokens k"] | None
    x_scale: Float[Array, ""]
    codes: UInt8[Array, "k n"]
    scale: Float[Array, ""]
    like: tuple[Array, Array]


def _forward(
    x: Num[Array, "tokens k"],
    codes: UInt8[Array, "k n"],
    scale: Float[Array, ""],
    gradient: Num[Array, "k n"],
    dtype: DTypeLike,
    trained: bool,
) -> tuple[Num[Array, "tokens n"], _Residuals]:
    own = x.astype(_wide(x.dtype))
    own_scale = scale_of(own, E4M3)
    own = cast(own, own_scale, E4M3)
    weight = lax.bitcast_convert_type(codes, E4M3)
    like = (x[:0], gradient[:0])
    out = underivable(_dot((own, own_scale), (weight, scale), (1, 0), dtype), like)
    return out, _Residuals(own if trained else None, own_scale, codes, scale, like)


def _backward(
    dtype: DTypeLike, trained: bool, residuals: _Residuals, cotangent: Num[Array, "tokens n"]
) -> tuple[Array, np.ndarray, Array, Array]:
    own, own_scale, codes, scale, like = residuals
    weight = lax.bitcast_convert_type(codes, E4M3)
    arrived = cotangent.astype(_wide(cotangent.dtype))
    if own is not None:  # trained
        # The barrier keeps the maximum in a separate pass. Fused with the computation of the cotangent, XLA
        # would store values shared with the activations, such as a GELU's tanh, and read them back. The
        # constant is there because XLA's double buffering cannot compile a barrier on a loop's carry alone.
        arrived, _ = lax.optimization_barrier((arrived, np.int32(0)))
        arrived_scale = scale_of(arrived, E5M2)
        # The kernel has no derivative; ``underivable`` below refuses a second one.
        arrived, turned = cast_transpose(*lax.stop_gradient((arrived, arrived_scale)), E5M2)
        # Without the barrier XLA transposes while it casts, which is three times slower than bytes alone.
        own = lax.optimization_barrier(own)
        precision = lax.Precision.HIGHEST
        of_weight = _dot((own, own_scale), (turned, arrived_scale), (0, 1), dtype, precision=precision)
    else:
        arrived_scale = scale_of(arrived, E5M2)
        arrived = cast(arrived, arrived_scale, E5M2)
        of_weight = jnp.zeros(codes.shape, like[1].dtype)
    of_x = _dot((arrived, arrived_scale), (weight, scale), (1, 1), dtype)
    found = (of_x.astype(like[0].dtype), of_weight.astype(like[1].dtype))
    of_x, of_weight = underivable(found, (like, cotangent[:0]))
    no_codes = np.zeros(codes.shape, jax.dtypes.float0)
    return of_x, no_codes, jnp.zeros_like(scale), of_weight


product.defvjp(_forward, _backward)


@jax.custom_vjp
def underivable[T: PyTree[Array]](values: T, given: PyTree[Array]) -> T:
    """Values that a derivative computed from ``given``; refuses to differentiate them again.

    A part of their derivative would go through codes, which have none, so it would be silently wrong.
    """
    del given
    return values


def _refuse(*_: object) -> Never:
    raise ConfigurationError(
        "a loss that itself takes a gradient (by jax.grad, say) is not differentiated through fp8 matmuls: "
        'set matmul_dtype="compute".'
    )


underivable.defvjp(lambda values, given: (underivable(values, given), None), _refuse)


def scale_of(x: Array, dtype: DTypeLike) -> Array:
    """The scale of an array in an fp8 dtype, by its largest magnitude; NaN, if that is not finite."""
    peak = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    scale = jnp.where(jnp.isfinite(peak), scale_for(peak, dtype), jnp.nan)
    return checkpoint_name(scale, SCALE)


def cast(x: Array, scale: Array, dtype: DTypeLike) -> Array:
    """``x * scale`` in an fp8 dtype."""
    # Without the barrier XLA would leave out the rounding where the product is not in fp8.
    return lax.optimization_barrier((x * scale.astype(x.dtype)).astype(dtype))


def _dot(
    a: tuple[Array, Array],
    b: tuple[Array, Array],
    contract: tuple[int, int],
    dtype: DTypeLike,
    precision: lax.Precision | None = None,
) -> Array:
    """The product of two scaled matrices, in the pattern that XLA turns into fp8 calls."""
    wide = _wide(dtype)
    left, right = (x.astype(wide) * (1 / scale).astype(wide) for x, scale in (a, b))
    axes = (((contract[0],), (contract[1],)), ((), ()))
    out = lax.dot_general(left, right, axes, precision=precision, preferred_element_type=wide)
    return out.astype(dtype)


def _wide(dtype: DTypeLike) -> jnp.dtype:
    """The dtype, or fp32 in place of one without the range that scales need, such as fp16."""
    return jnp.promote_types(dtype, jnp.bfloat16)
