"""Layers with a state of fixed size in place of keys and values: linear attention, Mamba-2, convolutions.

They have the interface of ``zerojax.models.block.Attention``. ``project`` and ``join`` treat each token
alone, ``mix`` takes whole rows, and ``decode`` takes new tokens and the cache.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from zerojax.adapters.loss import ATTENDED, IN_ORDER, devices_a_row
from zerojax.errors import ConfigurationError
from zerojax.models.config import GPTConfig
from zerojax.models.delta_rule import gated_delta_rule, last_inputs, short_convolution
from zerojax.models.flash_attention import Documents
from zerojax.models.kv_cache import Positions, Recurrence
from zerojax.models.shared_rows import own_heads, to_heads, to_tokens

_EPSILON = 1e-6
"""Added to the squared norms of queries and keys."""
Hidden = Float[Array, "batch time d_model"]
Projected = tuple[Array, ...]


class Before(NamedTuple):
    """The layer's memory of earlier tokens, when new tokens arrive.

    Attributes:
        inputs: the convolution's last inputs.
        state: the state of the gated delta rule or of Mamba-2, if the layer has one.
        valid: which of the new tokens are no padding.
    """

    inputs: Float[Array, "batch kept channels"]
    state: Float[Array, "batch heads dim value_dim"] | None
    valid: Bool[Array, "batch time"]


class Own(NamedTuple):
    """The parameters of a rule, for all heads of a layer or for a device's heads.

    Attributes:
        config: has as many heads.
        conv: the convolution's kernel, [taps, channels].
        by_channel: other parameters with a number for each of its channels.
        by_head: parameters whose first axis is the heads of values.
    """

    config: GPTConfig
    conv: Array
    by_channel: tuple[Array, ...] = ()
    by_head: tuple[Array, ...] = ()


class _Recurrent(nnx.Module):
    """Common parts of recurrent layers.

    ``project`` returns the convolution's input, then the rule's inputs for each head, and last the gate.
    """

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

    @property
    def own(self) -> Own:
        """The rule's parameters."""
        return Own(self.config, self.conv[...])

    def rule(
        self, own: Own, x: Array, *by_head: Array, numbers: Array | None, before: Before | None
    ) -> tuple[Array, Any]:
        """The heads of ``own``, [batch, time, heads, value_dim], and the state after the tokens.

        ``x`` and ``by_head`` are the results of ``project`` without the gate.
        """
        raise NotImplementedError

    def gated(self, heads: Array, gate: Array) -> Array:
        """The output before its projection, from all heads and the gate of each token."""
        raise NotImplementedError

    def mixed(self, projected: Projected, numbers: Array | None, before: Before | None) -> tuple[Array, Any]:
        """The output before its projection, and the state after the tokens."""
        *parts, gate = projected
        heads, state = self.rule(self.own, *parts, numbers=numbers, before=before)
        return self.gated(heads, gate), state

    def mix(self, projected: Projected, documents: Documents | None = None, windowed: object = True) -> Array:
        """The output of whole rows before its projection; the devices of a row exchange heads for it."""
        del windowed
        numbers = None if documents is None else documents.numbers
        if (devices := devices_a_row()) == 1:
            return self.mixed(projected, numbers, None)[0]
        x, *by_head, gate = (checkpoint_name(part, IN_ORDER) for part in projected)
        own, parts = self.own, self._by_heads(checkpoint_name(x, ATTENDED), devices)
        wide = (part.reshape(*part.shape[:3], -1) for part in by_head)
        arrived = to_heads(devices, *parts, *wide)
        channels, of_heads = arrived[: len(parts)], arrived[len(parts) :]
        of_heads = [
            part.reshape(*part.shape[:3], *like.shape[3:])
            for part, like in zip(of_heads, by_head, strict=True)
        ]
        mine = Own(
            self._of_device(devices),
            self._own_channels(own.conv, devices),
            tuple(self._own_channels(part, devices) for part in own.by_channel),
            tuple(own_heads(devices, part) for part in own.by_head),
        )
        heads, _ = self.rule(mine, _side_by_side(channels), *of_heads, numbers=numbers, before=None)
        return self.gated(to_tokens(devices, heads), gate)

    @property
    def _groups(self) -> list[tuple[int, int]]:
        """The heads of the convolution's channels and their width: of values and, twice, of keys."""
        c = self.config
        keys = c.recurrent_keys // c.recurrent_key_width
        return [
            (keys, c.recurrent_key_width),
            (keys, c.recurrent_key_width),
            (c.value_heads, c.recurrent_width),
        ]

    def _by_heads(self, x: Array, devices: int) -> list[Array]:
        """Channels as heads, ``[..., heads, dim]``, with a copy of a head of keys for each of its devices."""
        groups = self._groups
        if (most := max(heads for heads, _ in groups)) % devices:
            raise ConfigurationError(
                f"[model] {most} heads of recurrent layers do not divide among zero.sequence_parallel = "
                f"{devices} devices. Set the latter to a divisor."
            )
        ends = np.cumsum([heads * width for heads, width in groups])[:-1].tolist()
        parts = jnp.split(x, ends, axis=-1)
        found = []
        for part, (heads, width) in zip(parts, groups, strict=True):
            part = part.reshape(*x.shape[:-1], heads, width)
            found.append(jnp.repeat(part, math.lcm(heads, devices) // heads, axis=-2))
        return found

    def _own_channels(self, x: Array, devices: int) -> Array:
        """A parameter's entries for the channels of this device's heads."""
        return _side_by_side([own_heads(devices, part, -2) for part in self._by_heads(x, devices)])

    def _of_device(self, devices: int) -> GPTConfig:
        """The config with a device's heads."""
        c = self.config
        if c.recurrent == "short_conv":
            return c
        heads = math.lcm(c.recurrent_keys // c.recurrent_key_width, devices) // devices
        return replace(c, recurrent_heads=c.value_heads // devices, recurrent_key_heads=heads)

    def decode(
        self, x: Hidden, positions: Positions, end: Int[Array, " batch"], cache: Recurrence, layer: Any
    ) -> tuple[Array, Recurrence]:
        """The output of new tokens before its projection, and the cache after them.

        A row that begins at position 0 ignores the cache's earlier content.
        """
        held: Recurrence = jax.tree.map(lambda x: x[layer], cache)
        fresh = positions[:, 0] == 0
        held = jax.tree.map(lambda x: jnp.where(fresh.reshape(-1, *(1,) * (x.ndim - 1)), 0, x), held)
        projected = self.project(x)
        before = Before(held.inputs, held.states, positions < end[:, None])
        out, state = self.mixed(projected, None, before)
        count = jnp.clip(end - positions[:, 0], 0, x.shape[1])
        new = Recurrence(last_inputs(projected[0], held.inputs, count), state)
        return out, jax.tree.map(lambda whole, own: whole.at[layer].set(own.astype(whole.dtype)), cache, new)

    def join(self, heads: Array) -> Hidden:
        """Apply the output projection."""
        return self.out(heads.reshape(*heads.shape[:2], -1))


def _side_by_side(parts: Sequence[Array]) -> Array:
    """Channels side by side from heads."""
    return jnp.concatenate([part.reshape(*part.shape[:-2], -1) for part in parts], axis=-1)


def _conv(own: Own, x: Array, numbers: Array | None, before: Before | None) -> Array:
    """The convolution, fp32."""
    return short_convolution(x, own.conv, numbers, None if before is None else before.inputs)


def _of_valid(x: Array, before: Before) -> Array:
    """Zeros for the tokens that are padding."""
    return jnp.where(before.valid.reshape(*x.shape[:2], *(1 for _ in x.shape[2:])), x, 0)


class GatedDelta(_Recurrent):
    """Linear attention by the gated delta rule (Gated DeltaNet, Yang and others, 2024).

    ``inputs`` projects to query | key | value of all heads, which a short convolution mixes. ``gate`` scales
    the output, ``beta`` is how far a token moves the state, and ``decay`` how fast the state decays.
    """

    _gating = staticmethod(jax.nn.silu)

    def __init__(self, config: GPTConfig, *, linear: Any, out: Any, rngs: nnx.Rngs):
        super().__init__(config, linear, out, rngs)
        c = config
        self._add_gates(linear)
        rate = jax.random.uniform(rngs.params(), (c.value_heads,), jnp.float32, 0.01, 16)
        self.log_rate = nnx.Param(jnp.log(rate))
        epsilon = c.norm_eps if c.recurrent_norm_eps is None else c.recurrent_norm_eps
        self.norm = nnx.RMSNorm(c.recurrent_width, epsilon=epsilon, rngs=rngs)

    def _add_gates(self, linear: Any) -> None:
        c = self.config
        self.gate = linear(c.d_model, c.recurrent_values)
        self.beta, self.decay = (linear(c.d_model, c.value_heads) for _ in range(2))
        self.step_bias = nnx.Param(jnp.ones(c.value_heads))

    def project(self, x: Hidden, rope: object = None, kind: object = None) -> Projected:
        """See ``_Recurrent``."""
        return self.inputs(x), self.beta(x), self.decay(x), self.gate(x)

    @property
    def own(self) -> Own:
        """See ``_Recurrent``."""
        return Own(self.config, self.conv[...], (), (self.log_rate[...], self.step_bias[...]))

    def rule(
        self, own: Own, x: Array, *by_head: Array, numbers: Array | None, before: Before | None
    ) -> tuple[Array, Any]:
        """See ``_Recurrent``."""
        c, (beta, decay) = own.config, by_head
        x, low = jax.nn.silu(_conv(own, x, numbers, before)), x.dtype
        query, key, value = jnp.split(x, [c.recurrent_keys, 2 * c.recurrent_keys], axis=-1)
        query, key = (self._normed(part) for part in (query, key))
        value = value.reshape(*x.shape[:2], c.value_heads, -1).astype(low)
        rate, bias = (part.astype(jnp.float32) for part in own.by_head)
        rate = rate.reshape(-1, *(1 for _ in bias.shape[1:]))
        log_decay = -jnp.exp(rate) * jax.nn.softplus(decay.astype(jnp.float32) + bias)
        beta = jax.nn.sigmoid(beta.astype(jnp.float32)) * (1 + c.recurrent_negative)
        if before is not None:
            log_decay, beta = (_of_valid(part, before) for part in (log_decay, beta))
        query = (query * c.recurrent_key_width**-0.5).astype(low)
        state = None if before is None else before.state
        return gated_delta_rule(query, key.astype(low), value, log_decay, beta, numbers, state)

    def gated(self, heads: Array, gate: Array) -> Array:
        """See ``_Recurrent``."""
        scale = self._gating(gate.reshape(heads.shape).astype(jnp.float32))
        return (self.norm(heads) * scale).astype(heads.dtype)

    def _normed(self, x: Array) -> Array:
        heads = x.reshape(*x.shape[:2], -1, self.config.recurrent_key_width)
        return heads * jax.lax.rsqrt(jnp.sum(heads**2, axis=-1, keepdims=True) + _EPSILON)


class KimiDelta(GatedDelta):
    """Linear attention whose state decays by channel of the keys (Kimi Delta Attention, 2510.26692).

    ``decay_down`` and ``gate_down`` project to the width of a head, from which ``decay`` and ``gate`` project
    to all heads.
    """

    _gating = staticmethod(jax.nn.sigmoid)

    def _add_gates(self, linear: Any) -> None:
        c = self.config
        self.gate_down = linear(c.d_model, c.recurrent_width)
        self.gate = linear(c.recurrent_width, c.recurrent_values)
        self.decay_down = linear(c.d_model, c.recurrent_key_width)
        self.decay = linear(c.recurrent_key_width, c.recurrent_keys)
        self.beta = linear(c.d_model, c.value_heads)
        self.step_bias = nnx.Param(jnp.ones(c.recurrent_keys))

    def project(self, x: Hidden, rope: object = None, kind: object = None) -> Projected:
        """See ``_Recurrent``."""
        decay = self.decay(self.decay_down(x))
        decay = decay.reshape(*x.shape[:2], -1, self.config.recurrent_key_width)
        return self.inputs(x), self.beta(x), decay, self.gate(self.gate_down(x))

    @property
    def own(self) -> Own:
        """See ``_Recurrent``."""
        bias = self.step_bias[...].reshape(-1, self.config.recurrent_key_width)
        return Own(self.config, self.conv[...], (), (self.log_rate[...], bias))


class ShortConv(_Recurrent):
    """A convolution over the last tokens between two gates (LFM2)."""

    def __init__(self, config: GPTConfig, *, linear: Any, out: Any, rngs: nnx.Rngs):
        super().__init__(config, linear, out, rngs)
        self.before, self.after = (linear(config.d_model, config.d_model) for _ in range(2))

    def project(self, x: Hidden, rope: object = None, kind: object = None) -> Projected:
        """See ``_Recurrent``."""
        return self.before(x) * self.inputs(x), self.after(x)

    def rule(
        self, own: Own, x: Array, *by_head: Array, numbers: Array | None, before: Before | None
    ) -> tuple[Array, Any]:
        """See ``_Recurrent``."""
        return _conv(own, x, numbers, before).astype(x.dtype)[..., None], None

    def gated(self, heads: Array, gate: Array) -> Array:
        """See ``_Recurrent``."""
        return gate * heads[..., 0]

    @property
    def _groups(self) -> list[tuple[int, int]]:
        return [(self.config.d_model, 1)]


class Mamba2(_Recurrent):
    """A state space model with one decay for each head (Mamba-2, Dao and Gu, 2024, 2405.21060).

    ``inputs`` projects to value | key | query (x, B and C in the paper), which a short convolution mixes.
    ``decay`` is the step, by which a token's value is multiplied and the state decays. ``gate`` scales the
    output before its norm, which has a group of elements for each head of keys.
    """

    def __init__(self, config: GPTConfig, *, linear: Any, out: Any, rngs: nnx.Rngs):
        super().__init__(config, linear, out, rngs)
        c = config
        self.conv_bias = nnx.Param(jnp.zeros(c.conv_channels))
        self.gate, self.decay = linear(c.d_model, c.recurrent_values), linear(c.d_model, c.value_heads)
        self.log_rate = nnx.Param(jnp.log(jnp.arange(1, c.value_heads + 1, dtype=jnp.float32)))
        self.step_bias, self.skip = (nnx.Param(jnp.ones(c.value_heads)) for _ in range(2))
        self.norm = nnx.RMSNorm(c.recurrent_values, epsilon=c.norm_eps, rngs=rngs)

    def project(self, x: Hidden, rope: object = None, kind: object = None) -> Projected:
        """See ``_Recurrent``."""
        return self.inputs(x), self.decay(x), self.gate(x)

    @property
    def own(self) -> Own:
        """See ``_Recurrent``."""
        by_head = self.log_rate[...], self.step_bias[...], self.skip[...]
        return Own(self.config, self.conv[...], (self.conv_bias[...],), by_head)

    @property
    def _groups(self) -> list[tuple[int, int]]:
        keys, _, values = super()._groups
        return [values, keys, keys]

    def rule(
        self, own: Own, x: Array, *by_head: Array, numbers: Array | None, before: Before | None
    ) -> tuple[Array, Any]:
        """See ``_Recurrent``."""
        c, (step,) = own.config, by_head
        bias, rate, step_bias, skip = (part.astype(jnp.float32) for part in (*own.by_channel, *own.by_head))
        x, low = jax.nn.silu(_conv(own, x, numbers, before) + bias), x.dtype
        value, key, query = jnp.split(x, [c.recurrent_values, c.recurrent_values + c.recurrent_keys], axis=-1)
        query, key = (
            part.reshape(*x.shape[:2], -1, c.recurrent_key_width).astype(low) for part in (query, key)
        )
        value = value.reshape(*x.shape[:2], c.value_heads, -1)
        step = jnp.maximum(jax.nn.softplus(step.astype(jnp.float32) + step_bias), c.recurrent_step_min)
        step = step if before is None else _of_valid(step, before)
        moved = (value * step[..., None]).astype(low)
        state = None if before is None else before.state
        out, state = gated_delta_rule(query, key, moved, -jnp.exp(rate) * step, None, numbers, state)
        return (out.astype(jnp.float32) + value * skip[:, None]).astype(low), state

    def gated(self, heads: Array, gate: Array) -> Array:
        """See ``_Recurrent``."""
        c = self.config
        x = heads.astype(jnp.float32).reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))
        groups = x.reshape(*x.shape[:2], c.recurrent_keys // c.recurrent_key_width, -1)
        groups = groups * jax.lax.rsqrt(jnp.mean(groups**2, axis=-1, keepdims=True) + c.norm_eps)
        assert self.norm.scale is not None
        scale = self.norm.scale[...].astype(jnp.float32)
        return (groups.reshape(x.shape) * scale).astype(heads.dtype)


RECURRENT = {
    "gated_delta": GatedDelta,
    "kimi_delta": KimiDelta,
    "short_conv": ShortConv,
    "mamba2": Mamba2,
}
"""By ``GPTConfig.recurrent``. ``linear`` and ``out`` make a layer's projections of (inputs, outputs)."""
