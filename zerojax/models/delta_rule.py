"""The gated delta rule, the rule of Mamba-2, and the short convolution before them.

A head keeps a state of fixed size in place of keys and values. ``pallas_kernels.delta_rule`` computes whole
rows, chunk by chunk; generation has one token at a time.

In packed rows a document's state begins at zero, and the convolution sees zeros before its first token. Masks
choose between values, so that exactly nothing crosses from one document to the next, in values and gradients.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Float32, Int

import pallas_kernels
from zerojax.models.flash_attention import ATTENTION_NAME, Segments

State = Float32[Array, "batch heads dim value_dim"]


def gated_delta_rule(
    query: Float[Array, "batch time key_heads dim"],
    key: Float[Array, "batch time key_heads dim"],
    value: Float[Array, "batch time heads value_dim"],
    log_decay: Float32[Array, "batch time heads"] | Float32[Array, "batch time heads dim"],
    beta: Float32[Array, "batch time heads"] | None,
    documents: Segments | None = None,
    state: State | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], State]:
    """Apply the rule to whole rows.

    Each query and key head serves as many neighbouring heads of values. The output has the checkpoint name
    "attention": under a remat policy that saves it the forward pass runs once.

    Args:
        query: scaled as the output is to be.
        key: of norm 1, if there is a beta.
        value: decides the dtype of products.
        log_decay: at most 0, for each head or for each channel of its keys.
        beta: from 0 to 2. None means Mamba-2's rule, in which tokens remove nothing from the state.
        documents: the number of each token's document, for rows that hold several.
        state: from before the row; None is zero.

    Returns:
        The outputs, in the values' dtype, and the state after the row.
    """
    batch, _, heads, width = value.shape
    before = jnp.zeros((batch, heads, key.shape[3], width), jnp.float32) if state is None else state
    numbers = jnp.zeros(value.shape[:2], jnp.int32) if documents is None else documents
    if value.shape[1] == 1:
        return _one_token(query, key, value, log_decay, beta, before)
    out, after = pallas_kernels.delta_rule(query, key, value, log_decay, beta, numbers, before)
    return checkpoint_name(out, ATTENTION_NAME), after


def _one_token(
    query: Array, key: Array, value: Array, log_decay: Array, beta: Array | None, state: State
) -> tuple[Array, State]:
    """The rule for the one token that generation has at a time."""
    repeats = value.shape[2] // key.shape[2]
    q, k = (jnp.repeat(x[:, 0], repeats, axis=1).astype(jnp.float32) for x in (query, key))
    decay = jnp.exp(log_decay[:, 0])
    state = state * decay.reshape(*decay.shape, *(1 for _ in range(4 - decay.ndim)))
    change = value[:, 0].astype(jnp.float32)
    if beta is not None:
        change = beta[:, 0, :, None] * (change - jnp.einsum("bhd,bhde->bhe", k, state))
    state = state + jnp.einsum("bhd,bhe->bhde", k, change)
    return jnp.einsum("bhd,bhde->bhe", q, state)[:, None].astype(value.dtype), state


def short_convolution(
    x: Float[Array, "batch time width"],
    kernel: Float[Array, "taps width"],
    documents: Segments | None = None,
    before: Float[Array, "batch taps_less_one width"] | None = None,
) -> Float[Array, "batch time width"]:
    """Each element's weighted sum over its last tokens, the token itself included, fp32.

    ``before`` are the inputs before the row, by default zeros.
    """
    taps, time = kernel.shape[0], x.shape[1]
    if before is None:
        before = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype)
    every = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(taps):
        shifted = lax.slice_in_dim(every, tap, tap + time, axis=1).astype(jnp.float32)
        if documents is not None and tap < taps - 1:
            numbers = jnp.pad(documents, ((0, 0), (taps - 1 - tap, 0)), mode="edge")[:, :time]
            shifted = jnp.where((numbers == documents)[..., None], shifted, 0)
        total += kernel[tap].astype(jnp.float32) * shifted
    return total


def last_inputs(
    x: Float[Array, "batch time width"], before: Float[Array, "batch kept width"], count: Int[Array, " batch"]
) -> Float[Array, "batch kept width"]:
    """The last inputs of a convolution, after ``count`` tokens of each row of ``x``."""
    every = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    places = count[:, None] + jnp.arange(before.shape[1])
    return jnp.take_along_axis(every, places[..., None], axis=1)
