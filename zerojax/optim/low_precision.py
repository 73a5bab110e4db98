"""Moments in fewer bits: less memory, smaller checkpoints and shorter copies from and to the host.

An average that decays by 0.999 changes in a step by less than bfloat16's resolution, so rounding to nearest
would leave it unchanged. Stochastic rounding goes to either neighbour, with a probability in proportion to
the remainder, and keeps the mean right (Gupta et al., 2015; with bfloat16: Zamirai et al., 2020).

In 8 bits, averages of gradients (``mu``, ``trace``) have a sign, five bits of exponent and two of mantissa.
Averages of squares (``nu``) have six bits of exponent and no sign, since their exponents are twice as large.
Optimizers in 8 bits usually have a scale for each block (Dettmers et al., 2022). Without scales, moments can
be sharded, moved and saved like any array. The smallest magnitude is below AdamW's ``eps`` of 1e-8, which
hides smaller ones. The largest is 12, which clipped gradients do not reach.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import GetAttrKey, KeyPath
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, Int8, Int32, Num, PyTree, UInt8, UInt32

from zerojax.errors import ConfigurationError
from zerojax.sharding.param_tree import from_tree
from zerojax.sharding.wire_format import mix
from zerojax.zero_config import ZeroConfig
from zerojax.zero_config.options import Moments

MOMENTS = ("mu", "nu", "nu_max", "trace")
"""optax's names of moments in its states. Other arrays of a weight's shape, such as averages of weights, stay
as they are."""
_SQUARES = ("nu", "nu_max")


class RoundedState(NamedTuple):
    """The state of ``in_low_precision``.

    Attributes:
        rounds: the number of updates, by which random bits differ.
        rounded: the transform's state, its moments in bfloat16 or as codes of 8 bits.
    """

    rounds: Int32[Array, ""]
    rounded: PyTree[Array]


def with_moments_as_set(tx: optax.GradientTransformation, zero: ZeroConfig) -> optax.GradientTransformation:
    """``tx``, with its moments in the dtype of ``ZeroConfig.moments``."""
    return tx if zero.moments == "float32" else in_low_precision(tx, zero.moments)


def in_low_precision(tx: optax.GradientTransformation, moments: Moments) -> optax.GradientTransformation:
    """A transform that keeps the moments of another in fewer bits, and computes with them in fp32.

    An element's random bits are a hash of its gradient and of the number of updates. So they do not depend on
    where the element is stored, or on how a compiler rounds the moment before.

    Args:
        tx: the other transform, of trees that are nested by path.
        moments: "bfloat16" or "float8".

    Returns:
        A transform whose state has bfloat16 arrays, or codes of ``to_codes``, in place of the fp32 arrays
        named in ``MOMENTS``.
    """

    def dtype(name: str) -> DTypeLike:
        return jnp.bfloat16 if moments == "bfloat16" else jnp.uint8 if name in _SQUARES else jnp.int8

    def init(params: PyTree[Array]) -> RoundedState:
        exact = tx.init(params)
        if any(map(_is_variance, jax.tree.leaves(exact, is_leaf=_is_variance))):
            raise ConfigurationError(
                f'ZeroConfig.moments="{moments}": the optimizer subtracts the square of one moment from '
                "another (RMSProp with centered=True does), which may be below zero when they are rounded: "
                'leave moments at "float32".'
            )
        rounded = _with_moments(exact, params, lambda x, _, name: as_moment(x, dtype(name)))
        if [x.dtype for x in jax.tree.leaves(rounded)] == [x.dtype for x in jax.tree.leaves(exact)]:
            raise ConfigurationError(
                f'ZeroConfig.moments="{moments}": the optimizer has no fp32 moments ({", ".join(MOMENTS)} in '
                'its state): leave moments at "float32".'
            )
        return RoundedState(jnp.zeros((), jnp.int32), rounded)

    def update(
        updates: PyTree[Array], state: PyTree[Array], params: PyTree[Array] = None
    ) -> tuple[PyTree[Array], RoundedState]:
        before, gradients = RoundedState(*state), updates
        like = jax.eval_shape(tx.init, params)
        exact = jax.tree.map(lambda x, one: as_moment(x, one.dtype), before.rounded, like)
        rounds = jnp.asarray(optax.safe_increment(before.rounds))
        updates, after = tx.update(updates, exact, params)

        def rounded(x: Array, gradient: Array, name: str) -> Array:
            bits = lax.bitcast_convert_type(gradient, jnp.uint32)
            noise = mix(rounds.astype(jnp.uint32), MOMENTS.index(name), bits)
            return round_to_bfloat16(x, noise) if moments == "bfloat16" else to_codes(x, dtype(name), noise)

        return updates, RoundedState(rounds, _with_moments(after, gradients, rounded))

    return optax.GradientTransformation(init, update)


def _is_variance(state: object) -> bool:
    """Whether it is the state of ``optax.scale_by_stddev``; optax exports only one of its two classes."""
    return type(state).__name__.startswith("ScaleByRStdDev")


def _with_moments(
    state: PyTree[Array], tree: PyTree[Array], change: Callable[[Array, Array, str], Array]
) -> PyTree[Array]:
    """``state`` with ``change(moment, its leaf of tree, its name)`` of its fp32 moments."""
    leaves = from_tree(tree)

    def one(keys: KeyPath, x: Array) -> Array:
        for place, key in enumerate(keys):
            if isinstance(key, GetAttrKey) and key.name in MOMENTS and x.dtype == jnp.float32:
                leaf = leaves.get(tuple(str(getattr(key, "key", key)) for key in keys[place + 1 :]))
                # NovoGrad's second moment is one number of each weight.
                if leaf is not None and leaf.shape == x.shape:
                    return change(x, leaf, key.name)
        return x

    return jax.tree_util.tree_map_with_path(one, state)


def is_rounded(path: KeyPath) -> bool:
    """Whether an array of an optimizer's state may be a moment in few bits."""
    names = [key.name for key in path if isinstance(key, GetAttrKey)]
    return "rounded" in names and any(name in MOMENTS for name in names)


