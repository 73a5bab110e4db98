"""Functions of single tokens, computed a tile at a time where the backward pass computes them again."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_models import Block
from flax import linen, nnx
from jax.test_util import check_grads
from matmuls import exact, operand

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.matmul.low_rank import LowRankOperand
from zerojax.matmul.operand import LayerOperand
from zerojax.matmul.replay import at_matmuls
from zerojax.schedule.remat import rematerialised

TOKENS = (2, 9)


def draw(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


@functools.cache
def block() -> tuple[Any, Any]:
    return nnx.split(Block(16, 32, rngs=nnx.Rngs(0)))


@pytest.fixture(autouse=True, scope="module")
def drawn() -> None:
    """Whichever test is first: weights that are drawn while something is traced do not outlive the trace."""
    block()


def of_two(block: Any, tile: int, x: jax.Array, y: jax.Array, shift: jax.Array, mask: jax.Array):
    """Two results of three arrays, one of which is data."""

    def function(x: jax.Array, rest: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return block(x) * shift, jnp.where(rest["mask"], rest["y"] * x[..., :3], 0)

    return zerojax.tiled(function, x, {"y": y, "mask": mask}, tile=tile)


def run(remat: Any, tile: int, *args: Any) -> Any:
    graph, weights = block()

    def body(weights: Any, *args: Any) -> Any:
        return of_two(nnx.merge(graph, weights), tile, *args)

    return rematerialised(body, remat)(weights, *args) if remat else body(weights, *args)


def arguments(tokens: tuple[int, int]) -> tuple[jax.Array, ...]:
    mask = jnp.arange(tokens[0] * tokens[1]).reshape(*tokens, 1) % 3 == 0
    return draw(*tokens, 16), draw(*tokens, 3), draw(16), mask


@pytest.mark.parametrize(("tokens", "tile"), [(TOKENS, 6), (TOKENS, 8), ((1, 13), 5)], ids=str)
def test_results_and_gradients_are_those_of_all_tokens_at_once(tokens, tile):
    """In equal tiles, in more of them because these are equal, and padded."""
    given = arguments(tokens)

    def loss(remat: Any, *args: Any) -> Any:
        x, y = run(remat, tile, *args, given[-1])
        return jnp.sum(jnp.sin(x)) + jnp.sum(y**2)

    def results(remat: Any) -> Any:
        values = jax.value_and_grad(functools.partial(loss, remat), (0, 1, 2))
        return jax.jit(lambda *args: (run(remat, tile, *args, given[-1]), values(*args)))(*given[:3])

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5), results("full"), results(None)
    )


@pytest.mark.parametrize("remat", ["full", "attention", "none", None])
def test_tiles_are_of_what_is_computed_again(remat):
    given = arguments(TOKENS)
    tiles = str(jax.make_jaxpr(lambda *args: run(remat, 6, *args))(*given)).count("length=3")
    assert tiles == (remat in ("full", "attention"))
    fewer = jax.make_jaxpr(lambda *args: run(remat, 18, *args))(*given)
    assert "custom_vjp_call" not in str(fewer), "one tile is all there is"


def test_a_linen_module_within():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            mlp = linen.Sequential([linen.Dense(8), jnp.tanh, linen.Dense(16)])
            return zerojax.tiled(mlp, x, tile=6)

    x = draw(*TOKENS, 16)
    params: Any = Model().init(jax.random.key(0), x)
    found: Any = rematerialised(Model().apply, "full")
    assert "scan" in str(jax.make_jaxpr(found)(params, x))
    plain: Any = Model().apply(params, x)
    np.testing.assert_allclose(found(params, x), plain, rtol=1e-5, atol=1e-6)


def test_gradients_of_weights_are_summed_in_fp32():
    """1,000 times 1/1000 on top of 1 is 2; in bf16 it stays 1."""
    given = jnp.concatenate([jnp.ones(1), jnp.full(1000, 1e-3)]).astype(jnp.bfloat16).reshape(1, -1)
    body = rematerialised(lambda w, x: zerojax.tiled(lambda x: w * x, x, tile=1), "full")
    found = jax.grad(lambda w: jnp.sum(body(w, given)))(jnp.bfloat16(1))
    assert found.dtype == jnp.bfloat16
    assert float(found) == pytest.approx(2, rel=0.01)


def test_second_derivatives():
    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        return zerojax.tiled(lambda x: jnp.sin(x * w), x, tile=2)

    run = rematerialised(body, "full")
    check_grads(run, (jnp.arange(1.0, 4.0), draw(1, 4, 3)), order=2, modes=["rev"], rtol=0.02)


def through(weight: Any, x: jax.Array, tile: int) -> jax.Array:
    """The product with a weight of any form, and a sine."""

    def body(weights: Any, x: jax.Array) -> jax.Array:
        return zerojax.tiled(lambda x: jnp.sin(x @ weights[0] / 8), x, tile=tile)

    return rematerialised(lambda weight, x: at_matmuls(body)((weight,), x), "full")(weight, x)


def adapted(base: Any, dropout: float = 0.0) -> LowRankOperand:
    lora = zerojax.LoRA(rank=3, dropout=dropout)
    a, b = draw(16, 3), draw(3, 32)
    return LowRankOperand.of(jax.lax.stop_gradient(base), a, b, jnp.uint32(3), lora, "w")


@pytest.mark.parametrize("form", [LayerOperand, operand, adapted, lambda w: adapted(operand(w))])
def test_weights_that_only_products_read(form):
    weight, x = form(exact(1, 16, 32)), exact(2, *TOKENS, 16)
    found, wanted = (
        jax.grad(lambda weight, x, tile=tile: jnp.sum(through(weight, x, tile)), (0, 1), allow_int=True)(
            weight, x
        )
        for tile in (6, 18)
    )

    def same(mine: jax.Array, theirs: jax.Array) -> None:
        if mine.dtype != jax.dtypes.float0:
            # In fp8 the cotangents of each tile are scaled by its own.
            np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=2e-2 * np.abs(theirs).max())

    jax.tree.map(same, found, wanted)


def test_a_frozen_weight_has_no_product_for_its_gradient():
    weight, x = exact(1, 16, 32), exact(2, *TOKENS, 16)

    def products(hold: Any) -> int:
        def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(through(hold(weight), x, 6))

        return str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(weight, x)).count("dot_general[")

    frozen = products(lambda weight: LayerOperand(jax.lax.stop_gradient(weight)))
    assert frozen == products(LayerOperand) - 1


def test_each_tile_drops_elements_of_its_own_and_the_same_backward():
    weight, x = adapted(jnp.zeros((16, 32)), dropout=0.5), jnp.ones((1, 12, 16))

    def run(x: jax.Array) -> jax.Array:
        def body(weights: Any, x: jax.Array) -> jax.Array:
            return zerojax.tiled(lambda x: x @ weights[0], x, tile=4)

        return rematerialised(lambda weight, x: at_matmuls(body)((weight,), x), "full")(weight, x)

    out, vjp = jax.vjp(run, x)
    assert len(np.unique(np.round(np.asarray(out[0]), 4), axis=0)) == 12
    # It is linear in x, so that its transpose tells which elements were dropped.
    cotangent = draw(*out.shape)
    np.testing.assert_allclose(jnp.sum(out * cotangent), jnp.sum(x * vjp(cotangent)[0]), rtol=1e-4)


@pytest.mark.parametrize(
    ("function", "xs", "message"),
    [
        (lambda x, y: x, (jnp.ones((2, 3)), jnp.ones((3, 2))), r"\(2, 3\), \(3, 2\)"),
        (lambda x: x, (jnp.ones(3),), r"same two axes"),
        (lambda x: jnp.sum(x), (jnp.ones((2, 3)),), r"returns float32\(\)"),
        (lambda x: x * draw(*x.shape), (jnp.ones((2, 3)),), "draws random bits"),
        (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), (jnp.ones((2, 3)),), "assigns to a variable"),
    ],
)
def test_what_is_not_of_tokens_is_refused(function, xs, message):
    with pytest.raises(ConfigurationError, match=message):
        rematerialised(lambda *xs: zerojax.tiled(function, *xs, tile=2), "full")(*xs)


def test_a_tile_has_tokens():
    with pytest.raises(ConfigurationError, match="tiles of 0"):
        zerojax.tiled(jnp.sin, jnp.ones((2, 3)), tile=0)
