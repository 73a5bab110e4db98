"""Mixtures of experts in Linen models: the same as in NNX, and spread over a node's devices in a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import Array
from plain_experts import assert_close
from plain_loop import by_path, masters

import zerojax
from zerojax import LinenExperts, RouterConfig, RouterStats
from zerojax.adapters.roles import ROUTER_STATE as STATE

WIDTH, HIDDEN, EXPERTS, PER_TOKEN, LAYERS = 6, 5, 4, 2, 2
ROUTER = RouterConfig("sigmoid", balance_rate=0.1)
normal = linen.initializers.normal(0.5)


def mixture(**settings: Any) -> LinenExperts:
    return LinenExperts(HIDDEN, EXPERTS, PER_TOKEN, kernel_init=normal, **settings)


def test_values_and_state_are_those_of_the_nnx_module():
    settings: dict[str, Any] = {
        "activation": "swiglu_clamped", "biases": True, "shared_gate": True, "latent": 4
    }  # fmt: skip
    router = RouterConfig("sigmoid", balance_rate=0.1, logit_biases=True)
    layer = zerojax.Experts(
        WIDTH, HIDDEN, EXPERTS, PER_TOKEN, router=router, shared=3, **settings, init=normal, rngs=nnx.Rngs(0)
    )
    layer.load[...] = jnp.array([3, 1, 0, 0])
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    state = {STATE: {"choice_bias": layer.choice_bias[...], "load": layer.load[...]}}
    twin = mixture(router_config=router, shared_hidden=3, **settings)
    x = jax.random.normal(jax.random.key(1), (2, 3, WIDTH))

    @jax.jit
    def of_twin(x: Array) -> Any:
        return twin.apply({"params": params, **state}, x, mutable=[STATE])

    found, changed = of_twin(x)
    assert_close(found, nnx.jit(lambda layer, x: layer(x))(layer, x))
    np.testing.assert_array_equal(changed[STATE]["load"], layer.load[...])
    np.testing.assert_allclose(changed[STATE]["choice_bias"], [-0.1, 0, 0.1, 0.1])
    made = linen.unbox(jax.eval_shape(twin.init, jax.random.key(0), x))
    assert jax.tree.map(jnp.shape, made["params"]) == jax.tree.map(jnp.shape, params)


class Block(linen.Module):
    @linen.compact
    def __call__(self, carry: tuple[Array, RouterStats], _: None) -> tuple[tuple[Array, RouterStats], None]:
        x, before = carry
        added, stats = mixture(router_config=ROUTER, name="mixture")(x)
        return (x + added, before + stats), None


class Model(linen.Module):
    @linen.compact
    def __call__(self, x: Array) -> tuple[Array, RouterStats]:
        axes: dict[Any, Any] = {"params": 0, STATE: 0}
        blocks = linen.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
        (x, stats), _ = blocks(name="blocks")((x, RouterStats.zeros(EXPERTS)), None)
        return linen.Dense(1)(x)[:, 0], stats


def loss(model: Any, batch: Any) -> Array:
    out, stats = model(batch["x"])
    return jnp.mean(jnp.square(out - batch["y"])) + 0.1 * zerojax.balance_loss(stats)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(3).normal(size=(rows, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1))}


def options(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    zero = zerojax.ZeroConfig(compute_dtype="float32", units=(Block,))
    return {"mesh": zerojax.make_mesh(1, 2), "zero": zero, "sample_batch": batch}


def test_experts_are_spread_over_a_node():
    """What a step then does with them is the same as in NNX (``test_training.py``)."""
    state = zerojax.TrainState.abstract(Model(), optax.sgd(0.1), loss, **options(batch_of(2)))
    spread = {leaf.path[-1]: leaf.parts for leaf in state.spec.leaves}
    assert spread == {"router": 1, "gate": 2, "up": 2, "down": 2, "kernel": 1, "bias": 1}


@pytest.mark.slow
def test_a_step_is_that_of_one_device():
    batch = batch_of(16)
    state = zerojax.TrainState.create(Model(), optax.sgd(0.1), loss, **options(batch))
    params = jax.tree.map(np.asarray, zerojax.gather_params(state))
    kept = {
        STATE: {
            "blocks": {
                "mixture": {
                    name: jnp.zeros((LAYERS, EXPERTS), dtype)
                    for name, dtype in (("choice_bias", jnp.float32), ("load", jnp.int32))
                }
            }
        }
    }

    @jax.jit
    @jax.value_and_grad
    def plain(params: Any) -> Array:
        def model(x: Array) -> Any:
            return Model().apply({"params": params, **kept}, x)

        return loss(model, batch)

    value, grads = plain(params)
    state, metrics = zerojax.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    wanted = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
    assert_close(by_path(masters(state)), by_path(wanted))
    (load,) = (np.asarray(x) for path, x in state.model_state.items() if path.endswith("load"))
    np.testing.assert_array_equal(load.sum(-1), len(batch["x"]) * PER_TOKEN)
