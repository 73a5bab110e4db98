"""Losses with gradients and weights in them: gradient penalties, second derivatives, sums over weights.

Each is compared with the same loss of an ordinary module on one device, in fp32, differentiated by JAX.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import HIDDEN, WIDTH, Block, Listed, in_fp32, started
from flax import linen, nnx

import zerojax
from zerojax.sharding.layout import from_stored
from zerojax.sharding.param_tree import from_tree
from zerojax.train import step

ROWS = 48
SGD = optax.sgd(1.0)  # one for all, which is checked once with each model
X = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)


class Stacked(nnx.Module):
    """Six layers, so that every loop of the schedule runs."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 6):
        self.stack = zerojax.Stack(Block, layers, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.stack(x))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(WIDTH)(jnp.tanh(linen.Dense(HIDDEN)(x))), None


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        layers = linen.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return linen.Dense(3)(layers()(x)[0])


def gradient_penalty(model: Any, x: jax.Array) -> jax.Array:
    """As of WGAN-GP: of each row's own gradient, so that it is a mean over rows."""
    out, grads = jax.value_and_grad(lambda x: jnp.sum(model(x) ** 2))(x)
    return 0.1 * out / len(x) + jnp.mean(jnp.sum(grads**2, axis=-1))


def third_derivative(model: Any, x: jax.Array) -> jax.Array:
    def slope(x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.tanh(model(x))))(x) ** 2)

    return jnp.mean(jnp.sum(jax.grad(slope)(x) ** 2, axis=-1))


def penalties(squares: jax.Array, cosines: jax.Array) -> jax.Array:
    """A norm, and a function that is not zero at zero, where padding would show."""
    return jnp.sqrt(squares) + 1e-2 * cosines


def weight_penalty(model: Any, x: jax.Array) -> jax.Array:
    sums = zerojax.weight_sum(model), zerojax.weight_sum(model, jnp.cos, paths=["*kernel", "*bias", "!*BIAS"])
    return jnp.mean(model(x) ** 2) + penalties(*sums)


def both(model: Any, x: jax.Array) -> jax.Array:
    return gradient_penalty(model, x) + weight_penalty(model, x)


@functools.cache
def reference(kind: Any, loss: Any) -> tuple[dict[str, Any], float, dict[Any, np.ndarray]]:
    """Weights, the loss over all rows, and its gradient by path."""
    start = create(kind, loss, (1, 1), stage=0, units=())
    params = zerojax.gather_params(start)
    weights = {path: jnp.asarray(x) for path, x in from_tree(params).items()}

    def whole(weights):
        adapter = start.spec.adapter
        other = {name: x.addressable_data(0) for name, x in start.model_state.items()}
        model = adapter.whole(weights, other)
        call = (lambda x: model(x)) if isinstance(kind, linen.Module) else model
        value, x = jnp.float32(0), jnp.asarray(X)
        if loss in (gradient_penalty, both):
            value += gradient_penalty(call, x)
        if loss is third_derivative:
            value += third_derivative(call, x)
        if loss in (weight_penalty, both):
            squares = jnp.asarray(sum(jnp.sum(w**2) for w in weights.values()))
            kernels = [w for path, w in weights.items() if path[-1] == "kernel"]
            cosines = jnp.asarray(sum(jnp.sum(jnp.cos(w)) for w in kernels))
            value += jnp.mean(call(x) ** 2) + penalties(squares, cosines)
        return value

    value, grads = jax.jit(jax.value_and_grad(whole))(weights)
    return params, float(value), {path: np.asarray(x) for path, x in grads.items()}


def create(
    kind: Any, loss: Any, mesh: tuple[int, int], *, make: Any = zerojax.TrainState.create, **zero: Any
) -> zerojax.TrainState:
    config = in_fp32(**zero)
    sample = X if isinstance(kind, linen.Module) else None
    arguments = {"mesh": zerojax.make_mesh(*mesh), "zero": config, "sample_batch": sample}
    return make(kind, SGD, loss, **arguments)


# For what is only traced.
abstract = functools.partial(create, make=zerojax.TrainState.abstract)


LINEN, TWO_LAYERS = LinenModel(), functools.partial(Stacked, layers=2)
EXACT_DELTA = {"hpz": True, "weights_delta": True, "weights": "fp32", "local_weights": "fp32"}


