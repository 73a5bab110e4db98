"""GPT-2, OPT, LLaMA, Gemma, OLMo and DeepSeek style decoders in Flax NNX, dense or mixtures of experts.

Every module computes in the dtype of its weights (the trainer passes compute-dtype copies); the statistics of
norms, rotary angles, softmax and the loss are always fp32.

Kernels are stored (in, out), both embeddings (vocab, d_model). ``qkv`` holds query | key | value side by side
along ``out``, each heads x head_dim: GPT-2's ``c_attn`` unchanged, LLaMA's q_proj, k_proj and v_proj
transposed and concatenated. On an H200 the single matmul saves 3 to 11% of attention, forward and backward.
A gated MLP's gate and up are separate, because together they cost up to 6%: splitting their wide output and
joining its gradient takes longer than a second matmul.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Key

from zerojax.adapters.own_tokens import own_tokens
from zerojax.adapters.stack import Stack
from zerojax.errors import ConfigurationError
from zerojax.experts import Experts, RouterStats
from zerojax.experts.mlp import ACTIVATIONS
from zerojax.matmul.replay import whole
from zerojax.models.attention import Windowed, segment_positions
from zerojax.models.config import GPTConfig, latent_outputs
from zerojax.models.flash_attention import Documents, Segments, document_offsets
from zerojax.models.kv_cache import KVCache, Positions, attend_cached
from zerojax.models.latent import LatentHeads, Latents, keys_and_values
from zerojax.models.look_up import look_up
from zerojax.models.norms import residual_norm, rms_norm
from zerojax.models.rope import Rope, apply_rope, rope_kinds, rope_of
from zerojax.models.shared_rows import attention
from zerojax.models.sinks import Sinks
from zerojax.schedule.tiles import tiled

Hidden = Float[Array, "batch time d_model"]
Heads = Float[Array, "batch time heads value_dim"]
Stream = Hidden | tuple[Hidden, RouterStats]
"""What a block passes on: the residual stream, with what routers did if they are asked for it.

The stats have a leading axis of the layers that have experts; such a block leaves out the first row and
appends its own.
"""
RopeKind = int | Int[Array, ""] | None
"""Which table of ``Rope`` a layer reads; None where all read the same."""


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, std: float, *, biases: bool) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(inputs, outputs, use_bias=biases, kernel_init=init, rngs=rngs)


def _residual_std(c: GPTConfig) -> float:
    """GPT-2's scaling: 2 x layers branches add up in the residual stream."""
    return c.init_std / (2 * c.layers) ** 0.5


