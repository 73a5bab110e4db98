"""Delta's copies, brought up to date by stacks as they gather, however a model calls them.

Evaluation brings them up to date all at once before its forward pass: what a step sees and leaves behind has
to be the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import WIDTH, Case, regression_batch, squared_error
from flax import nnx

from zerojax import eval_step, train_step
from zerojax.adapters import nnx_units
from zerojax.sharding.param_tree import to_tree
from zerojax.train.fields import abstract_replicas, specs_of
from zerojax.train.pass_weights import masters_of, refreshed
from zerojax.weights import Weight

DELTA: dict[str, Any] = {"weights": "int4", "weights_delta": True, "hpz": True, "block_size": 64}


class Layer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.tanh(self.linear(x))


class Model(nnx.Module):
    """Two stacks between two layers that belong to no unit."""

    def __init__(self, run: Any, layers: int, *, rngs: nnx.Rngs):
        self.run = run
        self.first = nnx_units.Stack(Layer, layers, rngs=rngs)
        self.second = nnx_units.Stack(Layer, layers, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.run(self, x))


def in_order(model: Model, x: jax.Array) -> jax.Array:
    return model.second(model.first(x))


def one_twice(model: Model, x: jax.Array) -> jax.Array:
    return model.second(model.first(model.first(x)))


def one_never(model: Model, x: jax.Array) -> jax.Array:
    return model.first(x)


def in_jax_checkpoint(model: Model, x: jax.Array) -> jax.Array:
    return model.second(jax.checkpoint(lambda x: model.first(x))(x))


def in_nnx_remat(model: Model, x: jax.Array) -> jax.Array:
    return model.second(nnx.remat(lambda stack, x: stack(x))(model.first, x))


def in_one_branch(model: Model, x: jax.Array) -> jax.Array:
    return nnx.cond(jnp.ones(()) > 0, lambda stack, x: stack(x), lambda stack, x: 2 * x, model.first, x)


RUNS = [in_order, one_twice, one_never, in_jax_checkpoint, in_nnx_remat, in_one_branch]


def all_at_once(train_spec: Any) -> Callable[[Any], dict[Any, np.ndarray]]:
    """Of a state: its copies as they are after the next step's update, by path."""
    spec = specs_of(abstract_replicas(train_spec))

    def update(params: Any, replicas: Any, step: Any) -> Any:
        masters = masters_of(train_spec, params)
        return refreshed(train_spec, masters, replicas, step)

    run = jax.jit(
        jax.shard_map(
            update,
            mesh=train_spec.mesh,
            in_specs=(to_tree(train_spec.by_path(train_spec.param_spec)), spec, jax.P()),
            out_specs=spec,
            check_vma=False,
        )
    )

    def replicas(state: Any) -> dict[Any, np.ndarray]:
        found = run(state.params, state.replicas, state.step)
        return {path: values(copy) for path, copy in found.items()}

    return replicas


def values(copy: Weight) -> np.ndarray:
    return np.asarray(copy.values, np.float32)


BREADTH = {"accumulate": 2, "accumulate_order": "breadth"}
# The ways to call the stacks, and what differs between one layer and several, or in breadth.
ALWAYS: list[tuple[Any, int, dict[str, Any]]] = [
    (in_order, 3, {}),
    (in_one_branch, 1, {}),
    (one_twice, 3, BREADTH),
]
SOMETIMES = [
    (run, layers, order) for run in RUNS for layers, order in ((1, {}), (3, {}), (3, BREADTH))
    if (run, layers, order) not in ALWAYS
]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "layers", "order"),
    [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SOMETIMES)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_step_sees_and_leaves_what_one_update_before_it_would(run, layers, order):
    case = Case(functools.partial(make, run, layers), squared_error, (), regression_batch)
    # With weight decay, so that weights change of stacks, too, that the model does not call.
    state = case.create(optax.adamw(1e-2, weight_decay=0.1), nodes=2, local=2, **DELTA, **order)
    names = {group.unit for group in state.spec.updating}
    assert names == {"first/block", "second/block"}
    replicas = all_at_once(state.spec)
    for batch in case.batches(8, 3):
        expected, loss = replicas(state), eval_step(state, batch)["loss"]
        if run is one_never:  # nothing was sent of its weights
            expected |= {path: values(copy) for path, copy in state.replicas.items() if path[0] == "second"}
        state, metrics = train_step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        for path, copy in state.replicas.items():
            np.testing.assert_array_equal(values(copy), expected[path], str(path))


def make(run: Any, layers: int, rngs: nnx.Rngs) -> Model:
    return Model(run, layers, rngs=rngs)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"delta_resync": 2}, {"nodes": 1}], ids=str)
def test_nothing_is_left_to_the_forward_pass_where_it_would_be_done_twice_or_not_at_all(options):
    case = Case(functools.partial(make, in_order, 2), squared_error, (), regression_batch)
    given: dict[str, Any] = {"nodes": 2, "local": 2, **DELTA, **options}
    assert case.abstract(optax.sgd(0.1), **given).spec.updating == ()
