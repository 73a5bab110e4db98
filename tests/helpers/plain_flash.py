"""Attention in plain JAX whose backward pass reads its output and log-sum-exps, as flash attention's does."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


def flash(scale: float | None, mask: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """The output [..., time, heads, dim], and log-sum-exps [..., heads, time]."""
    found: tuple[Array, Array] = _flash(scale, mask, q, k, v)
    return found


def _scores(scale: float | None, mask: Array, q: Array, k: Array) -> Array:
    k = jnp.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    scores = jnp.einsum("...thd,...shd->...hts", q, k) * (scale or q.shape[-1] ** -0.5)
    return jnp.where(mask, scores, -jnp.inf)


def _forward(scale, mask, q, k, v):
    scores = _scores(scale, mask, q, k)
    v_of_heads = jnp.repeat(v, q.shape[-2] // v.shape[-2], axis=-2)
    out = jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(scores), v_of_heads)
    lse = jax.nn.logsumexp(scores, -1)
    return (out, lse), (mask, q, k, v, out, lse)


def _backward(scale, residuals, gradients):
    mask, q, k, v, out, lse = residuals
    gradient, _ = gradients
    scale, (kv_heads, dim) = scale or q.shape[-1] ** -0.5, k.shape[-2:]
    k_of_heads, v_of_heads = (jnp.repeat(x, q.shape[-2] // kv_heads, axis=-2) for x in (k, v))
    p = jnp.exp(_scores(scale, mask, q, k) - lse[..., None])
    towards = jnp.einsum("...thd,...shd->...hts", gradient, v_of_heads)
    of_scores = scale * p * (towards - (gradient * out).sum(-1).swapaxes(-1, -2)[..., None])
    of_q = jnp.einsum("...hts,...shd->...thd", of_scores, k_of_heads)
    of_k = jnp.einsum("...hts,...thd->...shd", of_scores, q)
    of_v = jnp.einsum("...hts,...thd->...shd", p, gradient)
    of_k, of_v = (x.reshape(*x.shape[:-2], kv_heads, -1, dim).sum(-2) for x in (of_k, of_v))
    return None, of_q, of_k, of_v


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(scale, mask, q, k, v):
    return _forward(scale, mask, q, k, v)[0]


_flash.defvjp(_forward, _backward)