def _embedding(c: GPTConfig, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(c.init_std)
    return nnx.Embed(rows, c.d_model, embedding_init=init, rngs=rngs)


def _kept(x: Hidden, rate: float, key: Key[Array, ""]) -> Bool[Array, "batch time d_model"]:
    """Which elements dropout keeps."""
    return jax.random.bernoulli(key, 1 - rate, x.shape)


def _dropped(x: Hidden, rate: float, kept: Bool[Array, "batch time d_model"]) -> Hidden:
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        width = (c.heads + 2 * c.key_value_heads) * c.head_dim
        self.qkv = _linear(c.d_model, width, rngs, c.init_std, biases=c.biases or c.qkv_biases)
        self.out = _linear(c.attention_width, c.d_model, rngs, _residual_std(c), biases=c.biases)
        if c.qk_norm:
            query, key = (c.heads, c.key_value_heads) if c.qk_norm_joint else (1, 1)
            self.query_norm = rms_norm(c, query * c.head_dim, rngs)
            self.key_norm = rms_norm(c, key * c.head_dim, rngs)
        if c.attention_sinks:
            self.sinks = nnx.Param(nnx.initializers.normal(c.init_std)(rngs.params(), (c.heads,)))

    def project(self, x: Hidden, rope: Rope | None, kind: RopeKind = None) -> tuple[Array, Array, Array]:
        """Queries (batch, time, heads, head_dim), keys (batch, time, kv_heads, head_dim) and values."""
        c = self.config
        kv = c.key_value_heads
        heads = self.qkv(x).reshape(*x.shape[:2], c.heads + 2 * kv, c.head_dim)
        q, k, v = jnp.split(heads, [c.heads, c.heads + kv], axis=2)
        if c.qk_norm:
            q, k = self._normed(self.query_norm, q), self._normed(self.key_norm, k)
        if rope is not None:
            q, k = self._rotated(q, rope, kind), self._rotated(k, rope, kind)
            q = _scaled(q, rope)
        return q, k, v

    def _rotated(self, x: Array, rope: Rope, kind: RopeKind) -> Array:
        return apply_rope(x, rope.table(kind), interleaved=self.config.rope_interleaved)

    def _normed(self, norm: Callable[[Array], Array], heads: Array) -> Array:
        if not self.config.qk_norm_joint:
            return norm(heads)
        return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)

    def decode(
        self,
        x: Hidden,
        rope: Rope | None,
        positions: Positions,
        cache: KVCache,
        layer: int | Int[Array, ""],
        windowed: Windowed,
        kind: RopeKind,
    ) -> tuple[Heads, KVCache]:
        """The attention of new tokens to the cache, which they are added to, before the output projection."""
        new, latent = self.to_cache(x, rope, kind)
        return attend_cached(
            self.config, new, positions, cache, layer, windowed, self.scores_of_sinks, latent
        )

    def to_cache(
        self, x: Hidden, rope: Rope | None, kind: RopeKind
    ) -> tuple[tuple[Array, Array, Array | None], LatentHeads | None]:
        """Queries, what the cache gets of new tokens, and, of latents, what makes keys and values of them."""
        return self.project(x, rope, kind), None

    def mix(
        self,
        projected: tuple[Array, Array, Array],
        segments: Segments | Documents | None = None,
        windowed: Windowed = True,
    ) -> Heads:
        """The attention of what ``project`` returned, before the output projection."""
        c = self.config
        return attention(
            *projected,
            segments=segments,
            window=c.sliding_window,
            windowed=windowed,
            scale=c.attention_scale,
            softcap=c.attention_softcap,
            sinks=self.scores_of_sinks,
            kernel=c.attention,
        )

    @property
    def scores_of_sinks(self) -> Sinks | None:
        """The score of each head's sink, if the model has some."""
        return self.sinks[...] if self.config.attention_sinks else None

    def join(self, heads: Heads) -> Hidden:
        """The output projection of all heads side by side."""
        return self.out(heads.reshape(*heads.shape[:2], self.config.attention_width))


def _scaled(q: Array, rope: Rope) -> Array:
    """Queries times their factors, if they have some."""
    if rope.query_scale is None:
        return q
    return q * jax.lax.stop_gradient(rope.query_scale)[..., None, None].astype(q.dtype)


_LATENT_EPSILON = 1e-6
"""Of the norms of latents: in DeepSeek's models it is this whatever that of the others is."""


class LatentAttention(Attention):
    """Attention whose keys and values are made of a latent (``zerojax.models.latent``).

    ``latent_down`` makes latent | rotary part of the keys, ``latent_up`` key | value of one head after the
    other.
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

    def project(self, x: Hidden, rope: Rope | None, kind: RopeKind = None) -> tuple[Array, Array, Array]:
        """As of ``Attention``."""
        c = self.config
        query, latents = self._compressed(x, rope, kind)
        latent, rotary = jnp.split(latents, [self.rank], axis=-1)
        made = self.latent_up(latent).reshape(*x.shape[:2], c.heads, -1)
        return query, *keys_and_values(made, rotary, c.head_dim - c.rope_width)

    def to_cache(
        self, x: Hidden, rope: Rope | None, kind: RopeKind
    ) -> tuple[tuple[Array, Array, Array | None], LatentHeads | None]:
        """As of ``Attention``: the cache has latents."""
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


_ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """The position-wise feed-forward network."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        self.activation = c.mlp
        if c.gated:
            self.gate = _linear(c.d_model, c.ffn_width, rngs, c.init_std, biases=c.biases)
        self.up = _linear(c.d_model, c.ffn_width, rngs, c.init_std, biases=c.biases)
        self.down = _linear(c.ffn_width, c.d_model, rngs, _residual_std(c), biases=c.biases)

    def __call__(self, x: Hidden) -> Hidden:
        """Apply up, the activation, and down."""
        if self.activation in ACTIVATIONS:
            return self.down(ACTIVATIONS[self.activation](self.gate(x), self.up(x)))
        return self.down(_ACTIVATIONS[self.activation](self.up(x)))


