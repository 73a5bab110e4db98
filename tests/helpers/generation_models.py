"""Small models that generate, and the texts to expect of them: of loops over prefixes, without a cache."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import zerojax
from zerojax.models import GPT, Block, GPTConfig, lm_loss

VOCAB, CONTEXT = 29, 24
ADAM = optax.adam(1e-2)  # one for all, which is checked once with each model
SMALL = GPTConfig(
    vocab_size=VOCAB, layers=2, d_model=8, heads=2, kv_heads=1, max_seq_len=CONTEXT, init_std=0.3,
    biases=False, positions="rope", norm="rms", mlp="swiglu", ffn=24, tied=False,
)  # fmt: skip
LISTED = GPTConfig(
    vocab_size=VOCAB, layers=2, d_model=8, heads=2, max_seq_len=CONTEXT, init_std=0.3, scan=False,
    sliding_window=5, sliding_window_pattern=2,
)  # fmt: skip


class Averages(nnx.Module):
    """A model of a user's own: it sees the mean of all tokens so far, and its cache is their sum."""

    def __init__(self, rngs: nnx.Rngs, blocks: int = 2, width: int = 6):
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.blocks = zerojax.Stack(lambda rngs: Residual(width, rngs), blocks, rngs=rngs)
        self.head = nnx.Linear(width, VOCAB, kernel_init=nnx.initializers.normal(1.0), rngs=rngs)

    def __call__(self, tokens):
        sums = jnp.cumsum(self.embed(tokens), axis=1)
        return self.logits(self.blocks(sums / jnp.arange(1, tokens.shape[1] + 1)[:, None]))

    def init_cache(self, batch, length, dtype):
        del length
        return {"sum": jnp.zeros((self.embed.features, batch), dtype)}

    def decode(self, tokens, start, end, cache):
        counts = start[:, None] + jnp.arange(1, tokens.shape[1] + 1)
        x = jnp.where((counts <= end[:, None])[..., None], self.embed(tokens), 0)
        sums = cache["sum"].T[:, None] + jnp.cumsum(x, axis=1)
        return self.blocks(sums / counts[..., None]), {"sum": sums[:, -1].T}

    def logits(self, hidden):
        return self.head(hidden)


class Residual(nnx.Module):
    """A block of ``Averages``."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, width, kernel_init=nnx.initializers.normal(2.0), rngs=rngs)

    def __call__(self, x):
        return x + jnp.sin(self.up(x))


class LinenResidual(linen.Module):
    """The block in Linen."""

    @linen.compact
    def __call__(self, x):
        return x + jnp.sin(linen.Dense(6, kernel_init=linen.initializers.normal(2.0))(x))


class LinenAverages(linen.Module):
    """The user's model in Linen."""

    def setup(self):
        self.embed = linen.Embed(VOCAB, 6)
        self.blocks = [LinenResidual() for _ in range(2)]
        self.head = linen.Dense(VOCAB, kernel_init=linen.initializers.normal(1.0))

    def through(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, tokens):
        sums = jnp.cumsum(self.embed(tokens), axis=1)
        return self.logits(self.through(sums / jnp.arange(1, tokens.shape[1] + 1)[:, None]))

    def init_cache(self, batch, length, dtype):
        del length
        return jnp.zeros((batch, 6), dtype)

    def decode(self, tokens, start, end, cache):
        counts = start[:, None] + jnp.arange(1, tokens.shape[1] + 1)
        x = jnp.where((counts <= end[:, None])[..., None], self.embed(tokens), 0)
        sums = cache[:, None] + jnp.cumsum(x, axis=1)
        return self.through(sums / counts[..., None]), sums[:, -1]

    def logits(self, hidden):
        return self.head(hidden)


def next_token_loss(model: Any, batch: Any) -> jax.Array:
    """The mean cross-entropy of any model."""
    tokens = batch["tokens"]
    scores = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def create(
    model: Any, nodes: int, local: int, *, seed: int = 3, abstract: bool = False, **options: Any
) -> zerojax.TrainState:
    """A state in fp32 of a GPT's config or of a factory; ``options`` are ``ZeroConfig``'s, lora and tx."""
    tx = options.pop("tx", ADAM)
    extra = {name: options.pop(name) for name in ("lora", "base") if name in options}
    preset = options.pop("preset", "zero3")
    units = (Block,) if isinstance(model, GPTConfig) and not model.scan else ()
    zero = {"compute_dtype": "float32", "block_size": 64, "units": units, **options}
    config = zerojax.ZeroConfig.preset(preset, **zero)
    factory = (lambda rngs: GPT(model, rngs=rngs)) if isinstance(model, GPTConfig) else model
    mesh = zerojax.make_mesh(nodes, local)
    if abstract:
        return zerojax.TrainState.abstract(factory, tx, lm_loss, mesh=mesh, zero=config)
    return zerojax.TrainState.create(factory, tx, lm_loss, mesh=mesh, zero=config, seed=seed, **extra)


def prompts(count: int = 11, longest: int = 12) -> list[np.ndarray]:
    """Prompts of many lengths, from 1 on."""
    rng = np.random.default_rng(5)
    lengths = [1, longest, *rng.integers(1, longest + 1, count)][:count]
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def greedy(
    model: Any, given: Sequence[np.ndarray], count: int, stop: int | None = None
) -> list[tuple[list[int], list[float]]]:
    """The likeliest tokens after each prompt and their log-probabilities, from whole forward passes."""
    texts = np.zeros((len(given), max(map(len, given)) + count), np.int32)
    for text, prompt in zip(texts, given, strict=True):
        text[: len(prompt)] = prompt
    ends = np.array([len(prompt) for prompt in given])
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in given]
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens)))
    for _ in range(count):
        scores = np.asarray(forward(texts))[np.arange(len(given)), ends - 1]
        texts[np.arange(len(given)), ends] = tokens = scores.argmax(axis=-1)
        ends += 1
        for (answer, log_probs), token, row in zip(found, tokens.tolist(), scores, strict=True):
            if stop is None or stop not in answer:
                answer.append(token)
                log_probs.append(float(row[token]))
    return found


def assert_same(
    got: zerojax.Completions, wanted: list[tuple[list[int], list[float]]], atol: float = 1e-4
) -> None:
    """The tokens and log-probabilities are those wanted, and zeros behind them."""
    for tokens, length, log_probs, (answer, expected) in zip(*got, wanted, strict=True):
        assert tokens[:length].tolist() == answer
        np.testing.assert_allclose(log_probs[:length], expected, atol=atol)
        assert not tokens[length:].any()
        assert not log_probs[length:].any()
