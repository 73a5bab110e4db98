"""Runs an optimizer's update one layer at a time, with the same results as for all layers at once.

If master weights and moments are in host memory, a device never has all of them. An optimizer that is correct
on shards (``shard_check``) computes each element's update from that element's values and from norms. So its
program is evaluated twice (``zerojax.dataflow``). The first time it gets the whole tree's
gradients, but no weights and moments, and gives the norms and the counters. The second time it gets one
layer's values alone, and every norm is looked up.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend import core
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from zerojax.dataflow import as_it_is, called, evaluate
from zerojax.errors import ConfigurationError
from zerojax.optim.low_precision import with_moments_as_set
from zerojax.optim.moments import by_moment
from zerojax.optim.shard_check import OnLayout, Optimizer
from zerojax.schedule.layer_update import has_cotangent
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import MeshShape
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.zero_config import ZeroConfig

_REDUCTIONS = ("argmax", "argmin", "dot_general", "sort")
_NOT_IN_BACKWARD = (
    "ZeroConfig.update_in_backward updates a layer before the gradients of others exist. The optimizer needs "
    "norms of gradients, such as optax.clip_by_global_norm's (optimizer.clip_norm=0 leaves it out), or "
    "matrices of several layers, as Muon does: leave update_in_backward out."
)
_NORMS = (
    "the optimizer computes norms of weights or moments (LAMB and LARS do), or chooses by them. An update of "
    'one layer at a time cannot: leave "optimizer" out of ZeroConfig.host, or use norms of gradients alone, '
    "such as optax.clip_by_global_norm's. Gradients that optax.MultiSteps has summed are moments, too: let "
    "ZeroConfig(accumulate=) sum them."
)

_Value = Array | None
"""None where an evaluation lacks the value."""
_Reduction = Callable[[core.JaxprEqn, list[_Value]], Sequence[_Value]]


class Reduced(NamedTuple):
    """An update's results that depend on the whole tree.

    Attributes:
        norms: the program's reductions, in its order: the operation, and its results.
        others: the new values of counters and other state that is no moment, by their places in the state.
    """

    norms: list[tuple[str, Sequence[_Value]]]
    others: dict[str, Array]


class Traced(NamedTuple):
    """An update's program for leaves of certain shapes.

    Attributes:
        program: from gradients, state and weights to weights and state, all flat.
        paths: the paths of gradients and weights, in order.
        keys: the places of the state's arrays, in order.
        moments: by a moment's place, the path of its weight.
    """

    program: core.ClosedJaxpr
    paths: tuple[Path, ...]
    keys: tuple[str, ...]
    moments: dict[str, Path]

    @staticmethod
    def of(tx: optax.GradientTransformation, leaves: Sequence[ParamLayout]) -> "Traced":
        """The program of a transform of these stored leaves."""

        def update(grads: PyTree[Array], state: PyTree[Array], params: PyTree[Array]) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        shapes, state = _shapes(tx, leaves)
        by_index = {leaf.index: leaf.path for leaf in leaves}
        order = jax.tree.leaves(to_tree({leaf.path: leaf.index for leaf in leaves}))
        found = places(by_moment(leaves, state, lambda leaf, _: leaf.index, lambda _: -1))
        return Traced(
            jax.make_jaxpr(update)(shapes, state, shapes),
            tuple(by_index[index] for index in order),
            tuple(found),
            {key: by_index[int(index)] for key, index in found.items() if index >= 0},
        )

    def run(
        self,
        grads: Mapping[Path, Array],
        state: Mapping[str, Array],
        params: Mapping[Path, Array],
        reduction: _Reduction,
    ) -> tuple[dict[Path, _Value], dict[str, _Value]]:
        """Evaluate the update as far as the values allow; ``reduction`` evaluates each norm.

        Returns:
            Parameters by path and state by place; None for each value that needs a missing one.
        """

        def run(equation: core.JaxprEqn, given: list[_Value]) -> Sequence[_Value]:
            name = equation.primitive.name
            if (name.startswith("reduce_") and name != "reduce_precision") or name in _REDUCTIONS:
                return reduction(equation, given)
            if (program := called(equation, with_rule=True)) is not None:
                return evaluate(program, given, run)
            if name == "cond":
                # All branches are computed, so that each norm has its place.
                index, *operands = given
                branches = [evaluate(branch, operands, run) for branch in equation.params["branches"]]
                return [_chosen(index, *results) for results in zip(*branches, strict=True)]
            return _if_complete(equation, given)

        given = [*map(grads.get, self.paths), *map(state.get, self.keys), *map(params.get, self.paths)]
        results = evaluate(self.program, given, run)
        count = len(self.paths)
        return (
            dict(zip(self.paths, results[:count], strict=True)),
            dict(zip(self.keys, results[count:], strict=True)),
        )

    def updated(
        self,
        reduced: Reduced,
        grads: Mapping[Path, Array],
        state: Mapping[str, Array],
        params: Mapping[Path, Array],
    ) -> tuple[dict[Path, Array], dict[str, Array]]:
        """See ``LayerwiseOptimizer.update``."""
        norms = list(reversed(reduced.norms))

        def look_up(equation: core.JaxprEqn, _: list[_Value]) -> Sequence[_Value]:
            name, results = norms.pop() if norms else ("", [])
            if name != equation.primitive.name:
                raise ConfigurationError(_NORMS)
            return results

        after, state_after = self.run(grads, state, params, look_up)
        moments = {key: state_after[key] for key, path in self.moments.items() if path in params}
        return _complete({path: after[path] for path in params}), _complete(moments)


class LayerwiseOptimizer:
    """An optimizer's update: the norms of the whole tree's gradients, and updates of single layers."""

    def __init__(
        self,
        optimizer: Optimizer,
        whole: optax.GradientTransformation,
        mesh: Mesh,
        leaves: Sequence[ParamLayout],
        groups: Sequence[Sequence[Path]],
        zero: ZeroConfig,
    ) -> None:
        """Trace the update of the whole tree, and of layers of each group.

        ``optimizer`` is ``TrainState.create``'s argument, ``whole`` its transform of stored leaves, and
        ``groups`` are the paths of weights that are updated together.
        """
        layers = [dataclasses.replace(leaf, stack=()) for leaf in leaves]
        self._whole = Traced.of(whole, leaves)
        self._of_shards: Traced | None = None
        self._of_groups: dict[Path, Traced] = {}
        if isinstance(optimizer, OnLayout):
            for group in groups:
                # It exchanges the group's matrices; vectors stand in for other weights.
                own = [x if x.path in group else dataclasses.replace(x, shape=(1,)) for x in layers]
                traced = Traced.of(with_moments_as_set(optimizer.make(mesh, own, zero), zero), own)
                self._of_groups |= dict.fromkeys(group, traced)
        else:
            tx = with_moments_as_set(optimizer, zero)
            self._of_groups = dict.fromkeys((leaf.path for leaf in leaves), Traced.of(tx, layers))
            if zero.update_in_backward:
                one = MeshShape(1, 1)
                shards = [dataclasses.replace(leaf, world=one, shard=leaf.owned) for leaf in layers]
                self._of_shards = Traced.of(tx, shards)
        self._needs_others = isinstance(optimizer, OnLayout)
        of_whole, of_layers = (_shapes(whole, some) for some in (leaves, layers))
        jax.eval_shape(self._check, of_whole, of_layers)
        self.dtypes = {place: x.dtype for place, x in places(of_whole[1]).items()}
        """The dtypes of the optimizer's state, by place."""

    @property
    def moments(self) -> dict[str, Path]:
        """The path of each moment's weight, by the moment's place in the optimizer's state."""
        return self._whole.moments

    def refuse_in_backward(self) -> None:
        """Refuse an optimizer that cannot update a layer before the gradients of others exist."""
        if self._needs_others:
            raise ConfigurationError(_NOT_IN_BACKWARD)
        for place, dtype in self.dtypes.items():
            if place in self.moments and not has_cotangent(dtype):
                raise ConfigurationError(
                    "ZeroConfig.update_in_backward takes an optimizer's state in floating point alone, and "
                    f"{place} is {dtype}: leave update_in_backward out."
                )

    def reduce(self, grads: PyTree[Array], state: Mapping[str, Array]) -> Reduced:
        """Compute the norms of all gradients and the next counters, for ``update``.

        ``state`` holds, by place, all but the moments.
        """
        norms: list[tuple[str, Sequence[_Value]]] = []

        def reduction(equation: core.JaxprEqn, given: list[_Value]) -> Sequence[_Value]:
            norms.append((equation.primitive.name, _if_complete(equation, given)))
            return norms[-1][1]

        _, after = self._whole.run(from_tree(grads), state, {}, reduction)
        return Reduced(norms, _complete({key: x for key, x in after.items() if key not in self.moments}))

    def update(
        self,
        reduced: Reduced,
        grads: Mapping[Path, Array],
        state: Mapping[str, Array],
        params: Mapping[Path, Array],
    ) -> tuple[dict[Path, Array], dict[str, Array]]:
        """Update one layer.

        Args:
            reduced: the result of ``reduce``.
            grads: gradients, shaped like stored leaves without layers.
            state: the layer's moments, and the state before the update that is no moment, by place.
            params: the weights of one group.

        Returns:
            The new weights, and the new moments.
        """
        return self._of_groups[next(iter(params))].updated(reduced, grads, state, params)

    def update_shard(
        self, grads: Mapping[Path, Array], state: Mapping[str, Array], params: Mapping[Path, Array]
    ) -> tuple[dict[Path, Array], dict[str, Array]]:
        """``update`` of one device's shards, inside ``shard_map``, by an optimizer without norms."""
        assert self._of_shards is not None
        counters = {place: x for place, x in state.items() if place not in self.moments}
        return self._of_shards.updated(self.reduce({}, counters), grads, state, params)

    def _check(self, whole: tuple[Any, Any], layers: tuple[Any, Any]) -> None:
        """Trace the update of every group, with shapes in place of arrays."""
        grads, state = whole
        of_layer, moments = from_tree(layers[0]), places(layers[1])
        counters = {place: x for place, x in places(state).items() if place not in self.moments}
        if pooled := [place for place, x in counters.items() if x.shape != moments[place].shape]:
            raise ConfigurationError(
                f"the optimizer's state {pooled[0]} is of all weights together (optax.flatten makes one). An "
                "update of one layer at a time cannot have it: leave the transform out, or leave "
                '"optimizer" out of ZeroConfig.host.'
            )
        reduced = self.reduce(grads, counters)
        self._needs_others |= bool(reduced.norms)
        for traced in {id(traced): traced for traced in self._of_groups.values()}.values():
            params = {path: of_layer[path] for path, own in self._of_groups.items() if own is traced}
            given = {place: moments[place] for place, path in traced.moments.items() if path in params}
            self.update(reduced, params, given | counters, params)