def _experts(c: GPTConfig, rngs: nnx.Rngs) -> Experts:
    assert c.mlp in ACTIVATIONS
    return Experts(
        *(c.d_model, c.ffn_width, c.experts, c.experts_per_token),
        router=c.router_config,
        activation=c.mlp,
        biases=c.biases,
        shared=c.shared_ffn,
        init=nnx.initializers.normal(c.init_std),
        down_init=nnx.initializers.normal(_residual_std(c)),
        rngs=rngs,
    )


def _unchanged(x: Hidden) -> Hidden:
    """In place of a norm that a model does not have."""
    return x


class Block(nnx.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)), where mlp may be ``Experts``.

    With config.post_norms each branch ends with a norm, with config.pre_norms it begins with one.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        def norm(wanted: bool) -> Any:
            return residual_norm(config, rngs) if wanted else _unchanged

        self.config = config
        self.norm_attention = norm(config.pre_norms)
        self.attention = (Attention if config.latent_rank is None else LatentAttention)(config, rngs=rngs)
        self.norm_mlp = norm(config.pre_norms)
        self.mlp = _experts(config, rngs) if config.experts else MLP(config, rngs=rngs)
        self.post_norm_attention = norm(config.post_norms)
        self.post_norm_mlp = norm(config.post_norms)
        if config.dropout:
            # All blocks of a step get the same key; the salt makes their masks differ.
            self.salt = nnx.Variable(jax.random.bits(rngs.params(), (), jnp.uint32))

    def __call__(
        self,
        x: Stream,
        rope: Rope | None = None,
        key: Key[Array, ""] | None = None,
        segments: Segments | Documents | None = None,
        windowed: Windowed = True,
        kind: RopeKind = None,
    ) -> Stream:
        """Apply the block.

        ``x`` is the residual stream, alone or with what the routers of earlier blocks did. The key turns
        dropout on. ``segments`` are the document of each position, or ``document_offsets`` of it.
        ``windowed`` says whether the sliding window, if the model has one, is this layer's, and ``kind``
        which table of ``rope``.
        """
        hidden, before = x if isinstance(x, tuple) else (x, None)
        rope = None if rope is None else rope.by_token(kind, len(hidden))
        heads = self.attention.mix(self._tiled(self._project, hidden, rope), segments, windowed)
        hidden, own = self.finish(hidden, heads, key)
        if before is None:
            return hidden
        if own is None:
            return hidden, before
        return hidden, jax.tree.map(lambda rows, row: jnp.concatenate([rows[1:], row[None]]), before, own)

    def decode(
        self,
        x: tuple[Hidden, KVCache],
        rope: Rope | None,
        positions: Positions,
        *,
        layer: int | Int[Array, ""],
        windowed: Windowed = True,
        kind: RopeKind = None,
    ) -> tuple[Hidden, KVCache]:
        """Apply the block to new tokens, which attend to the cache and are added to it.

        ``x`` is the residual stream, and the cache of all layers; the others are as for ``__call__``.
        """
        hidden, cache = x
        heads, cache = self.attention.decode(
            self.norm_attention(hidden), rope, positions, cache, layer, windowed, kind
        )
        return self.finish(hidden, heads)[0], cache

    def finish(
        self, x: Hidden, heads: Heads, key: Key[Array, ""] | None = None
    ) -> tuple[Hidden, RouterStats | None]:
        """The block's output, and what its router did, from its input and the heads of its attention.

        Experts have rounds of their own, and their routers count tokens.
        """
        kept = None
        if key is not None and self.config.dropout:
            keys = jax.random.split(jax.random.fold_in(key, self.salt[...]))
            kept = [_kept(x, self.config.dropout, key) for key in keys]
        if self.config.experts:
            return self._finish(x, heads, kept)
        return self._tiled(lambda *tile: self._finish(*tile)[0], x, heads, kept), None

    def _tiled[T](self, function: Callable[..., T], *xs: Any) -> T:
        """A part of the block that is of each token alone."""
        return tiled(function, *xs, tile=self.config.token_tile)

    def _project(self, x: Hidden, rope: Rope | None) -> tuple[Array, Array, Array]:
        return self.attention.project(self.norm_attention(x), rope)

    def _finish(
        self, x: Hidden, heads: Heads, kept: Sequence[Bool[Array, "batch time d_model"]] | None
    ) -> tuple[Hidden, RouterStats | None]:
        first, second = kept or (None, None)
        x = x + self._added(self.post_norm_attention(self.attention.join(heads)), first)
        out = self.mlp(self.norm_mlp(x))
        out, stats = out if isinstance(out, tuple) else (out, None)
        return x + self._added(self.post_norm_mlp(out), second), stats

    def _added(self, x: Hidden, kept: Bool[Array, "batch time d_model"] | None) -> Hidden:
        """What a branch adds to the residual stream."""
        c = self.config
        x = x if c.residual_scale == 1 else x * c.residual_scale
        return x if kept is None else _dropped(x, c.dropout, kept)


