"""Layers with a state of fixed size in place of keys and values: linear attention and convolutions.

They have the interface of ``zerojax.models.block.Attention``. ``project`` and ``join`` treat each token
alone, ``mix`` takes whole rows, and ``decode`` takes new tokens and the cache.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zerojax.adapters.loss import devices_a_row
from zerojax.errors import ConfigurationError
from zerojax.models.config import GPTConfig
from zerojax.models.delta_rule import gated_delta_rule, last_inputs, short_convolution
from zerojax.models.flash_attention import Documents
from zerojax.models.kv_cache import KVCache, Positions, Recurrence

_EPSILON = 1e-6
"""Added to the squared norms of queries and keys."""
Hidden = Float[Array, "batch time d_model"]
Projected = tuple[Array, ...]


class Before(NamedTuple):
    """The layer's memory of earlier tokens, when new tokens arrive.

    Attributes:
        inputs: the convolution's last inputs.
        state: the state of the gated delta rule, if the layer has one.
        valid: which of the new tokens are no padding.
    """

    inputs: Float[Array, "batch kept channels"]
    state: Float[Array, "batch heads dim value_dim"] | None
    valid: Bool[Array, "batch time"]


class _Recurrent(nnx.Module):
    """Common parts of recurrent layers. ``project`` returns the convolution's input first."""

    def __init__(self, config: GPTConfig, linear: Any, out: Any, rngs: nnx.Rngs):
        c = self.config = config
        self.inputs = linear(c.d_model, c.conv_channels)
        bound = c.conv_width**-0.5
        shape = (c.conv_width, c.conv_channels)
        self.conv = nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))
        self.out = out(c.recurrent_values, c.d_model)

    def project(self, x: Hidden, rope: object = None, kind: object = None) -> Projected:
        """The convolution's input and the gates of each token."""
        raise NotImplementedError

    def mixed(self, projected: Projected, numbers: Array | None, before: Before | None) -> tuple[Array, Any]:
        """The output before its projection, and the state after the tokens."""
        raise NotImplementedError

    def mix(self, projected: Projected, documents: Documents | None = None, windowed: object = True) -> Array:
        """The output of whole rows, before its projection; devices cannot share a row."""
        del windowed
        if devices_a_row() > 1:
            raise ConfigurationError(
                "[model] recurrent_layers need whole rows, but zero.sequence_parallel spreads each over "
                f"{devices_a_row()} devices: set it to 1."
            )
        return self.mixed(projected, None if documents is None else documents.numbers, None)[0]

    def decode(
        self, x: Hidden, positions: Positions, end: Int[Array, " batch"], cache: KVCache, layer: Any
    ) -> tuple[Array, KVCache]:
        """The output of new tokens before its projection, and the cache after them.

        A row that begins at position 0 ignores the cache's earlier content.
        """
        held: Recurrence = jax.tree.map(lambda x: x[layer], cache.recurrence)
        fresh = positions[:, 0] == 0
        held = jax.tree.map(lambda x: jnp.where(fresh.reshape(-1, *(1,) * (x.ndim - 1)), 0, x), held)
        projected = self.project(x)
        before = Before(held.inputs, held.states, positions < end[:, None])
        out, state = self.mixed(projected, None, before)
        count = jnp.clip(end - positions[:, 0], 0, x.shape[1])
        new = Recurrence(last_inputs(self.convolved(projected), held.inputs, count), state)
        written = jax.tree.map(
            lambda whole, own: whole.at[layer].set(own.astype(whole.dtype)), cache.recurrence, new
        )
        return out, cache._replace(recurrence=written)

    def convolved(self, projected: Projected) -> Array:
        """The convolution's input."""
        return projected[0]

    def join(self, heads: Array) -> Hidden:
        """Apply the output projection."""
        return self.out(heads.reshape(*heads.shape[:2], -1))

    def _conv(self, x: Array, numbers: Array | None, before: Before | None) -> Array:
        """The convolution, fp32."""
        return short_convolution(x, self.conv[...], numbers, None if before is None else before.inputs)


