"""A decoder like Gemma 4, and the check of its decoding."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zerojax.models import GPT, GPTConfig
from zerojax.models.kv_cache import Caches

GEMMA4 = GPTConfig(
    vocab_size=64,
    layers=4,
    d_model=16,
    heads=4,
    kv_heads=2,
    head_width=4,
    ffn=24,
    norm="rms",
    post_norms=True,
    positions="rope",
    rope_scaling="proportional",
    rope_fraction=0.5,
    rope_local_theta=100.0,
    mlp="geglu",
    biases=False,
    qk_norm=True,
    value_norm=True,
    query_scalar=1.0,
    layer_scale=True,
    sliding_window=6,
    sliding_window_pattern=2,
    full_head_width=8,
    max_seq_len=128,
)


def check_decoding(model: GPT, tokens: jax.Array, whole: jax.Array) -> Caches:
    """Decode 28 tokens, some at once and some one by one: their logits are those of ``whole``.

    Returns the caches.
    """
    decode = nnx.jit(lambda model, *args: model.decode(*args))
    cache, start = model.init_cache(2, 40, jnp.float32), 0
    for count in (13, 1, 1, 13):
        begin = jnp.full(2, start)
        hidden, cache = decode(model, tokens[:, start : start + count], begin, begin + count, cache)
        np.testing.assert_allclose(model.logits(hidden), whole[:, start : start + count], atol=2e-5)
        start += count
    return cache
