"""A weight with an adapter acts as W + A B in every matmul, whatever moves the weight before."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matmuls import CUBE, MATMULS, exact, operand

from zerojax import LoRA, ZeroError
from zerojax.matmul.lora import merged
from zerojax.matmul.low_rank import LowRankOperand
from zerojax.matmul.replay import at_matmuls

LORA = LoRA(rank=3, alpha=6.0)
UNLIKE = ("contracted out of order", "among loops and random numbers")
"""A transposition between the axes of A and B; and a loop that has no derivative."""


def adapter() -> tuple[jax.Array, jax.Array]:
    return exact(5, 16, 3), exact(6, 3, 32)


def with_gradients(run, *args):
    """The results of a function, and their gradients for drawn cotangents."""

    @jax.jit
    def both(*args):
        out, pull = jax.vjp(run, *args)
        return out, pull(jax.tree.map(lambda y: exact(2, *y.shape).astype(y.dtype), out))

    return both(*args)


def bounded(x, y):
    """Both in units of the largest of the second."""
    x, y = (np.asarray(one, np.float32) for one in (x, y))
    top = max(np.abs(y).max(), 1e-9)
    return x / top, y / top


@pytest.mark.parametrize("name", [name for name in MATMULS if name not in UNLIKE])
def test_every_way_to_a_matmul(name):
    w, x = exact(0, 16, 32), exact(1, *CUBE)
    a, b = adapter()

    def run(w, a, b, x):
        weight = LowRankOperand.of(w, a, b, jnp.uint32(0), LORA, "block/w")
        return at_matmuls(lambda weights, x: MATMULS[name](weights[0], x))((weight,), x)

    def plain(w, a, b, x):
        return MATMULS[name](w + 2 * a @ b, x)

    (found, gradients), (wanted, wanted_gradients) = (with_gradients(one, w, a, b, x) for one in (run, plain))
    within = 2**-6 if name in ("cast", "wider sum", "nnx.Linear") else 1e-6  # the former in bf16
    jax.tree.map(lambda x, y: np.testing.assert_allclose(*bounded(x, y), atol=within), found, wanted)
    for own, other in zip(gradients[1:], wanted_gradients[1:], strict=True):
        np.testing.assert_allclose(*bounded(own, other), atol=2 * within)


@pytest.mark.parametrize("name", ["dot", "transposed", "nnx.Linear"])
def test_pieces_have_adapters_of_their_own(name):
    own = ("block/w", 8, 1, 2.0), ("block/w", 8, 0, 1.0), ("block/w", 0, 2, 6.0)
    lora = replace(LORA, pieces=own)
    assert lora.shapes("block/w", (16, 32)) == {"lora_a": (16, 3), "lora_b": (2, 32)}
    w, x, (a, _), b = exact(0, 16, 32), exact(1, *CUBE), adapter(), exact(6, 2, 32)

    def whole(w, a, b):
        parts = 2 * a[:, :1] @ b[:1, :8], jnp.zeros((16, 8)), 3 * a[:, 1:] @ b[:, 16:]
        return w + jnp.concatenate(parts, axis=1)

    def run(a, b):
        weight = LowRankOperand.of(w, a, b, jnp.uint32(0), lora, "block/w")
        return at_matmuls(lambda weights, x: MATMULS[name](weights[0], x))((weight,), x)

    found, gradients = with_gradients(run, a, b)
    wanted, wanted_gradients = with_gradients(lambda a, b: MATMULS[name](whole(w, a, b), x), a, b)
    within = 2**-6 if name == "nnx.Linear" else 1e-6
    np.testing.assert_allclose(*bounded(found, wanted), atol=within)
    for mine, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(*bounded(mine, other), atol=2 * within)
    np.testing.assert_array_equal(merged(w, a, b, lora, "block/w"), whole(w, a, b))


def test_beside_fp8_codes():
    w, x = exact(0, 16, 32), exact(1, *CUBE)
    a, b = adapter()
    weight = LowRankOperand.of(operand(w), a, b, jnp.uint32(0), LORA, "block/w")
    found = at_matmuls(lambda weights, x: x @ weights[0])((weight,), x)
    np.testing.assert_array_equal(found, x @ w + 2 * (x @ a) @ b)


@pytest.mark.parametrize(
    "body",
    [
        lambda w, x: x * w[:1, :16],
        lambda w, x: jnp.einsum("btk,tkn->bn", x, w.reshape(2, 8, 32)[:, :1].repeat(16, 1)),
        lambda w, x: x @ w.reshape(32, 16).T,
        lambda w, x: lax.dot_general(x, w[:, :2], (((1, 2), (1, 0)), ((), ()))),
    ],
    ids=["elementwise", "repeated", "axes joined", "contracts both"],
)
def test_other_uses_are_refused_by_name(body):
    weight = LowRankOperand.of(exact(0, 16, 32), *adapter(), jnp.uint32(0), LORA, "block/w")
    with pytest.raises(ZeroError, match=r"'block/w' has an adapter.*!block/w"):
        at_matmuls(lambda weights, x: body(weights[0], x))((weight,), exact(1, *CUBE))


def test_dropout_keeps_the_mean():
    w, x = exact(0, 16, 32), jnp.ones((8, 512, 16))
    a, b = adapter()
    lora = LoRA(rank=3, alpha=6.0, dropout=0.25)
    weight = LowRankOperand.of(w, a, b, jnp.uint32(3), lora, "block/w")
    found = at_matmuls(lambda weights, x: x @ weights[0])((weight,), x) - x @ w
    wanted = np.asarray(2 * (x[0, :1] @ a) @ b)
    apart = np.linalg.norm(found.mean((0, 1)) - wanted) / np.linalg.norm(wanted)
    assert 0 < apart < 0.03
