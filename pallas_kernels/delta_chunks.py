"""The gated delta rule from one chunk of tokens to the next, with its derivatives.

``zerojax.models.delta_rule`` computes the chunks.

The recurrence over chunks and the triangular systems have Triton kernels: XLA would start several small
kernels for each chunk. Everything else in the backward pass is a batched matrix product, which XLA computes.
Kernel and specification differ by rounding.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import delta_chunks_reference
from pallas_kernels.delta_chunks_reference import product
from pallas_kernels.dispatch import dispatch

_Residuals = tuple[tuple[jax.Array, ...], jax.Array]
"""The arguments of ``scan_chunks``, and the state before each chunk."""


@jax.custom_vjp
def solve_unit_lower(system: jax.Array, wanted: jax.Array) -> jax.Array:
    """Solve ``(I + L) x = wanted``, where L is the strictly lower triangle of each matrix.

    Args:
        system: fp32 [..., tokens, tokens]; the upper triangle and the diagonal are not read.
        wanted: fp32 [..., tokens, columns].

    Returns:
        fp32, like ``wanted``.
    """
    return _solve_fwd(system, wanted)[0]


def _solve_fwd(system: jax.Array, wanted: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = dispatch("unit_lower_inverse", system, specification=delta_chunks_reference)
    solved = _exact(inverse, wanted)
    return solved, (inverse, solved)


def _solve_bwd(residuals: tuple[jax.Array, jax.Array], of_solved: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, solved = residuals
    of_wanted = _exact(inverse.mT, of_solved)
    return jnp.tril(-_exact(of_wanted, solved.mT), -1), of_wanted


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    """An fp32 product without TF32."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


solve_unit_lower.defvjp(_solve_fwd, _solve_bwd)


@jax.custom_vjp
def scan_chunks(
    query: jax.Array,
    scores: jax.Array,
    written: jax.Array,
    removed: jax.Array,
    key: jax.Array,
    decay: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Carry a state S over chunks of tokens.

    With W = written - removed S, a chunk's outputs are ``query S + scores W``, and the next state is
    ``decay S + key^T W``. S and W are rounded to the dtype of ``query`` where they are multiplied; sums and
    the carried state are fp32.

    Args:
        query: [chunks, heads, tokens, dim], bf16 or fp32.
        scores: [chunks, heads, tokens, tokens], in the dtype of ``query``.
        written: [chunks, heads, tokens, value_dim], fp32.
        removed: [chunks, heads, tokens, dim], in the dtype of ``query``.
        key: [chunks, heads, tokens, dim], in the dtype of ``query``.
        decay: [chunks, heads], fp32.
        state: [heads, dim, value_dim], fp32.

    Returns:
        The outputs [chunks, heads, tokens, value_dim] in the dtype of ``query``, and the last state.
    """
    return _scan_fwd(query, scores, written, removed, key, decay, state)[0]


def _scan_fwd(*chunks: jax.Array) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    out, before, last = dispatch("delta_scan", *chunks, specification=delta_chunks_reference)
    return (out, last), (chunks, before)


def _scan_bwd(residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    (query, scores, written, removed, key, decay, _), before = residuals
    low = query.dtype
    of_out, of_last = cotangents
    given = query, scores, removed, key, decay, of_out, of_last
    of_written, of_after, of_state = dispatch(
        "delta_scan_backward", *given, specification=delta_chunks_reference
    )
    wrote = (written - product(removed, before)).astype(low)
    return (
        product(of_out, before.mT).astype(low),
        product(of_out, wrote.mT).astype(low),
        of_written,
        -product(of_written.astype(low), before.mT).astype(low),
        product(wrote, of_after.mT).astype(low),
        jnp.sum(of_after.astype(jnp.float32) * before.astype(jnp.float32), axis=(-2, -1)),
        of_state,
    )


scan_chunks.defvjp(_scan_fwd, _scan_bwd)
