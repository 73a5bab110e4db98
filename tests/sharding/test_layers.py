"""Stacks of layers of several kinds: their order, and that they learn what plain JAX does."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, regression_batch
from flax import nnx
from plain_loop import distance, masters

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import LoRA
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.sharding.layers import Order, Place
from zerojax.zero_config.config import ZeroConfig

ROWS, STEPS = 24, 2
SLOW = pytest.mark.slow
Weights = Any


class Seen(nnx.Variable):
    """A sum of what a layer has seen."""


class Wide(nnx.Module):
    """A residual layer of two matrices, which keeps state."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.seen = Seen(jnp.zeros(()))

    def __call__(self, x: jax.Array, gain: jax.Array, *, factor: jax.Array) -> jax.Array:
        self.seen.set_value(self.seen.get_value() + jnp.mean(x))
        return x + factor * gain * self.down(jnp.tanh(self.up(x)))


class Narrow(nnx.Module):
    """A residual layer of one matrix of another shape."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, gain: jax.Array, *, factor: jax.Array) -> jax.Array:
        return x + gain * jnp.sin(factor * self.mix(x))


class Mixed(nnx.Module):
    """A stack with an argument that all layers share, and one that differs; and a head."""

    def __init__(self, blocks: Sequence[type[nnx.Module]], layers: int, rngs: nnx.Rngs):
        self.gain = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))
        self.stack = zerojax.Stack(blocks, layers, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        factors = factors_of(self.stack.layers)
        return self.head(self.stack(x, self.gain[...], by_layer={"factor": factors}))


def factors_of(layers: int) -> jax.Array:
    return jnp.linspace(0.3, 1.0, layers)


def error(out: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((out[:, 0] - batch["y"]) ** 2)


def by_hand(order: tuple[int, ...], first: type, weights: Weights, batch: dict[str, jax.Array]) -> jax.Array:
    """The loss of ``Mixed``, one layer after another."""

    def linear(own: Weights, x: jax.Array, index: int | None = None) -> jax.Array:
        kernel, bias = own["kernel"], own["bias"]
        return x @ kernel + bias if index is None else x @ kernel[index] + bias[index]

    x, gain, seen = batch["x"], weights["gain"], [0, 0]
    for number, (kind, factor) in enumerate(zip(order, factors_of(len(order)), strict=True)):
        own, index = weights["stack"][str(order.index(kind))]["block"], seen[kind]
        if (first is Wide) == (kind == 0):
            x = x + factor * gain * linear(own["down"], jnp.tanh(linear(own["up"], x, index)), index)
        else:
            x = x + gain * jnp.sin(factor * linear(own["mix"], x, index))
        seen[kind] += 1
        del number
    return error(linear(weights["head"], x), batch)


def created(
    blocks: Sequence[type[nnx.Module]],
    layers: int,
    mesh: tuple[int, int],
    *,
    lora: LoRA | None = None,
    tx: Any = None,
    **options: Any,
) -> zerojax.TrainState:
    given: dict[str, Any] = {"compute_dtype": "float32"} | options
    zero = ZeroConfig(**given)
    return zerojax.TrainState.create(
        functools.partial(Mixed, blocks, layers),
        optax.sgd(0.1) if tx is None else tx,
        lambda model, batch: error(model(batch["x"]), batch),
        mesh=zerojax.make_mesh(*mesh),
        zero=zero,
        lora=lora,
    )


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(7)
    return [regression_batch(rng, ROWS) for _ in range(STEPS)]


def trained(state: zerojax.TrainState) -> tuple[zerojax.TrainState, list[float]]:
    losses = []
    for batch in batches():
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def zero_plus_plus(fmt: str) -> dict[str, Any]:
    return {"hpz": True, "weights": fmt, "grads": (fmt, fmt), "block_size": 64}


PERIOD = [Wide, Wide, Narrow]
ALL_BUT_ONE = [Narrow, *[Wide] * 9]
ONCE = {"accumulate": 2, "grad_sync": "step", "hpz": True}
BREADTH = {"accumulate": 2, "accumulate_order": "breadth"}


@pytest.mark.parametrize(
    ("blocks", "layers", "mesh", "options", "within"),
    [
        pytest.param(PERIOD, 13, (1, 1), {}, 1e-5, marks=SLOW),
        pytest.param(PERIOD, 13, (2, 4), {}, 1e-5, marks=SLOW),
        (PERIOD, 13, (3, 2), {"hpz": True, "weights_delta": True}, 1e-5),
        pytest.param(PERIOD, 14, (2, 2), {"remat": "none"}, 1e-5, marks=SLOW),
        pytest.param(PERIOD, 12, (2, 1), {}, 1e-5, marks=SLOW),
        pytest.param(PERIOD, 4, (1, 2), {}, 1e-5, marks=SLOW),
        pytest.param(ALL_BUT_ONE, 10, (2, 2), {}, 1e-5, marks=SLOW),
        pytest.param(ALL_BUT_ONE, 10, (1, 2), BREADTH, 1e-5, marks=SLOW),
        pytest.param(PERIOD, 13, (2, 2), BREADTH, 1e-5, marks=SLOW),
        pytest.param(
            PERIOD, 13, (2, 2), {"accumulate": 2, "grad_sync": "step", "hpz": True}, 1e-5, marks=SLOW
        ),
        pytest.param(PERIOD, 13, (1, 2), {"host": ("activations",)}, 1e-5, marks=SLOW),
        pytest.param(PERIOD, 13, (1, 2), {"host": ("optimizer", "weights", "activations")}, 1e-5, marks=SLOW),
        pytest.param([Wide, Narrow, Narrow, Wide, Narrow], 5, (2, 2), {}, 1e-5, marks=SLOW),
        pytest.param(PERIOD, 7, (2, 2), {"stage": 1}, 1e-5, marks=SLOW),
        pytest.param(PERIOD, 13, (2, 2), zero_plus_plus("int8"), 0.05, marks=SLOW),
        pytest.param(
            *(PERIOD, 13, (2, 2)),
            {**zero_plus_plus("int8"), "weights_delta": True, "local_weights": "bf16"},
            *(0.05,),
            marks=SLOW,
        ),
    ],
)
def test_layers_of_two_kinds_learn_what_plain_jax_does(blocks, layers, mesh, options, within):
    """With every way of weights and gradients through the loops; a wrong layer changes all of the update."""
    state = created(blocks, layers, mesh, **options)
    weights = before = zerojax.gather_params(state)
    order = tuple(blocks.index(blocks[number % len(blocks)]) for number in range(layers))
    order = tuple(sorted(set(order)).index(kind) for kind in order)
    value = jax.jit(jax.value_and_grad(functools.partial(by_hand, order, blocks[0])))
    wanted = []
    for batch in batches():
        loss, gradients = value(weights, batch)
        weights = jax.tree.map(lambda x, g: np.asarray(x - 0.1 * g), weights, gradients)
        wanted.append(float(loss))
    state, losses = trained(state)
    np.testing.assert_allclose(losses, wanted, rtol=within)

    def change(after: Weights) -> Weights:
        return jax.tree.map(lambda x, first: x - first, after, before)

    assert distance(change(masters(state)), change(weights)) < within
    (seen,) = (x for name, x in state.model_state.items() if name.endswith("seen"))
    assert seen.shape == (order.count(0 if blocks[0] is Wide else 1),)
    assert np.all(np.asarray(seen) != 0)


EXACT = optax.adamw(2.0**-7, b1=0.5, b2=0.5, weight_decay=2.0**-5)


@pytest.mark.parametrize(
    ("blocks", "layers", "mesh", "options"),
    [
        # The loop is there from two turns of two periods on.
        pytest.param([Wide, Narrow], 16, (1, 1), {}, marks=SLOW),
        ([Wide, Narrow], 5, (1, 1), {}),
        pytest.param([Wide, Narrow], 18, (2, 2), BREADTH, marks=SLOW),
        pytest.param(ALL_BUT_ONE, 10, (1, 2), {"host": ("optimizer", "weights")}, marks=SLOW),
        pytest.param([Wide, Narrow], 6, (1, 2), {"lora": LoRA(rank=2), "frozen": ("*/kernel",)}, marks=SLOW),
    ],
)
def test_updates_in_the_backward_pass_are_those_after_it(blocks, layers, mesh, options):
    def run(backward: bool) -> tuple[zerojax.TrainState, list[float]]:
        own = {"host": ("optimizer",), "update_in_backward": backward, "compute_dtype": "bfloat16"}
        return trained(created(blocks, layers, mesh, tx=EXACT, **own | options))

    (after, told), (state, also) = run(backward=False), run(backward=True)
    np.testing.assert_allclose(told, also, rtol=1e-4)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(lambda x, y: near(np.asarray(x), np.asarray(y)), after.params, state.params)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"every": 2}, {"frozen": ("*/kernel",), "lora": LoRA(rank=2)}])
def test_local_updates_and_adapters_learn(options):
    state, losses = created(PERIOD, 7, (2, 2), tx=optax.adam(1e-2), **options), []
    for _ in range(5):
        state, told = trained(state)
        losses.append(sum(told))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_a_checkpoint_is_resumed_on_another_mesh(tmp_path):
    state, _ = trained(created(PERIOD, 7, (2, 2), tx=optax.adam(1e-2)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, Record())
    again = restore(tmp_path / "1", created(PERIOD, 7, (3, 1), tx=optax.adam(1e-2)))
    assert distance(masters(again), masters(state)) == 0
    np.testing.assert_allclose(trained(again)[1], trained(state)[1], rtol=1e-4)


@pytest.mark.parametrize(
    ("kinds", "first", "period"),
    [
        ((0,) * 6, 0, 1),
        ((0,), 0, 1),
        ((0, 0, 0, 1) * 3, 0, 4),
        ((0, 0, 0, 1) * 2 + (0, 0), 0, 4),
        ((0, 1, 1, 1, 1), 1, 1),
        ((2, 0, 1, 0, 1, 0), 1, 2),
        ((0, 1, 2), 0, 3),
    ],
)
def test_a_place_is_the_same_in_and_out_of_a_loop(kinds, first, period):
    order = Order(kinds)
    assert (order.first_periodic, order.period) == (first, period)
    for number, kind in enumerate(kinds):
        there = Place(order, number)
        assert (there.kind, there.index) == (kind, kinds[:number].count(kind))
        if number - period >= first:
            again = Place(order, number - period, 1)
            assert (again.kind, again.index) == (there.kind, there.index)
            assert (again.ahead(1).kind, again.ahead(1).index) == ((there + 1).kind, (there + 1).index) or (
                number == order.last
            )


@pytest.mark.parametrize(("blocks", "layers"), [([], 2), ([Wide, Narrow, Wide], 2)])
def test_refuses_a_list_that_does_not_fit(blocks, layers):
    with pytest.raises(ConfigurationError, match=f"list of {len(blocks)} blocks for 2 layers"):
        zerojax.Stack(blocks, layers, rngs=nnx.Rngs(0))
