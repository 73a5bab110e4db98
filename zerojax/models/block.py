"""A decoder's layer: self-attention (also multi-head latent attention), the MLP, and the block of both.

Kernels are stored (in, out). ``qkv`` holds query | key | value side by side along ``out``, each heads x
head_dim wide. GPT-2's ``c_attn`` has this layout. LLaMA's q_proj, k_proj and v_proj are transposed and
concatenated. On an H200 the single matmul saves 3 to 11% of attention, forward and backward. A gated MLP's
gate and up stay separate: joined they cost up to 6%, because splitting the wide output and joining its
gradient takes longer than a second matmul.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from zerojax.experts import Experts, RouterStats
from zerojax.experts.mlp import ACTIVATIONS, GATED, Activation
from zerojax.matmul.replay import whole
from zerojax.models.attention import Windowed
from zerojax.models.config import GPTConfig, latent_outputs
from zerojax.models.flash_attention import Documents, Sinks
from zerojax.models.kv_cache import Caches, KVCache, Positions, Recurrence, attend_cached
from zerojax.models.latent import LatentHeads, Latents, keys_and_values
from zerojax.models.recurrent import RECURRENT
from zerojax.models.rope import Rope, apply_rope
from zerojax.models.shared_rows import attention
from zerojax.schedule.tiles import tiled

Hidden = Float[Array, "batch time d_model"]
Heads = Float[Array, "batch time heads value_dim"]
Keys = dict[bool, tuple[Array, Array]]
"""Keys and values of the last layer with the sliding window (True), and of the last one without (False)."""


class Stream(NamedTuple):
    """A block's input and output.

    Attributes:
        hidden: the residual stream.
        stats: the routers' statistics, if ``GPT.routed`` asks for them. They have one row for each layer with
            experts. Each such block drops the first row and appends its own.
        keys: each block puts its keys and values here, if later layers read some; otherwise None.
        caches: of all layers, while they decode.
    """

    hidden: Hidden
    stats: RouterStats | None = None
    keys: Keys | None = None
    caches: Caches = ()


Routed = tuple[Hidden, RouterStats | None]
Mask = Bool[Array, "batch time d_model"]
Projected = tuple[Array, ...]
Cached = tuple[tuple[Any, ...], LatentHeads | None]
RopeKind = int | Int[Array, ""] | None
"""The table of ``Rope`` that a layer reads; None if all layers read the same one."""


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, std: float, *, biases: bool) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(inputs, outputs, use_bias=biases, kernel_init=init, rngs=rngs)


class OffsetRMSNorm(nnx.Module):
    """An RMS norm (Zhang and Sennrich, 2019) with the scale ``offset + scale``, computed in fp32.

    Gemma's norms have an offset of 1, so that weight decay pulls the scale to 1, not to 0.
    """

    def __init__(self, width: int, offset: float, epsilon: float):
        self.offset, self.epsilon = offset, epsilon
        self.scale = nnx.Param(jnp.full(width, 1 - offset, jnp.float32))

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Norm the last axis; the result has the input's dtype."""
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return (normed * (self.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)


def rms_norm(c: GPTConfig, width: int, rngs: nnx.Rngs) -> OffsetRMSNorm | nnx.RMSNorm:
    """An RMS norm over the last axis."""
    if c.norm_offset:
        return OffsetRMSNorm(width, c.norm_offset, c.norm_eps)
    return nnx.RMSNorm(width, epsilon=c.norm_eps, rngs=rngs)


def residual_norm(c: GPTConfig, rngs: nnx.Rngs) -> OffsetRMSNorm | nnx.RMSNorm | nnx.LayerNorm:
    """The config's kind of norm, for the residual stream."""
    if c.norm == "rms":
        return rms_norm(c, c.d_model, rngs)
    return nnx.LayerNorm(c.d_model, epsilon=c.norm_eps, use_bias=c.biases or c.norm_biases, rngs=rngs)


def _residual_std(c: GPTConfig) -> float:
    """GPT-2's scaling, by the number of branches that the residual stream sums."""
    return c.init_std / (c.layers * (2 if c.mlp_layers is None else 1)) ** 0.5


def dropout_mask(x: Hidden, rate: float, key: Key[Array, ""]) -> Mask:
    """Draw which elements dropout keeps: each with probability 1 - rate."""
    return jax.random.bernoulli(key, 1 - rate, x.shape)


def dropped(x: Hidden, rate: float, kept: Mask) -> Hidden:
    """``x`` with dropped elements zeroed and the kept ones divided by 1 - rate, which preserves the mean."""
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.qkv = _linear(c.d_model, c.qkv_width, rngs, c.init_std, biases=c.biases or c.qkv_biases)
        self.out = _linear(
            c.attention_width, c.d_model, rngs, _residual_std(c), biases=c.biases or c.out_bias
        )
        if c.qk_norm:
            query, key = (c.heads, c.key_value_heads) if c.qk_norm_joint else (1, 1)
            self.query_norm = rms_norm(c, query * c.head_dim, rngs)
            if not c.shares_keys:
                self.key_norm = rms_norm(c, key * c.head_dim, rngs)
        if c.value_norm and not c.shares_keys:
            self.value_norm = nnx.RMSNorm(c.value_dim, epsilon=c.norm_eps, use_scale=False, rngs=rngs)
        if c.attention_gate:
            self.gate = _linear(c.d_model, c.attention_width, rngs, c.init_std, biases=False)
        if c.attention_sinks:
            self.sinks = nnx.Param(nnx.initializers.normal(c.init_std)(rngs.params(), (c.heads,)))

    def project(self, x: Hidden, rope: Rope | None, kind: RopeKind = None) -> Projected:
        """Queries [batch, time, heads, head_dim], keys and values with ``kv_heads``; a gate if it has one.

        A layer with an earlier layer's keys and values has queries alone.
        """
        c = self.config
        heads = self.qkv(x).reshape(*x.shape[:2], -1, c.head_dim)
        q, k, v = jnp.split(heads, [c.heads, c.heads + c.keys_width // c.head_dim], axis=2)
        q = self._placed(q, "query_norm", rope, kind)
        q = q if rope is None else _scaled(q, rope)
        own: tuple[Array, ...] = ()
        if not c.shares_keys:
            v = k if c.keys_as_values else v
            own = self._placed(k, "key_norm", rope, kind), self.value_norm(v) if c.value_norm else v
        return (q, *own, self.gate(x)) if c.attention_gate else (q, *own)

    def _placed(self, heads: Array, norm: str, rope: Rope | None, kind: RopeKind) -> Array:
        """Queries or keys, normed and rotated."""
        c = self.config
        if c.qk_norm and not c.qk_norm_rotated:
            heads = self._normed(getattr(self, norm), heads)
        heads = heads if rope is None else self._rotated(heads, rope, kind)
        return self._normed(getattr(self, norm), heads) if c.qk_norm_rotated else heads

    def _rotated(self, x: Array, rope: Rope, kind: RopeKind) -> Array:
        return apply_rope(x, rope.table(kind), interleaved=self.config.rope_interleaved)

    def _normed(self, norm: Callable[[Array], Array], heads: Array) -> Array:
        if not self.config.qk_norm_joint:
            return norm(heads)
        return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)

    def decode(
        self,
        new: Cached,
        positions: Positions,
        cache: KVCache,
        layer: int | Int[Array, ""],
        windowed: Windowed,
    ) -> tuple[Heads, KVCache]:
        """Add new tokens to the cache, and return their attention to it before the output projection.

        ``new`` is from ``to_cache``.
        """
        (query, key, value, *gate), latent = new
        qkv = query, key, value
        heads, cache = attend_cached(
            self.config, qkv, positions, cache, layer, windowed, self.scores_of_sinks, latent
        )
        return _gated(heads, gate), cache

    def to_cache(self, x: Hidden, rope: Rope | None, kind: RopeKind) -> Cached:
        """Queries and cache entries of new tokens, and for latents the heads that expand the entries."""
        return self.project(x, rope, kind), None

    def mix(
        self, projected: Projected, documents: Documents | None = None, windowed: Windowed = True
    ) -> Heads:
        """Attention to ``project``'s results, before the output projection."""
        c, (query, key, value, *gate) = self.config, projected
        heads = attention(
            *(query, key, value),
            segments=documents,
            window=c.sliding_window,
            windowed=windowed,
            scale=c.attention_scale,
            softcap=c.attention_softcap,
            sinks=self.scores_of_sinks,
            kernel=c.attention,
        )
        return _gated(heads, gate)

    @property
    def scores_of_sinks(self) -> Sinks | None:
        """The score of each head's attention sink; None if the model has no sinks."""
        return self.sinks[...] if self.config.attention_sinks else None

    def join(self, heads: Heads) -> Hidden:
        """Apply the output projection to all heads side by side."""
        return self.out(heads.reshape(*heads.shape[:2], self.config.attention_width))


def _gated(heads: Heads, gate: Sequence[Array]) -> Heads:
    """The outputs of heads times the sigmoid of their gate, if there is one."""
    for own in gate:
        heads = heads * jax.nn.sigmoid(own.reshape(heads.shape))
    return heads


def _scaled(q: Array, rope: Rope) -> Array:
    """Queries times ``rope.query_scale``, if there is one."""
    if rope.query_scale is None:
        return q
    return q * jax.lax.stop_gradient(rope.query_scale)[..., None, None].astype(q.dtype)


_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents. DeepSeek's models use this value whatever their norm_eps is."""


class LatentAttention(Attention):
    """Attention that computes keys and values from a latent (``zerojax.models.latent``).

    ``latent_down`` projects to latent | rotary part of the keys, ``latent_up`` to key | value of each head.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        assert c.latent_rank is not None
        self.config, self.rank = c, c.latent_rank
        linear = partial(_linear, rngs=rngs, std=c.init_std, biases=False)
        norm = partial(nnx.RMSNorm, epsilon=_LATENT_EPSILON, rngs=rngs)
        width = c.heads * c.head_dim
        if c.latent_query_rank is None:
            self.query = linear(c.d_model, width)
        else:
            self.query_down = linear(c.d_model, c.latent_query_rank)
            self.query_norm = norm(c.latent_query_rank)
            self.query_up = linear(c.latent_query_rank, width)
        self.latent_down = linear(c.d_model, c.latent_rank + c.rope_width)
        self.latent_norm = norm(c.latent_rank)
        self.latent_up = linear(c.latent_rank, latent_outputs(c))
        self.out = _linear(c.attention_width, c.d_model, rngs, _residual_std(c), biases=False)

    def project(self, x: Hidden, rope: Rope | None, kind: RopeKind = None) -> Projected:
        """Queries and keys (batch, time, heads, head_dim), and values (batch, time, heads, value_dim)."""
        c = self.config
        query, latents = self._compressed(x, rope, kind)
        latent, rotary = jnp.split(latents, [self.rank], axis=-1)
        made = self.latent_up(latent).reshape(*x.shape[:2], c.heads, -1)
        return query, *keys_and_values(made, rotary, c.head_dim - c.rope_width)

    def to_cache(self, x: Hidden, rope: Rope | None, kind: RopeKind) -> Cached:
        """Like ``Attention.to_cache``, but the cache stores latents."""
        c = self.config
        query, latents = self._compressed(x, rope, kind)
        up = whole(self.latent_up.kernel[...]).reshape(self.rank, c.heads, -1)
        return (query, latents, None), LatentHeads(up, c.head_dim - c.rope_width)

    def _compressed(self, x: Hidden, rope: Rope | None, kind: RopeKind) -> tuple[Array, Latents]:
        c = self.config
        assert rope is not None
        if c.latent_query_rank is None:
            query = self.query(x)
        else:
            query = self.query_up(self.query_norm(self.query_down(x)))
        query = query.reshape(*x.shape[:2], c.heads, c.head_dim)
        plain, rotary = jnp.split(query, [c.head_dim - c.rope_width], axis=-1)
        query = jnp.concatenate([plain, self._rotated(rotary, rope, kind)], axis=-1)
        latent, rotary = jnp.split(self.latent_down(x)[:, :, None], [self.rank], axis=-1)
        latents = jnp.concatenate([self.latent_norm(latent), self._rotated(rotary, rope, kind)], axis=-1)
        return _scaled(query, rope), latents


class MLP(nnx.Module):
    """The position-wise feed-forward network."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        self.activation: Activation = c.mlp
        if c.gated:
            self.gate = _linear(c.d_model, c.ffn_width, rngs, c.init_std, biases=c.biases)
        self.up = _linear(c.d_model, c.ffn_width, rngs, c.init_std, biases=c.biases)
        self.down = _linear(c.ffn_width, c.d_model, rngs, _residual_std(c), biases=c.biases)

    def __call__(self, x: Hidden) -> Hidden:
        """Apply the up projection (and the gate's), the activation, and the down projection."""
        first = (self.gate(x), self.up(x)) if self.activation in GATED else (self.up(x),)
        return self.down(ACTIVATIONS[self.activation](*first))


class NormedExperts(Experts):
    """Experts and a shared one; norms come before and after each of the two (Gemma 4).

    The router reads the residual stream, normed and times ``router_scale`` / sqrt(d_model). The weights of
    expert i are multiplied by ``factors[i]``.
    """

    def __init__(self, config: GPTConfig, *sizes: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(*sizes, rngs=rngs, **options)
        width = config.d_model
        self.norm, self.post_norm, self.post_norm_shared = (residual_norm(config, rngs) for _ in range(3))
        self.router_norm = nnx.RMSNorm(width, epsilon=config.norm_eps, use_scale=False, rngs=rngs)
        self.router_scale = nnx.Param(jnp.ones(width))
        self.factors = nnx.Param(jnp.ones(config.experts))

    def beside(self, shared: Hidden, x: Hidden) -> Routed:
        """The module's output, and the router's statistics.

        Args:
            shared: the input of the shared expert.
            x: the residual stream.
        """
        assert self.shared is not None
        scale = self.router_scale[...] * x.shape[-1] ** -0.5
        scored = self.router_norm(x) * scale.astype(x.dtype)
        out, stats = self.routed(self.norm(x), scored=scored, factors=self.factors[...])
        return self.post_norm_shared(self.shared(shared)) + self.post_norm(out), stats


def _experts(c: GPTConfig, rngs: nnx.Rngs) -> Experts:
    kind = partial(NormedExperts, c) if c.shared_norms else Experts
    return kind(
        *(c.d_model, c.ffn_width, c.experts, c.experts_per_token),
        router=c.router_config,
        activation=c.mlp,
        biases=c.biases,
        shared=c.shared_ffn,
        shared_gate=c.shared_gate,
        latent=c.expert_latent,
        init=nnx.initializers.normal(c.init_std),
        down_init=nnx.initializers.normal(_residual_std(c)),
        rngs=rngs,
    )


def _unchanged(x: Hidden) -> Hidden:
    """The identity, in place of a norm that the model lacks."""
    return x


class LayerInput(nnx.Module):
    """The branch that adds a layer's own input to the residual stream (Gemma 4 E2B)."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        self.activation: Activation = c.mlp
        self.gate = _linear(c.d_model, c.layer_inputs, rngs, c.init_std, biases=False)
        self.out = _linear(c.layer_inputs, c.d_model, rngs, _residual_std(c), biases=False)
        self.norm = residual_norm(c, rngs)

    def __call__(self, x: Hidden, own: Float[Array, "batch time width"]) -> Hidden:
        """The branch, from the residual stream and the layer's input."""
        return self.norm(self.out(ACTIVATIONS[self.activation](self.gate(x), own)))


class LayerScale(nnx.Variable):
    """The factor of a layer's output. It is state, because training keeps it."""


class Block(nnx.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)), where mlp may be ``Experts``.

    In a layer of config.recurrent_layers, a recurrent layer takes the place of attention. With
    config.mlp_layers a block has only one of the two branches.
    With config.pre_norms each branch begins with a norm, with config.post_norms it ends with one. With
    parallel config.branches the block computes x + attention(norm(x)) + mlp(norm(x)). With
    config.layer_inputs a third branch adds the layer's own input.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        def norm(wanted: bool) -> Any:
            return residual_norm(config, rngs) if wanted else _unchanged

        self.config = config
        mixes, has_mlp = config.has_mixer, config.has_mlp
        self.norm_attention = norm(config.pre_norms and mixes)
        if config.all_recurrent:
            linear = partial(_linear, rngs=rngs, biases=False)
            every, out = (partial(linear, std=std) for std in (config.init_std, _residual_std(config)))
            self.recurrent = RECURRENT[config.recurrent](config, linear=every, out=out, rngs=rngs)
        elif mixes:
            self.attention = (Attention if config.latent_rank is None else LatentAttention)(config, rngs=rngs)
        self.norm_mlp = norm(config.pre_norms and has_mlp and config.branches != "parallel_one_norm")
        if has_mlp:
            self.mlp = _experts(config, rngs) if config.experts else MLP(config, rngs=rngs)
        self.post_norm_attention = norm(config.post_norms and mixes)
        self.post_norm_mlp = norm(config.post_norms and has_mlp)
        if config.layer_inputs:
            self.input = LayerInput(config, rngs=rngs)
        if config.layer_scale:
            self.scale = LayerScale(jnp.ones(1, jnp.float32))

    def __call__(
        self,
        x: Hidden | Stream,
        rope: Rope | None = None,
        key: Key[Array, ""] | None = None,
        documents: Documents | None = None,
        windowed: Windowed = True,
        kind: RopeKind = None,
        layer: int | Int[Array, ""] = 0,
        keys: Keys | None = None,
        own: Float[Array, "batch time width"] | None = None,
    ) -> Hidden | Stream:
        """Apply the block.

        Args:
            x: the residual stream, or a ``Stream``; the result is of the same type.
            rope: rotary positions, if the model has them.
            key: turns dropout on; all layers get the same key.
            documents: the documents of packed rows.
            windowed: whether this layer has the model's sliding window.
            kind: which table of ``rope`` this layer reads.
            layer: this layer's number, which makes its dropout mask differ from the others'.
            keys: keys and values of earlier layers, for a layer without own ones.
            own: the layer's own input, with config.layer_inputs.
        """
        stream = x if isinstance(x, Stream) else Stream(x)
        hidden, before, later, _ = stream
        rope = None if rope is None else rope.by_token(kind, len(hidden))
        heads = None
        if self.config.has_mixer:
            projected, later = self._with_keys(self._tiled(self._project, hidden, rope), later, keys)
            heads = self._mixer.mix(projected, documents, windowed)
        key = None if key is None else jax.random.fold_in(key, layer)
        hidden, stats = self.finish(hidden, heads, key, own)
        if before is not None and stats is not None:
            before = jax.tree.map(lambda rows, row: jnp.concatenate([rows[1:], row[None]]), before, stats)
        return Stream(hidden, before, later) if isinstance(x, Stream) else hidden

    def _with_keys(
        self, projected: Projected, later: Keys | None, keys: Keys | None
    ) -> tuple[Projected, Keys | None]:
        """The projections with the keys and values that the layer reads, and those for later layers."""
        window = self.config.sliding_window is not None
        if self.config.shares_keys:
            assert keys is not None
            query, *gate = projected
            return (query, *keys[window], *gate), later
        if later is not None:
            _, key, value, *_ = projected
            later = later | {window: (key, value)}
        return projected, later

    @property
    def _mixer(self) -> Any:
        """The module that mixes the tokens of a row: attention or a recurrent layer."""
        return self.recurrent if self.config.all_recurrent else self.attention

    def decode(
        self,
        x: Stream,
        rope: Rope | None,
        positions: Positions,
        end: Int[Array, " batch"],
        *,
        cache: int,
        layer: int | Int[Array, ""],
        windowed: Windowed = True,
        kind: RopeKind = None,
        keys: Keys | None = None,
        own: Float[Array, "batch time width"] | None = None,
    ) -> Stream:
        """Apply the block to new tokens, which attend to the cache and are added to it.

        Tokens at positions from ``end`` on are padding, ``cache`` is the number of the layer's cache, and
        ``layer`` the layer's index in it. A layer without own keys and values adds the same ones again. For
        the other arguments see ``__call__``.
        """
        hidden, _, later, caches = x
        normed, memory, heads = self.norm_attention(hidden), caches[cache], None
        if isinstance(memory, Recurrence):
            heads, memory = self.recurrent.decode(normed, positions, end, memory, layer)
        elif memory is not None:
            projected, latent = self.attention.to_cache(normed, rope, kind)
            projected, later = self._with_keys(projected, later, keys)
            heads, memory = self.attention.decode((projected, latent), positions, memory, layer, windowed)
        hidden, _ = self.finish(hidden, heads, own=own)
        return Stream(hidden, None, later, (*caches[:cache], memory, *caches[cache + 1 :]))

    def finish(
        self,
        x: Hidden,
        heads: Heads | None,
        key: Key[Array, ""] | None = None,
        own: Float[Array, "batch time width"] | None = None,
    ) -> Routed:
        """The block's output and its router's statistics, from the block's input and its attention's heads.

        ``heads`` is None for a block that is only an MLP. ``own`` is as in ``__call__``.
        Experts are not tiled: they exchange tokens in rounds, and their routers count tokens.
        """
        kept = None
        if key is not None and self.config.dropout:
            keys = jax.random.split(key)
            kept = [dropout_mask(x, self.config.dropout, key) for key in keys]
        if self.config.experts:
            return self._finish(x, heads, kept, own)
        return self._tiled(lambda *tile: self._finish(*tile)[0], x, heads, kept, own), None

    def _tiled[T](self, function: Callable[..., T], *xs: Any) -> T:
        """Apply a function that treats each token alone to a tile of tokens at a time."""
        return tiled(function, *xs, tile=self.config.token_tile)

    def _project(self, x: Hidden, rope: Rope | None) -> Projected:
        return self._mixer.project(self.norm_attention(x), rope)

    def _finish(
        self, x: Hidden, heads: Heads | None, kept: Sequence[Mask] | None, own: Array | None
    ) -> Routed:
        first, second = kept or (None, None)
        attended = x
        if heads is not None:
            attended = x + self._added(self.post_norm_attention(self._mixer.join(heads)), first)
        if not self.config.has_mlp:
            return attended, None
        norm = self.norm_attention if self.config.branches == "parallel_one_norm" else self.norm_mlp
        stream = attended if self.config.branches == "sequential" else x
        normed = norm(stream)
        out = self.mlp.beside(normed, stream) if isinstance(self.mlp, NormedExperts) else self.mlp(normed)
        out, stats = out if isinstance(out, tuple) else (out, None)
        out = attended + self._added(self.post_norm_mlp(out), second)
        out = out if own is None else out + self.input(out, own)
        if self.config.layer_scale:
            # It is state. Its gradient, which nothing reads, would need the experts' outputs once more.
            out = out * jax.lax.stop_gradient(self.scale[...]).astype(out.dtype)
        return out, stats

    def _added(self, x: Hidden, kept: Mask | None) -> Hidden:
        """A branch's contribution to the residual stream."""
        c = self.config
        x = x if c.residual_scale == 1 else x * c.residual_scale
        return x if kept is None else dropped(x, c.dropout, kept)
