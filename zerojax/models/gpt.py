"""GPT-2, OPT, LLaMA, Gemma, OLMo and DeepSeek style decoders in Flax NNX, dense or mixtures of experts.

Every module computes in the dtype of its weights (the trainer passes compute-dtype copies); the statistics of
norms, rotary angles, softmax and the loss are always fp32. Both embeddings are stored (vocab, d_model).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from zerojax.adapters.loss import devices_a_row, own_tokens
from zerojax.adapters.nnx_units import Stack
from zerojax.errors import ConfigurationError
from zerojax.experts import RouterStats
from zerojax.matmul.late_zeros import zeros_after
from zerojax.models.attention import segment_lengths, segment_positions
from zerojax.models.block import (
    Block,
    Hidden,
    Keys,
    Routed,
    Stream,
    dropout_mask,
    dropped,
    residual_norm,
    rms_norm,
)
from zerojax.models.config import GPTConfig
from zerojax.models.flash_attention import Segments, document_offsets
from zerojax.models.kv_cache import Caches, KVCache, empty_caches
from zerojax.models.rope import Rope, rope_kinds, rope_of
from zerojax.models.shared_rows import whole_rows
from zerojax.schedule.breadth_first import with_batching_rule


def look_up(table: Float[Array, "rows dim"], ids: Int[Array, "*batch"]) -> Float[Array, "*batch dim"]:
    """Rows of a table by id, in the table's dtype. The gradient of the table is summed in fp32."""
    return with_batching_rule(_in_breadth, _look_up)(table, ids)


@jax.custom_vjp
def _look_up(table: Array, ids: Array) -> Array:
    return jnp.take(table, ids, axis=0)


def _look_up_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    # The row of a frequent token sums thousands of terms. A sum in bf16 would lose most of them. Its atomic
    # additions also serialise: 8192 equal tokens take 70 ms on an H200, and 0.4 ms in fp32.
    table, ids = residuals
    zeros = zeros_after(gradient, table.shape, jnp.float32)
    total = zeros.at[ids].add(gradient.astype(jnp.float32))
    return total.astype(table.dtype), None


_look_up.defvjp(lambda table, ids: (_look_up(table, ids), (table, ids)), _look_up_backward)


def _in_breadth(size: int, mapped: tuple[bool, bool], table: Array, ids: Array) -> tuple[Array, bool]:
    """Look up all micro-batches' rows at once, so that the table has a single gradient."""
    table_mapped, ids_mapped = mapped
    if table_mapped:
        return jax.vmap(_look_up, in_axes=(0, 0 if ids_mapped else None), axis_size=size)(table, ids), True
    return _look_up(table, ids), ids_mapped


def _embedding(c: GPTConfig, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(c.init_std)
    return nnx.Embed(rows, c.d_model, embedding_init=init, rngs=rngs)


class LayerInputs(nnx.Module):
    """An input of each layer for each token: a row of a second embedding, and a projection of the first's."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        width, init = c.layers * c.layer_inputs, nnx.initializers.normal(c.init_std)
        self.embed = nnx.Embed(c.vocab_size, width, embedding_init=init, rngs=rngs)
        self.projection = nnx.Linear(c.d_model, width, use_bias=False, kernel_init=init, rngs=rngs)
        self.norm = rms_norm(c, c.layer_inputs, rngs)

    def __call__(
        self, tokens: Int[Array, "batch time"], x: Hidden
    ) -> Float[Array, "layers batch time width"]:
        """The inputs of all layers; ``x`` are the scaled token embeddings."""
        c = self.config
        shape = (*tokens.shape, c.layers, c.layer_inputs)
        embedded = look_up(self.embed.embedding[...], tokens).reshape(shape) * c.layer_inputs**0.5
        projected = self.norm((self.projection(x) * c.d_model**-0.5).reshape(shape))
        return jnp.moveaxis((projected + embedded) * 0.5**0.5, 2, 0)


Ropes = Rope | list[Rope] | None
"""The rotary positions of all layers, of each kind of layers, or None."""


class Head(nnx.Embed):
    """An output projection with a bias, which starts at zero."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.init_std)
        super().__init__(config.output_rows, config.d_model, embedding_init=init, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.output_rows))


_COLUMNS = 8
"""Columns that a head's bias adds to its matmul. Rows stay aligned for tensor cores."""