class GatedDelta(_Recurrent):
    """Linear attention by the gated delta rule (Gated DeltaNet, Yang and others, 2024).

    ``inputs`` projects to query | key | value of all heads, which a short convolution mixes. ``gate`` scales
    the output, ``beta`` is how far a token moves the state, and ``decay`` how fast the state decays.
    """

    def __init__(self, config: GPTConfig, *, linear: Any, out: Any, rngs: nnx.Rngs):
        super().__init__(config, linear, out, rngs)
        c = config
        self.gate = linear(c.d_model, c.recurrent_values)
        self.beta, self.decay = (linear(c.d_model, c.value_heads) for _ in range(2))
        rate = jax.random.uniform(rngs.params(), (c.value_heads,), jnp.float32, 0.01, 16)
        self.log_rate, self.step_bias = nnx.Param(jnp.log(rate)), nnx.Param(jnp.ones(c.value_heads))
        self.norm = nnx.RMSNorm(c.recurrent_width, epsilon=c.norm_eps, rngs=rngs)

    def project(self, x: Hidden, rope: object = None, kind: object = None) -> Projected:
        """See ``_Recurrent``."""
        return self.inputs(x), self.gate(x), self.beta(x), self.decay(x)

    def mixed(self, projected: Projected, numbers: Array | None, before: Before | None) -> tuple[Array, Any]:
        """See ``_Recurrent``."""
        c, (x, gate, beta, decay) = self.config, projected
        x, low = jax.nn.silu(self._conv(x, numbers, before)), x.dtype
        query, key, value = jnp.split(x, [c.recurrent_keys, 2 * c.recurrent_keys], axis=-1)
        query, key = (self._normed(part) for part in (query, key))
        value = value.reshape(*x.shape[:2], c.value_heads, -1).astype(low)
        rate, bias = (part[...].astype(jnp.float32) for part in (self.log_rate, self.step_bias))
        log_decay = -jnp.exp(rate) * jax.nn.softplus(decay.astype(jnp.float32) + bias)
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        if before is not None:
            log_decay, beta = (jnp.where(before.valid[..., None], part, 0) for part in (log_decay, beta))
        query = (query * c.recurrent_key_width**-0.5).astype(low)
        state = None if before is None else before.state
        out, state = gated_delta_rule(query, key.astype(low), value, log_decay, beta, numbers, state)
        gate = gate.reshape(out.shape).astype(jnp.float32)
        return (self.norm(out) * jax.nn.silu(gate)).astype(low), state

    def _normed(self, x: Array) -> Array:
        heads = x.reshape(*x.shape[:2], -1, self.config.recurrent_key_width)
        return heads * jax.lax.rsqrt(jnp.sum(heads**2, axis=-1, keepdims=True) + _EPSILON)


class ShortConv(_Recurrent):
    """A convolution over the last tokens between two gates (LFM2)."""

    def __init__(self, config: GPTConfig, *, linear: Any, out: Any, rngs: nnx.Rngs):
        super().__init__(config, linear, out, rngs)
        self.before, self.after = (linear(config.d_model, config.d_model) for _ in range(2))

    def project(self, x: Hidden, rope: object = None, kind: object = None) -> Projected:
        """See ``_Recurrent``."""
        return self.before(x) * self.inputs(x), self.after(x)

    def mixed(self, projected: Projected, numbers: Array | None, before: Before | None) -> tuple[Array, Any]:
        """See ``_Recurrent``."""
        x, gate = projected
        return gate * self._conv(x, numbers, before).astype(x.dtype), None


RECURRENT = {"gated_delta": GatedDelta, "short_conv": ShortConv}
"""By ``GPTConfig.recurrent``."""


def recurrent_layer(config: GPTConfig, linear: Any, out: Any, rngs: nnx.Rngs) -> GatedDelta | ShortConv:
    """The recurrent layer of a config; ``linear`` and ``out`` make its projections of (inputs, outputs)."""
    return RECURRENT[config.recurrent](config, linear=linear, out=out, rngs=rngs)
