"""Ways in which a module multiplies by a weight, for tests of what meets it there."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from zerojax.matmul import fp8
from zerojax.matmul.operand import Fp8Operand
from zerojax.matmul.replay import whole

CUBE = (4, 2, 16)
"""Batch, time, width: of the activations."""


def exact(seed: int, *shape: int) -> jax.Array:
    """Numbers whose products and sums are exact in fp8 matmuls: small integers."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def operand(weight: jax.Array, name: str = "block/w") -> Fp8Operand:
    scale = fp8.scale_for(jnp.max(jnp.abs(weight)), fp8.E4M3)
    return Fp8Operand(fp8.encode(weight, scale), jnp.zeros_like(weight), scale, name)


class Dense(nnx.Module):
    """As Flax calls its matmul, with a cast and a bias."""

    def __init__(self):
        self.linear = nnx.Linear(16, 32, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)


def through_nnx(w, x):
    graph, _, rest = nnx.split(Dense(), nnx.Param, ...)
    params = nnx.State({"linear": {"kernel": nnx.Param(w), "bias": nnx.Param(jnp.ones(32))}})
    return nnx.merge(graph, params, rest).linear(x)


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))


def loop(w, x):
    """Around its matmuls a module may do anything."""
    x = lax.scan(lambda c, i: (c + i, None), x @ w, jnp.arange(3.0))[0]
    x = lax.while_loop(lambda c: jnp.sum(c) < 0, jnp.abs, x)
    x = lax.cond(jnp.sum(x) > 0, lambda x: x, lambda x: -x, x)
    return twice(jax.nn.relu(x)) + jax.random.uniform(jax.random.key(3), x.shape)


MATMULS = {
    "dot": lambda w, x: jnp.dot(x, w),
    "matmul": lambda w, x: x @ w,
    "transposed": lambda w, x: jnp.swapaxes(w.T @ jnp.swapaxes(x, 1, 2), 1, 2),
    "flipped": lambda w, x: jnp.einsum("kn,btk->btn", w, x),
    "tensordot": lambda w, x: jnp.tensordot(w, x, axes=((0,), (2,))),
    "weight of two free axes": lambda w, x: jnp.einsum("btk,khd->bthd", x, w.reshape(16, 4, 8)),
    "weight of two free axes, first": lambda w, x: jnp.einsum("khd,btk->hbdt", w.reshape(16, 4, 8), x),
    "two contracted axes": lambda w, x: jnp.einsum(
        "bthd,hdn->btn", x.reshape(4, 2, 4, 4), w.reshape(4, 4, 32)
    ),
    "contracted out of order": lambda w, x: lax.dot_general(
        x.reshape(4, 2, 4, 4), w.reshape(4, 4, 32).transpose(1, 0, 2), (((3, 2), (0, 1)), ((), ()))
    ),
    "one row": lambda w, x: x[0, 0] @ w,
    "split": lambda w, x: [x @ part for part in jnp.split(w, [16, 24], axis=1)],
    "qkv": lambda w, x: [x @ w.reshape(16, 2, 16)[:, i] for i in range(2)],
    "sliced": lambda w, x: x[..., :8] @ w[4:12, ::2],
    "reversed": lambda w, x: x @ lax.rev(w, (0,)),
    "cast": lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
    "wider sum": lambda w, x: jnp.dot(
        x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    ),
    "used twice": lambda w, x: jnp.tanh(x @ w) @ w.T,
    "nested jit": lambda w, x: jax.jit(lambda w, x: jax.jit(jnp.dot)(x, w))(w.T.T, x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x),
    "vmap": lambda w, x: jax.vmap(jax.vmap(lambda row: row @ w))(x),
    "vmap over columns": lambda w, x: jax.vmap(lambda column: x @ column, in_axes=1)(w),
    "nnx.Linear": through_nnx,
    "read whole": lambda w, x: jnp.einsum("hbk,khd->hbd", x, whole(w).reshape(16, 4, 8)),
    "among loops and random numbers": loop,
}