def places(state: PyTree[Array]) -> dict[str, Array]:
    """The arrays of an optimizer's state by place, the ``jax.tree_util.keystr`` of an array's path."""
    return {jax.tree_util.keystr(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(state)}


def with_places(state: PyTree[Array], values: Mapping[str, Array]) -> PyTree[Array]:
    """A state of the same structure with these arrays at their places."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: values[jax.tree_util.keystr(keys)], state)


def _shapes(tx: optax.GradientTransformation, leaves: Sequence[ParamLayout]) -> tuple[Any, Any]:
    """The shapes of weights and of the optimizer's state."""
    shapes = to_tree({leaf.path: jax.ShapeDtypeStruct(leaf.stored_shape, jnp.float32) for leaf in leaves})
    return shapes, jax.eval_shape(tx.init, shapes)


def _chosen(index: _Value, *results: _Value) -> _Value:
    """The chosen branch's result, if no branch lacks it."""
    found = [x for x in (index, *results) if x is not None]
    return lax.select_n(*found) if len(found) > len(results) else None


def _if_complete(equation: core.JaxprEqn, given: Sequence[_Value]) -> Sequence[_Value]:
    """The results of an equation; None for each if an operand is missing."""
    found = [x for x in given if x is not None]
    return as_it_is(equation, found) if len(found) == len(given) else [None] * len(equation.outvars)


def _complete[K](values: Mapping[K, _Value]) -> dict[K, Array]:
    """Check that no value is missing."""
    found = {key: x for key, x in values.items() if x is not None}
    if len(found) < len(values):
        raise ConfigurationError(_NORMS)
    return found
