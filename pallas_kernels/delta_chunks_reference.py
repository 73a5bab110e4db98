"""The specification of ``pallas_kernels.delta_chunks``."""

import jax
import jax.numpy as jnp
from jax import lax


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """A matrix product with an fp32 sum."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def unit_lower_inverse(system: jax.Array) -> jax.Array:
    """The inverse of I plus the strictly lower triangle of each matrix."""
    eye = jnp.broadcast_to(jnp.eye(system.shape[-1], dtype=system.dtype), system.shape)
    return lax.linalg.triangular_solve(system, eye, left_side=True, lower=True, unit_diagonal=True)


def delta_scan(
    query: jax.Array,
    scores: jax.Array,
    written: jax.Array,
    removed: jax.Array,
    key: jax.Array,
    decay: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.delta_chunks.scan_chunks``; also returns the state before each chunk."""

    def step(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        query, scores, written, removed, key, decay = chunk
        before = state.astype(query.dtype)
        written = (written - product(removed, before)).astype(query.dtype)
        out = product(query, before) + product(scores, written)
        state = state * decay[:, None, None] + product(key.mT, written)
        return state, (out.astype(query.dtype), before)

    last, (out, before) = lax.scan(step, state, (query, scores, written, removed, key, decay))
    return out, before, last


def delta_scan_backward(
    query: jax.Array,
    scores: jax.Array,
    removed: jax.Array,
    key: jax.Array,
    decay: jax.Array,
    of_out: jax.Array,
    of_last: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cotangents of ``written``, of the state after each chunk, and of the first state."""

    def step(
        of_after: jax.Array, chunk: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        query, scores, removed, key, decay, of_out = chunk
        low = of_after.astype(query.dtype)
        of_written = product(scores.mT, of_out) + product(key, low)
        of_before = of_after * decay[:, None, None] + product(query.mT, of_out)
        of_before -= product(removed.mT, of_written.astype(query.dtype))
        return of_before, (of_written, low)

    chunks = query, scores, removed, key, decay, of_out
    of_first, (of_written, of_after) = lax.scan(step, of_last, chunks, reverse=True)
    return of_written, of_after, of_first
