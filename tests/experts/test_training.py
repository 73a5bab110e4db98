"""``zerojax.Experts`` in training steps: on every mesh the same as an optax loop on one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import begun
from flax import nnx
from jax import Array
from plain_loop import distance
from plain_muon import plain_muon

import zerojax
from zerojax import RouterConfig, RouterStats

WIDTH, HIDDEN, EXPERTS, PER_TOKEN, LAYERS, ROWS, STEPS = 6, 5, 12, 3, 2, 24, 3
normal = nnx.initializers.normal(0.4)


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        router = RouterConfig("sigmoid", balance_rate=0.01)
        options = {"router": router, "capacity": 0.5, "shared": 3, "init": normal}
        self.mixture = zerojax.Experts(WIDTH, HIDDEN, EXPERTS, PER_TOKEN, **options, rngs=rngs)

    def __call__(self, carry: tuple[Array, RouterStats]) -> tuple[Array, RouterStats]:
        x, before = carry
        added, stats = self.mixture(x)
        return x + added, before + stats


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.blocks = zerojax.Stack(Block, LAYERS, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: Array) -> tuple[Array, RouterStats]:
        x, stats = self.blocks((x, RouterStats.zeros(EXPERTS)))
        return self.head(x)[:, 0], stats


def loss(model: Model, batch: Any) -> Array:
    out, stats = model(batch["x"])
    auxiliary = 0.1 * zerojax.balance_loss(stats) + 0.1 * zerojax.z_loss(stats)
    return jnp.mean(jnp.square(out - batch["y"])) + auxiliary


def batches() -> list[dict[str, np.ndarray]]:
    """Tokens with something in common, which makes their routing skewed."""
    x = np.random.default_rng(3).normal(size=(STEPS, ROWS, WIDTH)).astype(np.float32)
    x[..., 0] = 2
    return [{"x": one, "y": np.sin(one.sum(-1))} for one in x]


def create(rngs: nnx.Rngs) -> Model:
    return Model(rngs=rngs)


def adamw() -> optax.GradientTransformation:
    return optax.adamw(1e-2, weight_decay=0.1)


def muon() -> optax.GradientTransformation:
    return plain_muon(0.01, "blocks")


@functools.cache
def plain(optimizer: Callable[[], optax.GradientTransformation] = adamw) -> tuple[list[float], Any, Any]:
    """Losses, weights, and the loads of the last step."""
    graph, weights, state = nnx.split(create(nnx.Rngs(jax.random.key(0))), nnx.Param, ...)
    tx = optimizer()
    held = tx.init(weights)
    losses = []

    @functools.partial(jax.value_and_grad, has_aux=True)
    def gradients(weights: nnx.State, state: nnx.State, batch: Any) -> tuple[Array, nnx.State]:
        model = nnx.merge(graph, weights, state, copy=True)
        return loss(model, batch), nnx.state(model, nnx.Not(nnx.Param))

    @jax.jit
    def step(weights: nnx.State, state: nnx.State, held: Any, batch: Any) -> tuple[Any, Any, Any, Array]:
        (value, state), grads = gradients(weights, state, batch)
        updates, held = tx.update(grads, held, weights)
        return optax.apply_updates(weights, updates), state, held, value

    for batch in batches():
        weights, state, held, value = step(weights, state, held, batch)
        losses.append(float(value))
    state = nnx.to_pure_dict(state)
    return losses, nnx.to_pure_dict(weights), state["blocks"]["block"]["mixture"]


def trained(tx: Any, nodes: int, local: int, **zero: Any) -> tuple[zerojax.TrainState, list[float]]:
    """The state after all batches, and their losses."""
    config = zerojax.ZeroConfig(compute_dtype="float32", **zero)
    mesh = zerojax.make_mesh(nodes, local)
    state = zerojax.TrainState.abstract(create, tx, loss, mesh=mesh, zero=config)
    weights = nnx.to_pure_dict(nnx.state(create(nnx.Rngs(jax.random.key(0))), nnx.Param))
    state = begun(state, weights)
    losses = []
    for batch in batches():
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(
    ("nodes", "local", "zero"),
    [
        (2, 2, {"stage": 3}),
        pytest.param(1, 4, {"stage": 2, "remat": "none"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"experts": "gathered"}, marks=pytest.mark.slow),
        pytest.param(2, 3, {"stage": 3}, marks=pytest.mark.slow),
        pytest.param(3, 2, {"stage": 3, "remat": "none", "hpz": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_an_unsharded_loop(nodes: int, local: int, zero: dict[str, Any]):
    state, losses = trained(adamw(), nodes, local, **zero)
    wanted, weights, kept = plain()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert distance(zerojax.gather_params(state), weights) < 1e-4
    assert max(kept["load"][0]) >= 2 * np.mean(kept["load"][0])  # it is skewed
    for name, values in kept.items():
        (found,) = (x for path, x in state.model_state.items() if path.endswith(f"mixture/{name}"))
        np.testing.assert_allclose(found, values, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "local", "zero", "axes"),
    [
        (2, 2, {"matrix_spread": "world"}, ("local", "node")),
        (2, 2, {}, ("local",)),
        (3, 2, {"matrix_spread": "world", "stage": 2}, ("local", "node")),
        (2, 2, {"experts": "gathered"}, ("local",)),
    ],
    ids=str,
)
def test_muon_takes_each_experts_matrix(nodes: int, local: int, zero: dict[str, Any], axes: tuple[str, ...]):
    tx = zerojax.chain(zerojax.scale_by_muon(), optax.scale_by_learning_rate(0.01))
    state, losses = trained(tx, nodes, local, **zero)
    wanted, weights, _ = plain(muon)
    (gate,) = (leaf for leaf in state.spec.leaves if leaf.path[-2:] == ("mixture", "gate"))
    assert (gate.owners, gate.of_experts) == (axes, True)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert distance(zerojax.gather_params(state), weights) < 1e-3


class Routed(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        router = RouterConfig("sigmoid", balance_rate=0.01)
        self.mixture = zerojax.Experts(WIDTH, 4, 4, 1, router=router, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return x + self.mixture(x)[0]


@pytest.mark.parametrize(
    ("nodes", "local", "zero"),
    [
        (2, 3, {"accumulate": 2}),
        pytest.param(2, 2, {"accumulate": 3, "accumulate_order": "breadth"}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"accumulate": 4, "stage": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_bias_moves_once_a_step_by_the_load_of_the_whole_batch(nodes: int, local: int, zero: Any):
    def unchanged(rngs: nnx.Rngs) -> zerojax.Stack:
        return zerojax.Stack(Routed, 1, rngs=rngs)

    config = zerojax.ZeroConfig(compute_dtype="float32", **zero)
    state = zerojax.TrainState.create(
        unchanged, optax.sgd(0.0), lambda m, b: jnp.mean(m(b["x"]) ** 2),
        mesh=zerojax.make_mesh(nodes, local), zero=config,
    )  # fmt: skip
    router = np.asarray(zerojax.gather_params(state)["block"]["mixture"]["router"])[0]
    x = np.random.default_rng(32).normal(size=(2, 24, WIDTH)).astype(np.float32)
    bias, load = np.zeros(4, np.float32), np.zeros(4, int)
    for rows in (x[0], x[1], x[0]):
        state, _ = zerojax.train_step(state, {"x": rows})
        bias = bias + np.float32(0.01) * np.sign(load.sum() - 4 * load)
        load = np.bincount((1 / (1 + np.exp(-rows @ router)) + bias).argmax(-1), minlength=4)
        kept = {path.split("/")[-1]: np.asarray(value)[0] for path, value in state.model_state.items()}
        np.testing.assert_array_equal(kept["load"], load)
        np.testing.assert_allclose(kept["choice_bias"], bias, atol=1e-6)
