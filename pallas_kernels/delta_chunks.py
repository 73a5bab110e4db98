"""The gated delta rule, Kimi's delta rule and Mamba-2's by chunks of tokens, with their derivatives.

The chunked form computes ``CHUNK`` tokens together by matrix products (Yang and others, "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", 2024). A triangular system for each chunk tells what
its tokens write into the state. Then a scan over chunks carries the state.

States, decays and the triangular systems are fp32; other products have operands of the values' dtype and fp32
sums. The backward pass computes the chunks again: besides its arguments it keeps one state for each chunk, so
that memory grows linearly with the sequence. Kernel and specification differ by rounding.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import delta_chunks_reference as specification
from pallas_kernels.backends import dispatch
from pallas_kernels.delta_chunks_reference import CHUNK

STATES_NAME = "attention"
"""The checkpoint name of the states before chunks. A remat policy that saves them runs the rule once."""

_Args = tuple[jax.Array | None, ...]


def delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    documents: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to whole rows of several heads.

    A head keeps a state, a matrix that maps keys to values. Each token lets it decay, moves what it returns
    for the token's key towards the token's value, and reads it with the token's query (Yang, Kautz and
    Hatamizadeh, "Gated Delta Networks", 2024, equation 10; without a beta Dao and Gu, 2024, 2405.21060,
    section 5).

    Each query and key head serves as many neighbouring heads of values. A document's state begins at zero.
    Masks choose between values, so that exactly nothing crosses from one document to the next, in values and
    gradients.

    Args:
        query: [batch, time, key_heads, dim], scaled as the output is to be.
        key: [batch, time, key_heads, dim], of norm 1 if there is a beta.
        value: [batch, time, heads, value_dim], bf16 or fp32, the dtype of ``query`` and ``key``, too.
        log_decay: [batch, time, heads], fp32, at most 0. With a further axis, [batch, time, heads, dim], each
            channel of the keys decays at its own rate (Kimi Delta Attention, 2510.26692).
        beta: [batch, time, heads], fp32, from 0 to 2. None means Mamba-2's rule, in which tokens remove
            nothing from the state.
        documents: [batch, time], int32, the number of each token's document.
        state: [batch, heads, dim, value_dim], fp32, from before the row.

    Returns:
        The outputs, like ``value``, and the state after the row.
    """
    time = value.shape[1]

    def filled(x: jax.Array) -> jax.Array:
        """Whole chunks: tokens of zeros behind a row change nothing."""
        return jnp.pad(x, ((0, 0), (0, -time % CHUNK), *((0, 0) for _ in x.shape[2:])))

    rows = (None if x is None else filled(x) for x in (query, key, value, log_decay, beta))
    documents = jnp.pad(documents, ((0, 0), (0, -time % CHUNK)), mode="edge")
    out, last = _by_chunks(*rows, documents, state)
    return out[:, :time], last


def _computed(name: str, *args: jax.Array | None) -> tuple[jax.Array, ...]:
    return dispatch(name, *args, specification=specification)


@jax.custom_vjp
def _by_chunks(*args: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    return _forward(*args)[0]


def _forward(*args: jax.Array | None) -> tuple[tuple[jax.Array, jax.Array], tuple[_Args, jax.Array]]:
    out, before, last = _computed("delta_rule", *args)
    return (out, last), (args, checkpoint_name(before, STATES_NAME))


def _backward(
    residuals: tuple[_Args, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    args, before = residuals
    given = *args, before, *cotangents
    *of_rows, of_state = _computed("delta_rule_backward", *given)
    return *of_rows, None, of_state


_by_chunks.defvjp(_forward, _backward)