@pytest.mark.parametrize(
    ("kind", "loss", "mesh", "zero"),
    [
        pytest.param(Listed, both, (2, 4), {"units": (Block,)}, marks=pytest.mark.slow),
        pytest.param(
            Listed, both, (3, 2), {"units": (Block,), "stage": 1, "remat": "none"}, marks=pytest.mark.slow
        ),
        pytest.param(Listed, weight_penalty, (4, 2), {"stage": 0}, marks=pytest.mark.slow),
        pytest.param(Stacked, both, (2, 4), {"hpz": True, "remat": "none"}, marks=pytest.mark.slow),
        pytest.param(Stacked, both, (3, 2), {"remat": "attention"}, marks=pytest.mark.slow),
        pytest.param(Stacked, both, (2, 2), EXACT_DELTA, marks=pytest.mark.slow),
        pytest.param(
            Stacked, both, (2, 2), {"remat": "none", "host": ("activations",)}, marks=pytest.mark.slow
        ),
        pytest.param(TWO_LAYERS, third_derivative, (2, 1), {}, marks=pytest.mark.slow),
        pytest.param(
            Stacked,
            weight_penalty,
            (2, 2),
            {"accumulate": 2, "grad_sync": "step", "hpz": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            TWO_LAYERS,
            weight_penalty,
            (2, 2),
            {"accumulate": 2, "accumulate_order": "breadth"},
            marks=pytest.mark.slow,
        ),
        (LINEN, both, (2, 4), {"units": (LinenBlock,), "hpz": True, "remat": "none"}),
        pytest.param(LINEN, both, (1, 4), {"units": (LinenBlock,), "stage": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.filterwarnings("ignore:no unit is named")
def test_the_gradient_is_that_of_an_ordinary_module(kind, loss, mesh, zero):
    params, wanted, grads = reference(kind, loss)
    state = started(abstract(kind, loss, mesh, **zero), params)
    leaves = state.spec.leaves
    found = from_tree(step.gradients(state, X))
    assert float(zerojax.eval_step(state, X)["loss"]) == pytest.approx(wanted, rel=2e-5)
    for leaf in leaves:
        mine, theirs = np.asarray(from_stored(found[leaf.path], leaf)), grads[leaf.path]
        scale = max(np.linalg.norm(theirs), 1e-3)
        assert np.linalg.norm(mine - theirs) < 2e-4 * scale, leaf.name


# test_kernels_in_step.py runs them with the kernels.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "units"), [(Stacked, ()), (Listed, (Block,))])
def test_quantized_gradients_of_a_penalty_are_near(kind, units):
    """zero++ sends second derivatives by the same hops: int4's error, not a missing part."""
    params, _, grads = reference(kind, gradient_penalty)
    zero = zerojax.ZeroConfig.preset("zero++", compute_dtype="float32", units=units).__dict__
    state = started(abstract(kind, gradient_penalty, (2, 4), **zero), params)
    found = from_tree(step.gradients(state, X))
    mine = np.concatenate([np.ravel(from_stored(found[x.path], x)) for x in state.spec.leaves])
    theirs = np.concatenate([grads[x.path].ravel() for x in state.spec.leaves])
    assert np.linalg.norm(mine - theirs) < 0.3 * np.linalg.norm(theirs)
    assert mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs) > 0.95


def test_in_breadth_a_gradient_of_the_loss_s_own_is_refused():
    zero = {"accumulate": 2, "accumulate_order": "breadth"}
    with pytest.raises(zerojax.ZeroError, match='accumulate_order="depth"'):
        step.trace_train_step(abstract(Stacked, gradient_penalty, (2, 2), **zero), X)


def test_a_weight_sum_sends_one_scalar():
    """Beside the same step without it: an all-reduce of one number forward and one backward, each sum."""
    plain = abstract(Stacked, lambda model, x: jnp.mean(model(x) ** 2), (2, 2))
    summed = abstract(Stacked, weight_penalty, (2, 2))
    sent = [zerojax.comm_report(state, X) for state in (plain, summed)]
    assert sent[0].node_bytes < sent[1].node_bytes < sent[0].node_bytes + 1000


@pytest.mark.slow
def test_a_weight_sum_of_an_ordinary_module():
    state = create(Listed, weight_penalty, (1, 1), stage=0)
    model = zerojax.gather_model(state)
    wanted = optax.tree.norm(state.params)
    assert float(jnp.sqrt(zerojax.weight_sum(model))) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda model: zerojax.weight_sum(model.stack), "part or a copy"),
        (lambda model: zerojax.weight_sum(model, paths="nothing*"), "no parameter matches nothing"),
        (lambda model: zerojax.weight_sum({"a": 1}), "given a dict"),
    ],
)
def test_a_weight_sum_of_something_else_is_refused(use, words):
    state = abstract(Stacked, lambda model, x: jnp.mean(model(x)) + use(model), (2, 2))
    with pytest.raises(zerojax.ZeroError, match=words):
        step.trace_train_step(state, X)