class GPT(nnx.Module):
    """A decoder-only language model.

    Its modules are ``embed``, ``position`` (learned positions only), ``layer_inputs`` (if it has a width),
    ``blocks``, ``norm``, and ``head`` (untied only). The blocks are a ``Stack``, or an ``nnx.List`` if
    config.scan is false.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.deterministic = False  # set by model.eval()
        if c.shares_keys:
            raise ConfigurationError(
                f"[model] kv_shared_layers = {c.kv_shared_layers} must be below layers = {c.layers}"
            )
        self.embed = _embedding(c, c.vocab_size, rngs)
        if c.positions == "learned":
            self.position = _embedding(c, c.position_offset + c.max_seq_len, rngs)
        if c.layer_inputs:
            self.layer_inputs = LayerInputs(c, rngs=rngs)
        if c.scan:
            kinds = [partial(Block, kind) for kind, _ in c.kinds]
            parts = list(map(len, c.parts))
            self.blocks = Stack([kinds[kind] for kind in c.order], c.layers, rngs=rngs, parts=parts)
        else:
            self.blocks = nnx.List([Block(c.of_layer(number), rngs=rngs) for number in range(c.layers)])
        self.norm = residual_norm(c, rngs)
        if not c.tied:
            self.head = Head(c, rngs=rngs) if c.head_bias else _embedding(c, c.output_rows, rngs)

    @property
    def unembedding(self) -> Float[Array, "vocab width"]:
        """The output projection: the embedding itself when tied.

        With config.head_bias it has ``_COLUMNS`` more columns than d_model: the bias, then zeros. ``hidden``
        has 1 / logit_divisor and zeros there.
        """
        if self.config.tied:
            return self.embed.embedding[...]
        table = self.head.embedding[...]
        if not isinstance(self.head, Head):
            return table
        bias = jnp.pad(self.head.bias[...][:, None], ((0, 0), (0, _COLUMNS - 1)))
        return jnp.concatenate([table, bias], axis=1)

    def embed_tokens(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "*batch time"],
        length: int | Int[Array, "batch #time"],
    ) -> tuple[Hidden, Ropes]:
        """The start of the residual stream, and the rotary positions if the model has them.

        If layers with and without the sliding window differ, each kind has its own rotary positions.

        Args:
            tokens: ids in [0, vocab_size).
            positions: position of each token in its document.
            length: tokens of the whole sequence, as one number, one for each row or one for each token. It
                matters for rope_scaling = "dynamic" and "longrope" only.
        """
        c = self.config
        x = look_up(self.embed.embedding[...], tokens)
        x = x if c.embedding_scale == 1 else x * c.embedding_scale
        if c.positions == "learned":
            return x + look_up(self.position.embedding[...], positions + c.position_offset), None
        if c.windows_differ:
            return x, [rope_of(kind, positions, length) for kind, _ in c.kinds]
        return x, rope_of(c, positions, length)

    def _through(
        self,
        x: Stream,
        rope: Ropes,
        *,
        shared: Mapping[str, Any],
        by_layer: Mapping[str, Sequence[int] | Array],
        by_kind: Mapping[str, Sequence[int]] | None = None,
        method: str = "__call__",
    ) -> Stream:
        """Run all blocks on ``x`` and return the last one's output.

        All blocks get the ``shared`` arguments. ``by_layer`` are arguments with a value for each block, and
        ``by_kind`` arguments with a value for each kind of blocks.
        """
        c = self.config
        by_kinds: dict[str, Sequence[Any]] = {**(by_kind or {})}
        if isinstance(rope, list):
            by_kinds["rope"] = rope
        else:
            arguments = {"windowed": c.windowed, "kind": rope_kinds(c)}
            by_layer = {**by_layer, **{name: own for name, own in arguments.items() if len(set(own)) > 1}}
            shared = {**shared, "rope": rope}
        arrays = {name: jnp.asarray(values) for name, values in by_layer.items()}
        if c.kv_shared_layers:
            x = x._replace(keys=self._no_keys(x.hidden))
        for part, layers in enumerate(c.parts):
            keys = {}
            if part:  # these layers read the same keys, which are not passed from layer to layer
                x, keys = x._replace(keys=None), {"keys": x.keys}
            if isinstance(self.blocks, Stack):
                options = {"part": part, "by_layer": arrays, "by_kind": by_kinds, "method": method}
                x = self.blocks(x, **shared, **keys, **options)
                continue
            for number in layers:
                own = {name: values[number] for name, values in by_layer.items()}
                own |= {name: values[c.order[number]] for name, values in by_kinds.items()}
                x = getattr(self.blocks[number], method)(x, **shared, **keys, **own)
        return x

    def _no_keys(self, x: Hidden) -> Keys:
        """Zeros in place of the keys and values that later layers read."""
        own = (self.config.of_layer(number) for number in self.config.parts[0])
        shapes = {c.sliding_window is not None: (*x.shape[:2], c.key_value_heads, c.head_dim) for c in own}
        zeros = {window: jnp.zeros(shape, x.dtype) for window, shape in shapes.items()}
        return {window: (own, own) for window, own in zeros.items()}

    def _finish(self, x: Hidden) -> Hidden:
        """The output of the last block, normed and scaled for the logits."""
        c, x = self.config, self.norm(x)
        if c.head_bias:
            ones = jnp.zeros((*x.shape[:-1], _COLUMNS), x.dtype).at[..., 0].set(1)
            x = jnp.concatenate([x, ones], axis=-1)
        return x if c.logit_divisor == 1 or c.outputs is not None else x / c.logit_divisor

    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        *,
        segments: Segments | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Hidden:
        """The normed output of the last block, [batch, time, d_model] in the dtype of the weights.

        With ``config.head_bias`` it has ``_COLUMNS`` more columns, which multiply the bias in
        ``unembedding``. With ``ZeroConfig(sequence_parallel=k)`` the result covers this device's tokens
        (``zerojax.own_tokens``), but the arguments are whole rows, because positions and segments depend on
        them.

        Args:
            tokens: ids in [0, vocab_size), at most max_seq_len per row.
            segments: the document of each token, for rows that hold several; equal for neighbours of one
                document. Each document gets the output that it would get alone in its row.
            rngs: source of dropout's random bits; None, like ``model.eval()``, turns dropout off.

        Raises:
            ConfigurationError: the sequence is longer than max_seq_len.
        """
        return self._run(tokens, segments, rngs, None)[0]

    def routed(
        self,
        tokens: Int[Array, "batch time"],
        *,
        segments: Segments | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Hidden, RouterStats]:
        """``hidden``, and each router's statistics of this device's tokens, padding included.

        The statistics have a leading axis of the layers with experts.

        Raises:
            ConfigurationError: the model has no experts, or the sequence is longer than max_seq_len.
        """
        c = self.config
        if not c.experts:
            raise ConfigurationError(
                "[model] experts = 0: the model has no routers. Call hidden instead of routed"
            )
        count = len(c.expert_layers)
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
    ) -> Routed:
        """``hidden``, and the routers' statistics if ``stats`` has zeros to replace."""
        c = self.config
        length = tokens.shape[1]
        if length > c.max_seq_len:
            raise ConfigurationError(
                f"a sequence of {length} tokens, but max_seq_len = {c.max_seq_len}: shorten it, or raise "
                "the latter"
            )
        if segments is None:
            positions, lengths = jnp.arange(length), length
        else:
            positions, lengths = segment_positions(segments), own_tokens(segment_lengths(segments))
        own = own_tokens(tokens)
        hidden, rope = self.embed_tokens(own, own_tokens(positions, axis=-1), lengths)
        by_layer = self._inputs_of_layers(own, hidden)
        key = rngs.dropout() if rngs is not None and c.dropout and not self.deterministic else None
        if key is not None:
            key, first = jax.random.split(key)
            hidden = dropped(hidden, c.dropout, dropout_mask(hidden, c.dropout, first))
        documents = None if segments is None else document_offsets(segments)
        if key is not None:
            # The layer's number makes its dropout masks differ from the other layers'.
            by_layer["layer"] = range(c.layers)
        shared = {"key": key, "documents": documents}
        x = self._through(Stream(hidden, stats), rope, shared=shared, by_layer=by_layer)
        return self._finish(x.hidden), x.stats

    def _inputs_of_layers(
        self, tokens: Int[Array, "batch time"], x: Hidden
    ) -> dict[str, Sequence[int] | Array]:
        """The blocks' argument ``own`` for each layer, if the model has it."""
        return {"own": self.layer_inputs(tokens, x)} if self.config.layer_inputs else {}

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        segments: Segments | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """Logits of the token that follows each position, fp32. For the arguments see ``hidden``."""
        return self.logits(self.hidden(tokens, segments=segments, rngs=rngs))

    def logits(self, hidden: Float[Array, "... d_model"]) -> Float[Array, "... vocab"]:
        """Logits of normed outputs of the last block, fp32."""
        return logits(hidden, self.unembedding, self.config.logit_softcap)

    @property
    def context_length(self) -> int:
        """The longest sequence that the model can continue, in tokens."""
        return self.config.max_seq_len

    @property
    def prefills_in_pieces(self) -> bool:
        """Whether a prompt's pieces get the keys that the whole prompt would get.

        With "dynamic" they don't, because the length of the whole prompt rotates every key.
        """
        return self.config.rope_scaling != "dynamic"

    @property
    def keys_by_cache_length(self) -> bool:
        """Whether the length of the cache decides how keys are rotated; see ``decode``."""
        return self.config.rope_scaling == "longrope"

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Caches:
        """An empty cache for ``batch`` rows of up to ``length`` tokens, with keys and values in ``dtype``."""
        return empty_caches(self.config, batch, length, dtype)

    def decode(
        self,
        tokens: Int[Array, "batch time"],
        start: Int[Array, " batch"],
        end: Int[Array, " batch"],
        cache: Caches,
    ) -> tuple[Hidden, Caches]:
        """``hidden`` of new tokens, which attend to the cache and are added to it.

        With rope_scaling = "dynamic" each cached key keeps the rotation for the length at which it was
        cached, as in transformers. With "longrope" the length of the cache chooses short or long factors for
        all keys. (transformers instead recomputes the whole cache when a text grows beyond
        rope_original_len.)

        Args:
            tokens: ids in [0, vocab_size).
            start: tokens of each row in the cache before the call.
            end: tokens of each row in the cache after the call. Columns of ``tokens`` beyond it are padding.
            cache: from ``init_cache`` or an earlier call.
        """
        c = self.config
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        lengths = (own.keys.shape[3] for own in cache if isinstance(own, KVCache))
        length = next(lengths) if c.rope_scaling == "longrope" else end[:, None]
        hidden, rope = self.embed_tokens(tokens, positions, length)
        # Layers of a kind share a cache, and "layer" is a layer's index in it.
        order, own = c.order, c.key_layers
        places = [order[:number].count(order[number]) for number in own]
        x = self._through(
            Stream(hidden, caches=cache),
            rope,
            shared={"positions": positions, "end": end},
            by_layer={"layer": places, **self._inputs_of_layers(tokens, hidden)},
            by_kind={"cache": [order[own[order.index(kind)]] for kind in range(len(cache))]},
            method="decode",
        )
        return self._finish(x.hidden), x.caches


