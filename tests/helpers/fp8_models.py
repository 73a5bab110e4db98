"""Models with fp8 matmuls, and the same with matmuls that simulate them, written without zerojax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from core_models import WIDTH, Case, regression_batch, squared_error
from flax import linen, nnx

import zerojax

INNER, HIDDEN = 16, 48


def rounded(x: jax.Array, dtype: Any, top: float) -> jax.Array:
    """In fp8 and back, multiplied by the largest power of two that takes the peak to at most ``top``."""
    peak = jnp.max(jnp.abs(x)).astype(jnp.float32)
    powers = jnp.ldexp(jnp.ones(200), jnp.arange(-100, 100))
    scale = jnp.max(jnp.where(peak * powers <= top, powers, 0))
    scale = jnp.where(peak > 0, scale, 1)
    return (x.astype(jnp.float32) * scale).astype(dtype).astype(jnp.float32) / scale


@jax.custom_vjp
def simulated(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A matmul of what is left in fp8, in fp32."""
    return _forward(x, weight)[0]


def _forward(x: jax.Array, weight: jax.Array) -> Any:
    x, weight = (rounded(value, jnp.float8_e4m3fn, 448) for value in (x, weight))
    return jnp.tensordot(x, weight, 1, precision="highest"), (x, weight)


def _backward(kept: Any, cotangent: jax.Array) -> Any:
    x, weight = kept
    cotangent = rounded(cotangent, jnp.float8_e5m2, 57344)
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    return cotangent @ weight.T, x.reshape(-1, x.shape[-1]).T @ flat


simulated.defvjp(_forward, _backward)


def simulated_dot(x: jax.Array, weight: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """``simulated`` where Flax calls ``lax.dot_general``."""
    return simulated(x, weight)


def simulated_dot_of_copies(x: jax.Array, weight: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """The same of delta's copies, which are bf16 before they are encoded."""
    return simulated(x, weight + jax.lax.stop_gradient(weight.astype(jnp.bfloat16) - weight))


DOTS = {"none": jax.lax.dot_general, "weights": simulated_dot, "replicas": simulated_dot_of_copies}


class Fp8Block(nnx.Module):
    """A norm, two kernels for fp8, and one of sizes that are no multiples of 16."""

    def __init__(self, dot: Any = jax.lax.dot_general, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(INNER, rngs=rngs)
        self.up = nnx.Linear(INNER, HIDDEN, dot_general=dot, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, INNER, use_bias=False, dot_general=dot, rngs=rngs)
        self.odd = nnx.Linear(INNER, 5, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.down(jnp.tanh(self.up(self.norm(x))))
        return x + 0.1 * jnp.mean(jnp.tanh(self.odd(x)), axis=-1, keepdims=True)


class Fp8Model(nnx.Module):
    """Blocks in a list or a stack between layers of no unit."""

    def __init__(self, rngs: nnx.Rngs, stacked: bool, dot: Any = jax.lax.dot_general, layers: int = 3):
        block = functools.partial(Fp8Block, dot)
        self.first = nnx.Linear(WIDTH, INNER, rngs=rngs)
        if stacked:
            self.blocks = zerojax.Stack(block, layers, rngs=rngs)
        else:
            self.blocks = nnx.List([block(rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(INNER, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        if isinstance(self.blocks, zerojax.Stack):
            return self.last(self.blocks(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class LinenFp8Block(linen.Module):
    dot: Any = None

    @linen.compact
    def __call__(self, x):
        hidden = linen.Dense(HIDDEN, dot_general=self.dot)(linen.LayerNorm()(x))
        return x + linen.Dense(INNER, dot_general=self.dot)(jnp.tanh(hidden))


class LinenFp8Model(linen.Module):
    scanned: bool
    dot: Any = None

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(INNER)(x)
        if self.scanned:
            scan = linen.scan(
                lambda block, carry: (block(carry), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = scan(LinenFp8Block(self.dot), x)
        else:
            for _ in range(2):
                x = LinenFp8Block(self.dot)(x)
        return linen.Dense(1)(x)


@functools.cache
def fp8_case(name: str, simulate: str = "none") -> Case:
    """ "list", "stack", "linen" or "linen-scan"; as it is, or with simulated fp8 matmuls (``DOTS``)."""
    if name.startswith("linen"):
        model = LinenFp8Model(name == "linen-scan", DOTS[simulate] if simulate != "none" else None)
        return Case(model, squared_error, (LinenFp8Block,), regression_batch, linen=True)
    model = functools.partial(Fp8Model, stacked=name == "stack", dot=DOTS[simulate])
    return Case(model, squared_error, (Fp8Block,), regression_batch)


def chosen(state: zerojax.TrainState) -> dict[tuple[str, ...], Any]:
    """The layouts of fp8 weights, by path."""
    return {leaf.path: leaf for leaf in state.spec.leaves if leaf.fp8}


def numpy_codes(x: np.ndarray, scale: Any) -> np.ndarray:
    """The codes of numbers within range."""
    import ml_dtypes

    return (x * scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