def round_to_bfloat16(x: Float32[Array, "..."], noise: UInt32[Array, "..."]) -> BFloat16[Array, "..."]:
    """Round stochastically, by the lower 16 bits of the noise; round infinities and NaN to nearest."""
    rounded = lax.bitcast_convert_type(_upper_bits(x, 16, noise).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _upper_bits(x: Float32[Array, "..."], cut: int, noise: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A number's bits without the lowest ``cut``, rounded stochastically by as many bits of the noise."""
    # The sum carries with a probability in proportion to the bits that are cut off: it rounds away from zero.
    return (lax.bitcast_convert_type(x, jnp.uint32) + (noise & ((1 << cut) - 1))) >> cut


class _Codes(NamedTuple):
    """The numbers that codes of 8 bits stand for: code 1 for 2**lowest, and four in each octave.

    Attributes:
        lowest: the exponent of the smallest number.
        largest: the largest code.
        nan: the code of infinities and NaN.
    """

    lowest: int
    largest: int
    nan: int

    @property
    def before(self) -> int:
        """The upper bits of an fp32 number, less its code."""
        return 4 * (127 + self.lowest) - 1


_CUT = 21  # leaves fp32's exponent and two bits of its mantissa
_HALF = 1 << 31 | 1 << (_CUT - 1)
"""Noise that rounds to nearest: by its upper bits below the smallest number, by its lower bits else."""
_CODES = {
    jnp.dtype(jnp.int8): _Codes(-28, 127, -128),
    jnp.dtype(jnp.uint8): _Codes(-56, 254, 255),
}


def to_codes(
    x: Float32[Array, "..."], dtype: DTypeLike, noise: UInt32[Array, "..."]
) -> Int8[Array, "..."] | UInt8[Array, "..."]:
    """Round a moment stochastically to 8 bits.

    Args:
        x: averages of gradients, or of squares, which are not below zero.
        dtype: int8 for averages of gradients: sign and magnitude from 2**-28 to 12; or uint8 for averages of
            squares: from 2**-56 to 160.
        noise: random bits for each element, or for all.

    Returns:
        The codes. Their mean over the noise is x, with two exceptions. A number above the largest becomes the
        largest. A square below the smallest becomes the smallest, so that nothing is divided by zero.
    """
    codes = _CODES[jnp.dtype(dtype)]
    smallest = np.float32(2.0**codes.lowest)
    if dtype == jnp.uint8:
        size = jnp.maximum(x, 0)
        small = size > 0
    else:
        size = jnp.abs(x)
        chance = (noise >> 8).astype(jnp.float32) * np.float32(2.0**-24)
        small = chance * smallest < size
    code = _upper_bits(size, _CUT, noise).astype(jnp.int32) - codes.before
    code = jnp.where(size < smallest, small.astype(jnp.int32), jnp.clip(code, 1, codes.largest))
    code = jnp.where(jnp.isfinite(x), jnp.where(x < 0, -code, code), codes.nan)
    return code.astype(dtype)


def as_moment(x: Num[Array, "..."], dtype: DTypeLike) -> Num[Array, "..."]:
    """A moment in another dtype of ``moments``, rounded to nearest; int8 and uint8 are ``to_codes``'."""
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if (codes := _CODES.get(x.dtype)) is not None:
        code = x.astype(jnp.int32)
        size = ((jnp.abs(code) + codes.before) << _CUT).astype(jnp.uint32)
        exact = lax.bitcast_convert_type(size, jnp.float32)
        exact = jnp.where(code == 0, 0.0, jnp.where(code < 0, -exact, exact))
        return jnp.where(code == codes.nan, jnp.nan, exact).astype(dtype)
    if dtype in _CODES:
        return to_codes(x.astype(jnp.float32), dtype, jnp.uint32(_HALF))
    return x.astype(dtype)


def dtype_in_checkpoint(dtype: DTypeLike) -> np.dtype:
    """The dtype of a moment in a checkpoint: bfloat16 for codes, whose values it all represents."""
    return jnp.dtype(jnp.bfloat16) if jnp.dtype(dtype) in _CODES else jnp.dtype(dtype)
