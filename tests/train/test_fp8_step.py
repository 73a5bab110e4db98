"""Steps with fp8 matmuls against a plain optax loop whose matmuls are simulated (``fp8_models``).

Activations have a scale on each device: the reference takes the mean gradient over as many slices of a
batch. What is left are sums in another order, and now and then a number that they round to another code.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fp8_models import chosen, fp8_case
from plain_loop import Plain, PlainLinen, distance, masters

import zerojax
from zerojax import ZeroConfig

ROWS, STEPS = 48, 4
FP8 = {"matmul_dtype": "fp8"}
EXACT_DELTA = {"weights_delta": True, "hpz": True, "weights": "fp32"}


def momentum() -> optax.GradientTransformation:
    return optax.sgd(0.01, momentum=0.9)


@functools.cache
def start(name: str) -> Any:
    """Weights to begin with."""
    case = fp8_case(name)
    if not case.linen:
        return Plain(case).weights
    return zerojax.gather_params(case.create(optax.identity(), nodes=1, local=1, units=(), stage=0))


def reference(name: str, simulate: str) -> Plain | PlainLinen:
    case = fp8_case(name, simulate)
    return PlainLinen(case, start(name)) if case.linen else Plain(case)


@functools.cache
def wanted(name: str, tx: Any, slices: int, simulate: str) -> tuple[list[float], Any]:
    """Losses and the weights at the end."""
    plain, optimizer = reference(name, simulate), tx()

    @jax.jit
    def step(weights: Any, state: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)
        each = jax.lax.map(lambda part: jax.value_and_grad(plain.loss)(weights, part), parts)
        loss, grads = jax.tree.map(lambda x: jnp.mean(x, axis=0), each)
        updates, state = optimizer.update(grads, state, weights)
        return loss, optax.apply_updates(weights, updates), state

    weights, state, losses = plain.weights, optimizer.init(plain.weights), []
    for batch in fp8_case(name).batches(ROWS, STEPS):
        loss, weights, state = step(weights, state, batch)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, weights)


def check(
    name: str,
    mesh: tuple[int, int],
    *,
    tx: Any = momentum,
    losses_within: float = 2e-4,
    moved_within: float = 5e-3,
    **zero: Any,
) -> zerojax.TrainState:
    """Compare losses, and weights by how far they moved."""
    case = fp8_case(name)
    state = case.start(tx(), start(name), nodes=mesh[0], local=mesh[1], **FP8, **zero)
    losses = []
    for batch in case.batches(ROWS, STEPS):
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    slices = mesh[0] * mesh[1] * zero.get("accumulate", 1)
    expected, weights = wanted(name, tx, slices, "replicas" if zero.get("weights_delta") else "weights")
    np.testing.assert_allclose(losses, expected, rtol=losses_within)
    both = (
        jax.tree.map(lambda x, first: np.asarray(x) - np.asarray(first), tree, start(name))
        for tree in (masters(state), weights)
    )
    assert distance(*both) < moved_within
    assert losses[-1] < 0.97 * losses[0]
    return state


ALL = ("list", "stack", "linen", "linen-scan")


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("list", (1, 1), {}),
        ("stack", (2, 2), {"hpz": True, "remat": "none", "accumulate": 2}),
        pytest.param("linen", (1, 2), {"remat": "attention"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_are_those_of_simulated_matmuls(name, mesh, options):
    state = check(name, mesh, **options)
    kernels = {leaf.path[-2:] for leaf in chosen(state).values()}
    assert {path[-1] for path in kernels} == {"kernel"}
    assert len(kernels) == 2


MESHES = ((1, 1), (1, 8), (2, 4), (4, 2), (8, 1), (3, 2))
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"hpz": True, "remat": "none"},
    {"remat": "attention", "accumulate": 2},
    {"accumulate": 2, "accumulate_order": "breadth", "hpz": True},
    {"chunks": 2, "remat": "none"},
    {"grad_sync": "step", "accumulate": 2},
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_model_on_every_mesh(name, mesh):
    check(name, mesh, **OPTIONS[(MESHES.index(mesh) + ALL.index(name)) % len(OPTIONS)])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_on_every_mesh(mesh, options):
    check("stack", mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list", "stack"])
@pytest.mark.parametrize("order", [{}, {"accumulate": 2, "accumulate_order": "breadth"}], ids=str)
def test_delta_of_exact_differences(name, order):
    check(name, (2, 2), **EXACT_DELTA, **order)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list", "linen-scan"])
def test_adam(name):
    """It divides by the gradient's own size, and makes much of the sign of a small one."""
    check(name, (3, 2), tx=lambda: optax.adam(3e-3), losses_within=1e-2, moved_within=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "within"),
    [
        (ZeroConfig.preset("zero++", **FP8, compute_dtype="float32").__dict__, 0.1),
        (ZeroConfig.preset("delta", **FP8, compute_dtype="float32").__dict__, 0.1),
        ({"weights": "int4"}, 0.4),
        ({"weights": "fp6", "hpz": True}, 0.1),
        ({"compute_dtype": "bfloat16"}, 0.1),
    ],
    ids=["zero++", "delta", "int4", "fp6", "bf16"],
)
@pytest.mark.parametrize("name", ["list", "stack"])
def test_formats_learn_as_well(name, options, within):
    options = {key: value for key, value in options.items() if key not in ("units", "matmul_dtype")}
    check(name, (2, 2), losses_within=within, moved_within=5 * within, **options)
