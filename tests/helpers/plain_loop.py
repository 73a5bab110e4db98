"""The reference: an ordinary optax loop on one device, with nothing of zerojax's step in it.

The loss is taken over the whole global batch at once, so it is the mean over all tokens by definition.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from core_models import CASES, Case
from flax import nnx, traverse_util

import zerojax

Tree = dict[str, Any]


def by_path(tree: Tree) -> dict[tuple[str, ...], Any]:
    """A nested dict's leaves."""
    return dict(traverse_util.flatten_dict(tree))


class Plain:
    """A case's model as a pure function of a nested dict of fp32 weights."""

    def __init__(self, case: Case, seed: int = 0):
        self.case = case
        if case.linen:
            raise TypeError("a Linen model's weights have to be given: use PlainLinen")
        graph, params, self._rest = nnx.split(case.model(nnx.Rngs(seed)), nnx.Param, ...)
        self._graph = graph
        flat = {tuple(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(params)}
        self._params = flat
        self.dtypes = {path: leaf.get_value().dtype for path, (_, leaf) in flat.items()}
        self.weights = traverse_util.unflatten_dict(
            {path: leaf.get_value().astype(jnp.float32) for path, (_, leaf) in flat.items()}
        )

    def loss(self, weights: Tree, batch: Any) -> jax.Array:
        """The case's loss, with each weight in the dtype that the model gave it."""
        return scalar(self.case.loss(self.model(weights), batch))

    def model(self, weights: Tree) -> Any:
        """The model with these weights."""
        flat = by_path(weights)
        params = [
            (path, leaf.replace(flat[key].astype(self.dtypes[key])))
            for key, (path, leaf) in self._params.items()
        ]
        return nnx.merge(self._graph, nnx.from_flat_state(params), self._rest)


class PlainLinen:
    """The same for Linen, from weights that are given."""

    def __init__(self, case: Case, weights: Tree):
        self.case = case
        self.weights = jax.tree.map(jnp.asarray, weights)

    def loss(self, weights: Tree, batch: Any) -> jax.Array:
        """The case's loss."""
        return scalar(self.case.loss(lambda x: self.case.model.apply({"params": weights}, x), batch))


@functools.cache
def plain_model(name: str) -> Plain | PlainLinen:
    """The reference of a case, with its weights, made once."""
    case = CASES[name]
    if not case.linen:
        return Plain(case)
    # zerojax derives the rngs that Linen is given: start from what came of them.
    return PlainLinen(case, zerojax.gather_params(case.create(optax.identity(), nodes=1, local=1)))


def scalar(result: Any) -> jax.Array:
    """A loss without its aux."""
    return result[0] if isinstance(result, tuple) else result


def plain_loop(
    plain: Plain | PlainLinen, tx: optax.GradientTransformation, batches: list[Any], slices: int = 1
) -> tuple[list[float], Tree]:
    """Losses before each step, and the weights after the last.

    Args:
        plain: the model.
        tx: the optimizer.
        batches: one a step.
        slices: into how many equal parts a batch is cut, whose mean gradient is taken in fp32: for
            models with half-precision weights, whose gradients are rounded once per part.
    """

    @jax.jit
    def step(weights: Tree, state: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)
        each = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(slices)]
        losses, grads = zip(*(jax.value_and_grad(plain.loss)(weights, part) for part in each), strict=True)
        grads = jax.tree.map(lambda *g: sum(g) / slices, *grads)
        updates, state = tx.update(grads, state, weights)
        return sum(losses) / slices, optax.apply_updates(weights, updates), state

    weights, state, losses = plain.weights, tx.init(plain.weights), []
    for batch in batches:
        loss, weights, state = step(weights, state, batch)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, weights)


def masters(state: zerojax.TrainState) -> Tree:
    """A state's fp32 master weights in unsharded shapes, cut out of the stored arrays by numpy."""
    stored = by_path(state.params)
    whole = {
        leaf.path: np.asarray(stored[leaf.path])
        .reshape(leaf.layers, leaf.padded)[:, : leaf.size]
        .reshape(leaf.unsharded_shape)
        for leaf in state.spec.leaves
    }
    return traverse_util.unflatten_dict(whole)


def distance(found: Tree, wanted: Tree) -> float:
    """The norm of the difference of two trees over the norm of the second."""
    a, b = by_path(found), by_path(wanted)
    assert a.keys() == b.keys()
    for path, x in a.items():
        assert np.shape(x) == np.shape(b[path]), path
    difference = sum(np.sum((np.float64(a[path]) - np.float64(b[path])) ** 2) for path in a)
    return float(np.sqrt(difference / sum(np.sum(np.float64(x) ** 2) for x in b.values())))