class GPT(nnx.Module):
    """A decoder-only language model.

    Its modules are ``embed``, ``position`` (learned positions only), ``blocks``, ``norm``, and ``head``
    (untied only). The blocks are a ``Stack``; or with layers of two kinds an ``nnx.Dict`` of one for each run
    of a kind, by the number of its first layer; or an ``nnx.List`` if config.scan is false.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.deterministic = False  # set by model.eval()
        self.embed = _embedding(c, c.vocab_size, rngs)
        if c.positions == "learned":
            self.position = _embedding(c, c.position_offset + c.max_seq_len, rngs)

        def stack(run: range) -> Stack:
            return Stack(partial(Block, c.of_layer(run.start)), len(run), rngs=rngs)

        if not c.scan:
            self.blocks = nnx.List([Block(c.of_layer(number), rngs=rngs) for number in range(c.layers)])
        elif len(c.runs) == 1:
            self.blocks = stack(c.runs[0])
        else:
            self.blocks = nnx.Dict({str(run.start): stack(run) for run in c.runs})
        self.norm = residual_norm(c, rngs)
        if not c.tied:
            self.head = _embedding(c, c.output_rows, rngs)

    @property
    def unembedding(self) -> Float[Array, "vocab d_model"]:
        """The output projection: the embedding itself when tied."""
        return (self.embed if self.config.tied else self.head).embedding[...]

    def embed_tokens(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "*batch time"],
        length: int | Int[Array, " batch"],
    ) -> tuple[Hidden, Rope | None]:
        """The start of the residual stream, and the rotary positions if the model has them.

        Args:
            tokens: ids in [0, vocab_size).
            positions: of the tokens.
            length: of the whole sequence, on which rope_scaling = "dynamic" and "longrope" depend; of each
                row's with "dynamic".
        """
        c = self.config
        x = look_up(self.embed.embedding[...], tokens)
        x = x if c.embedding_scale == 1 else x * c.embedding_scale
        if c.positions == "learned":
            return x + look_up(self.position.embedding[...], positions + c.position_offset), None
        return x, rope_of(c, positions, length)

    def _through[T](self, x: T, *args: Any, method: str = "__call__", **by_layer: Sequence[int]) -> T:
        """The output of the last block.

        Args:
            x: the input of the first one.
            *args: of every block.
            method: of blocks.
            **by_layer: an argument of each block.
        """
        c = self.config
        arguments = {"windowed": c.windowed, "kind": rope_kinds(c)}
        by_layer |= {name: values for name, values in arguments.items() if len(set(values)) > 1}
        if isinstance(self.blocks, nnx.List):
            for number, block in enumerate(self.blocks):
                own = {name: values[number] for name, values in by_layer.items()}
                x = getattr(block, method)(x, *args, **own)
            return x
        for run in c.runs:
            stack = self.blocks if isinstance(self.blocks, Stack) else self.blocks[str(run.start)]
            arrays = {name: jnp.array(values[run.start : run.stop]) for name, values in by_layer.items()}
            x = stack(x, *args, by_layer=arrays, method=method)
        return x

    def _finish(self, x: Hidden) -> Hidden:
        """The output of the last block, normed and scaled for the logits."""
        c, x = self.config, self.norm(x)
        return x if c.logit_divisor == 1 or c.outputs is not None else x / c.logit_divisor

    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        *,
        segments: Segments | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Hidden:
        """The normed output of the last block, in the dtype of the weights.

        With ``ZeroConfig(sequence_parallel=k)`` it is that of this device's tokens (``zerojax.own_tokens``);
        the arguments are whole rows, on which positions and segments depend.

        Args:
            tokens: ids in [0, vocab_size), at most max_seq_len per row.
            segments: the document of each token, for rows that hold several; equal for neighbours of one
                document. The output is that of each document alone in its row.
            rngs: source of dropout's random bits; None, like ``model.eval()``, turns dropout off.

        Raises:
            ConfigurationError: if the sequence is longer than max_seq_len.
        """
        return self._run(tokens, segments, rngs, None)[0]

    def routed(
        self,
        tokens: Int[Array, "batch time"],
        *,
        segments: Segments | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Hidden, RouterStats]:
        """``hidden``, and what each router did with this device's tokens, padding included.

        Raises:
            ConfigurationError: the model has no experts; or as ``hidden``.
        """
        c = self.config
        if not c.experts:
            raise ConfigurationError("[model] experts = 0: the model has no routers")
        count = c.layers - len(c.dense_layers)
        zeros = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), RouterStats.zeros(c.experts))
        hidden, stats = self._run(tokens, segments, rngs, zeros)
        assert stats is not None
        return hidden, stats

    def _run(
        self,
        tokens: Int[Array, "batch time"],
        segments: Segments | None,
        rngs: nnx.Rngs | None,
        stats: RouterStats | None,
    ) -> tuple[Hidden, RouterStats | None]:
        """The output of the last block, and in place of zeros what routers did."""
        c = self.config
        length = tokens.shape[1]
        if length > c.max_seq_len:
            raise ConfigurationError(f"a sequence of {length} tokens, but max_seq_len = {c.max_seq_len}")
        positions = jnp.arange(length) if segments is None else segment_positions(segments)
        hidden, rope = self.embed_tokens(own_tokens(tokens), own_tokens(positions, axis=-1), length)
        key = rngs.dropout() if rngs is not None and c.dropout and not self.deterministic else None
        if key is not None:
            key, first = jax.random.split(key)
            hidden = _dropped(hidden, c.dropout, _kept(hidden, c.dropout, first))
        documents = None if segments is None else document_offsets(segments)
        x: Stream = hidden if stats is None else (hidden, stats)
        x = self._through(x, rope, key, documents)
        hidden, stats = x if isinstance(x, tuple) else (x, None)
        return self._finish(hidden), stats

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        segments: Segments | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """Logits, fp32, of the token that follows each position; see ``hidden``."""
        return self.logits(self.hidden(tokens, segments=segments, rngs=rngs))

    def logits(self, hidden: Float[Array, "... d_model"]) -> Float[Array, "... vocab"]:
        """Logits, fp32, of normed outputs of the last block."""
        return logits(hidden, self.unembedding, self.config.logit_softcap)

    @property
    def context_length(self) -> int:
        """The longest sequence that it can continue, in tokens."""
        return self.config.max_seq_len

    @property
    def prefills_in_pieces(self) -> bool:
        """Whether a prompt's pieces have the keys of the whole: "dynamic" rotates all by the whole length."""
        return self.config.rope_scaling != "dynamic"

    @property
    def keys_by_cache_length(self) -> bool:
        """Whether the length of the cache decides how keys are rotated; see ``decode``."""
        return self.config.rope_scaling == "longrope"

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> KVCache:
        """An empty cache for ``batch`` rows of ``length`` tokens."""
        return KVCache.empty(self.config, batch, length, dtype)

    def decode(
        self,
        tokens: Int[Array, "batch time"],
        start: Int[Array, " batch"],
        end: Int[Array, " batch"],
        cache: KVCache,
    ) -> tuple[Hidden, KVCache]:
        """``hidden`` of new tokens, which attend to the cache and are added to it.

        With rope_scaling = "dynamic", cached keys stay as they were rotated at the length of their time, as
        in transformers. With "longrope" the length of the cache decides between short and long factors, so
        that all keys have the same; transformers computes the whole cache again when a text grows beyond
        rope_original_len.

        Args:
            tokens: ids in [0, vocab_size).
            start: the number of tokens of each row that are in the cache.
            end: the number of tokens after the call; those that follow in a row are padding.
            cache: as ``init_cache`` or this method returned it.
        """
        c = self.config
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        length = cache.keys.shape[3] if c.rope_scaling == "longrope" else end
        hidden, rope = self.embed_tokens(tokens, positions, length)
        x = hidden, cache
        hidden, cache = self._through(x, rope, positions, method="decode", layer=range(c.layers))
        return self._finish(hidden), cache


def logits(
    hidden: Float[Array, "... d_model"],
    unembedding: Float[Array, "vocab d_model"],
    softcap: float | None = None,
) -> Float[Array, "... vocab"]:
    """Scores of every token, accumulated and returned in fp32 from operands of any dtype.

    With a softcap they become softcap x tanh(scores / softcap).
    """
    scores = jnp.einsum("...d,vd->...v", hidden, unembedding, preferred_element_type=jnp.float32)
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