def units_of(config: GPTConfig) -> tuple[type[nnx.Module], ...]:
    """The ``ZeroConfig.units`` of a model, besides the layers of its ``Stack``."""
    inputs = (LayerInputs,) if config.layer_inputs else ()
    return inputs if config.scan else (Block, *inputs)


def logits(
    hidden: Float[Array, "... d_model"],
    unembedding: Float[Array, "vocab d_model"],
    softcap: float | None = None,
) -> Float[Array, "... vocab"]:
    """Logits of all tokens, fp32, accumulated in fp32 from operands of any dtype.

    With a softcap they become softcap x tanh(logits / softcap).
    """
    scores = jnp.einsum("...d,vd->...v", hidden, unembedding, preferred_element_type=jnp.float32)
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def scores(model: GPT, tokens: Int[Array, "rows time"]) -> Float[Array, "rows time"]:
    """The score of the text up to each position, fp32.

    With ``ZeroConfig(sequence_parallel=k)`` the result covers this device's tokens (``zerojax.own_tokens``).

    Args:
        model: with config.outputs = 1, whole or as a loss function gets it. Its logit_softcap does not apply.
        tokens: a text per row, int32; anything may follow the text.

    Raises:
        ConfigurationError: the model has another number of outputs.
    """
    if model.config.outputs != 1:
        raise ConfigurationError(
            f"[model] outputs = {model.config.outputs}: scores need a model with outputs = 1"
        )
    return logits(model.hidden(tokens), model.unembedding)[..., 0]


def last_scores(
    model: GPT, tokens: Int[Array, "rows time"], mask: Float[Array, "rows mask"]
) -> Float[Array, " rows"]:
    """The score of each text at its last token that counts, on all devices that share its row.

    Column i of the mask belongs to tokens[:, i + 1], and is 1 where that token counts.
    """
    last = mask.shape[1] - jnp.argmax(mask[:, ::-1], axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % devices_a_row())))
    return jnp.take_along_axis(whole_rows(scores(model, tokens)), last[:, None], axis=1)[:, 0]
