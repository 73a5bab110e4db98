"""Moments in bfloat16: half of their memory, and of their part of a checkpoint and of copies from the host.

An average that decays by 0.999 changes by less in a step than bfloat16 tells apart, so rounding to nearest
would keep it where it is. Rounding to either neighbour, with a probability in proportion to what is cut off,
keeps its mean right (stochastic rounding: Gupta et al., 2015; with bfloat16: Zamirai et al., 2020).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import GetAttrKey, KeyPath
from jaxtyping import Array, BFloat16, Float32, Int32, PyTree, UInt32

from zerojax.errors import ConfigurationError
from zerojax.sharding.param_tree import from_tree
from zerojax.sharding.wire_format import mix
from zerojax.zero_config import ZeroConfig

MOMENTS = ("mu", "nu", "nu_max", "trace")
"""What optax calls moments in its states. Other arrays of a weight's shape, such as averages of weights, stay
as they are."""


class RoundedState(NamedTuple):
    """The state of ``in_bfloat16``.

    Attributes:
        rounds: the number of updates, by which random bits differ.
        rounded: the transform's state, its moments in bfloat16.
    """

    rounds: Int32[Array, ""]
    rounded: PyTree[Array]


def with_moments_as_set(tx: optax.GradientTransformation, zero: ZeroConfig) -> optax.GradientTransformation:
    """``tx``, or with ``ZeroConfig.moments="bfloat16"`` what ``in_bfloat16`` makes of it."""
    return in_bfloat16(tx) if zero.moments == "bfloat16" else tx


def in_bfloat16(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transform that keeps the moments of another in bfloat16, and computes with them in fp32.

    An element's random bits are a hash of its gradient and of the number of updates. So they are the same
    wherever the element is stored, and however a compiler rounds the moment before.

    It takes trees that are nested by path.

    Returns:
        A transform whose state has bfloat16 arrays in place of the fp32 ones named in ``MOMENTS``.

    Raises:
        ConfigurationError: the state has none of them, or the transform subtracts one from another.
    """

    def init(params: PyTree[Array]) -> RoundedState:
        exact = tx.init(params)
        if any(map(_is_variance, jax.tree.leaves(exact, is_leaf=_is_variance))):
            raise ConfigurationError(
                'ZeroConfig.moments="bfloat16": the optimizer subtracts the square of one moment from '
                "another (RMSProp with centered=True does), which may be below zero when they are rounded: "
                'leave moments at "float32".'
            )
        rounded = _with_moments(exact, params, lambda x, *_: x.astype(jnp.bfloat16))
        if [x.dtype for x in jax.tree.leaves(rounded)] == [x.dtype for x in jax.tree.leaves(exact)]:
            raise ConfigurationError(
                f'ZeroConfig.moments="bfloat16": the optimizer has no fp32 moments ({", ".join(MOMENTS)} in '
                'its state): leave moments at "float32".'
            )
        return RoundedState(jnp.zeros((), jnp.int32), rounded)

    def update(
        updates: PyTree[Array], state: PyTree[Array], params: PyTree[Array] = None
    ) -> tuple[PyTree[Array], RoundedState]:
        before, gradients = RoundedState(*state), updates
        like = jax.eval_shape(tx.init, params)
        exact = jax.tree.map(lambda x, one: x.astype(one.dtype), before.rounded, like)
        rounds = jnp.asarray(optax.safe_increment(before.rounds))
        updates, after = tx.update(updates, exact, params)

        def rounded(x: Array, gradient: Array, number: int) -> Array:
            bits = lax.bitcast_convert_type(gradient, jnp.uint32)
            return round_to_bfloat16(x, mix(rounds.astype(jnp.uint32), number, bits))

        return updates, RoundedState(rounds, _with_moments(after, gradients, rounded))

    return optax.GradientTransformation(init, update)


def _is_variance(state: object) -> bool:
    """Whether it is a state of ``optax.scale_by_stddev``, whose two classes optax does not export both."""
    return type(state).__name__.startswith("ScaleByRStdDev")


def _with_moments(
    state: PyTree[Array], tree: PyTree[Array], change: Callable[[Array, Array, int], Array]
) -> PyTree[Array]:
    """``state`` with ``change(moment, its leaf of tree, number of its name)`` of its fp32 moments."""
    leaves = from_tree(tree)

    def one(keys: KeyPath, x: Array) -> Array:
        for place, key in enumerate(keys):
            if isinstance(key, GetAttrKey) and key.name in MOMENTS and x.dtype == jnp.float32:
                leaf = leaves.get(tuple(str(getattr(key, "key", key)) for key in keys[place + 1 :]))
                # NovoGrad's second moment is one number of each weight.
                if leaf is not None and leaf.shape == x.shape:
                    return change(x, leaf, MOMENTS.index(key.name))
        return x

    return jax.tree_util.tree_map_with_path(one, state)


def round_to_bfloat16(x: Float32[Array, "..."], noise: UInt32[Array, "..."]) -> BFloat16[Array, "..."]:
    """Round stochastically: to either neighbour, with the probability that keeps the mean.

    Values that are not finite are rounded to nearest. Of the noise, the lower 16 bits are used.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # A carry, which comes with the probability of what is cut off, rounds away from zero.
    rounded = ((bits + (noise & 0xFFFF)) >> 16).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(rounded, jnp.bfloat16), x.astype(jnp.bfloat16))
