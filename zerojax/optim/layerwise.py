"""Runs an optimizer's update one layer at a time, with the results that it has for all layers at once.

Where master weights and moments are in host memory, a device never has all of them. An optimizer that is
correct on shards (``shard_check``) computes each element's update from that element's values and from norms.
So its program is evaluated twice (``zerojax.matmul.replay.evaluate``): once with the gradients of the whole
tree and without weights and moments, for the norms and the counters; and then for each layer with that
layer's values alone, where a norm is not computed again but looked up.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend import core
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from zerojax.errors import ConfigurationError
from zerojax.matmul.replay import CALLED, as_it_is, evaluate
from zerojax.optim.low_precision import with_moments_as_set
from zerojax.optim.moments import by_moment
from zerojax.optim.shard_check import OnLayout, Optimizer
from zerojax.schedule.layer_update import has_cotangent
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import MeshShape
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.zero_config import ZeroConfig

_CALLED = CALLED | {"custom_jvp_call": "call_jaxpr"}
_REDUCTIONS = ("argmax", "argmin", "dot_general", "sort")
_NOT_IN_BACKWARD = (
    "ZeroConfig.update_in_backward updates a layer before the gradients of others exist, and the optimizer "
    "needs norms of gradients, such as optax.clip_by_global_norm's (optimizer.clip_norm=0 leaves it out), or "
    "matrices of several layers, as Muon does: leave update_in_backward out."
)
_NORMS = (
    "the optimizer computes norms of weights or moments (LAMB and LARS do), or chooses by them, which an "
    'update of one layer at a time cannot: leave "optimizer" out of ZeroConfig.host, or use norms of '
    "gradients alone, such as optax.clip_by_global_norm's. Those of gradients that optax.MultiSteps has "
    "summed are norms of moments, too: let ZeroConfig(accumulate=) sum them."
)


class _Absent:
    """In place of a value that an evaluation lacks."""


_ABSENT = _Absent()
_Value = Array | _Absent
_Run = Callable[[core.JaxprEqn, list[_Value]], Sequence[_Value]]


class Reduced(NamedTuple):
    """What an update computes of the whole tree.

    Attributes:
        norms: the program's reductions, in its order: the operation, and its results.
        others: the new values of what is no moment, such as counters, by their places in the state.
    """

    norms: list[tuple[str, list[_Value]]]
    others: dict[str, Array]


class Traced(NamedTuple):
    """An update's program for leaves of certain shapes.

    Attributes:
        program: from gradients, state and weights to weights and state, all flat.
        paths: the paths of gradients and weights, in order.
        keys: the places of the state's arrays, in order.
        moments: by its place, the path of a moment's weight.
    """

    program: core.ClosedJaxpr
    paths: tuple[Path, ...]
    keys: tuple[str, ...]
    moments: dict[str, Path]


class LayerwiseOptimizer:
    """An optimizer's update, of the whole tree but for weights and moments, and of single layers."""

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

        The optimizer is as ``TrainState.create`` got it, and ``whole`` its transform of stored leaves.
        ``groups`` are the paths of weights that are updated together.

        Raises:
            ConfigurationError: the optimizer needs norms of weights or of moments, or keeps an array of all
                weights together.
        """
        self._whole = _traced(whole, leaves)
        layers = [dataclasses.replace(leaf, stack=()) for leaf in leaves]
        if isinstance(optimizer, OnLayout):
            self._of_groups = {
                path: traced
                for group in groups
                for traced in [_traced_alone(optimizer, mesh, layers, group, zero)]
                for path in group
            }
        else:
            traced = _traced(with_moments_as_set(optimizer, zero), layers)
            self._of_groups = dict.fromkeys((leaf.path for leaf in leaves), traced)
        self._needs_others = isinstance(optimizer, OnLayout)
        of_whole, of_layers = (_shapes(whole, some) for some in (leaves, layers))
        jax.eval_shape(self._check, of_whole, of_layers)
        self.dtypes = {place: x.dtype for place, x in places(of_whole[1]).items()}
        """Of the optimizer's state, by place."""
        self._of_shards: Traced | None = None
        if zero.update_in_backward and not isinstance(optimizer, OnLayout):
            one = MeshShape(1, 1)
            shards = [dataclasses.replace(leaf, world=one, shard=leaf.owned) for leaf in layers]
            self._of_shards = _traced(with_moments_as_set(optimizer, zero), shards)

    @property
    def moments(self) -> dict[str, Path]:
        """By its place in the optimizer's state, the path of each moment's weight."""
        return self._whole.moments

    def refuse_in_backward(self) -> None:
        """Refuse to update a layer before the gradients of others exist.

        Raises:
            ConfigurationError: the optimizer needs those, or keeps integers of each weight, which no
                cotangent can be (``has_cotangent``).
        """
        if self._needs_others:
            raise ConfigurationError(_NOT_IN_BACKWARD)
        for place, dtype in self.dtypes.items():
            if place in self.moments and not has_cotangent(dtype):
                raise ConfigurationError(
                    "ZeroConfig.update_in_backward takes an optimizer's state in floating point alone, and "
                    f"{place} is {dtype}: leave update_in_backward out."
                )

    def reduce(self, grads: PyTree[Array], state: Mapping[str, Array]) -> Reduced:
        """Compute norms and counters.

        The gradients are those of all leaves; ``state`` is what is no moment, by its place in the optimizer's
        state.

        Raises:
            ConfigurationError: a counter depends on weights or moments.
        """
        norms: list[tuple[str, list[_Value]]] = []

        def reduction(equation: core.JaxprEqn, given: list[_Value]) -> list[_Value]:
            norms.append((equation.primitive.name, _unless_absent(equation, given)))
            return norms[-1][1]

        _, after = _run(self._whole, from_tree(grads), state, {}, reduction)
        others = {key: x for key, x in after.items() if key not in self.moments}
        return Reduced(norms, _there(others))

    def update(
        self,
        reduced: Reduced,
        grads: Mapping[Path, Array],
        state: Mapping[str, Array],
        params: Mapping[Path, Array],
    ) -> tuple[dict[Path, Array], dict[str, Array]]:
        """Update one layer.

        Gradients have the shapes of stored leaves without layers. ``state`` has the layer's moments, and what
        is no moment as it was, by their places in the state. ``params`` are the weights of one group.

        Returns:
            The new weights, and the new moments.

        Raises:
            ConfigurationError: the update needs norms of weights or of moments.
        """
        return _updated(self._of_groups[next(iter(params))], reduced, grads, state, params)

    def update_shard(
        self, grads: Mapping[Path, Array], state: Mapping[str, Array], params: Mapping[Path, Array]
    ) -> tuple[dict[Path, Array], dict[str, Array]]:
        """``update`` of one layer on one device, inside ``shard_map``, by an optimizer without norms.

        Arguments are as there, of this device's shards.
        """
        assert self._of_shards is not None
        counters = {place: x for place, x in state.items() if place not in self.moments}
        return _updated(self._of_shards, self.reduce({}, counters), grads, state, params)

    def _check(self, whole: tuple[Any, Any], layers: tuple[Any, Any]) -> None:
        """Run all of it, on shapes alone."""
        grads, state = whole
        counters = {place: x for place, x in places(state).items() if place not in self.moments}
        if pooled := [place for place, x in counters.items() if x.shape != places(layers[1])[place].shape]:
            raise ConfigurationError(
                f"the optimizer's state {pooled[0]} is of all weights together (optax.flatten makes one), "
                "which an update of one layer at a time cannot have: leave it out, or leave "
                '"optimizer" out of ZeroConfig.host.'
            )
        reduced = self.reduce(grads, counters)
        self._needs_others |= bool(reduced.norms)
        of_layer, moments = from_tree(layers[0]), places(layers[1])
        for traced in {id(traced): traced for traced in self._of_groups.values()}.values():
            mine = [path for path, own in self._of_groups.items() if own is traced]
            params = {path: of_layer[path] for path in mine}
            given = {place: moments[place] for place, path in traced.moments.items() if path in params}
            self.update(reduced, params, given | counters, params)


def _updated(
    traced: Traced,
    reduced: Reduced,
    grads: Mapping[Path, Array],
    state: Mapping[str, Array],
    params: Mapping[Path, Array],
) -> tuple[dict[Path, Array], dict[str, Array]]:
    """See ``LayerwiseOptimizer.update``."""
    norms = list(reversed(reduced.norms))

    def look_up(equation: core.JaxprEqn, _: list[_Value]) -> list[_Value]:
        name, results = norms.pop() if norms else ("", [])
        if name != equation.primitive.name:
            raise ConfigurationError(_NORMS)
        return results

    after, moments = _run(traced, grads, state, params, look_up)
    mine = {key: moments[key] for key, path in traced.moments.items() if path in params}
    return _there({path: after[path] for path in params}), _there(mine)


def places(state: PyTree[Array]) -> dict[str, Array]:
    """The arrays of an optimizer's state, by their places in it."""
    return {jax.tree_util.keystr(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(state)}


def with_places(state: PyTree[Array], values: Mapping[str, Array]) -> PyTree[Array]:
    """A state with other arrays at its places."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: values[jax.tree_util.keystr(keys)], state)


def _traced_alone(
    optimizer: OnLayout,
    mesh: Mesh,
    layers: Sequence[ParamLayout],
    paths: Collection[Path],
    zero: ZeroConfig,
) -> Traced:
    """The update of a group by an optimizer that exchanges matrices; vectors stand in for other weights."""
    mine = [leaf if leaf.path in paths else dataclasses.replace(leaf, shape=(1,)) for leaf in layers]
    return _traced(with_moments_as_set(optimizer.make(mesh, mine, zero), zero), mine)


def _shapes(tx: optax.GradientTransformation, leaves: Sequence[ParamLayout]) -> tuple[Any, Any]:
    """The shapes of weights and of the optimizer's state."""
    shapes = to_tree({leaf.path: jax.ShapeDtypeStruct(leaf.stored_shape, jnp.float32) for leaf in leaves})
    return shapes, jax.eval_shape(tx.init, shapes)


def _traced(tx: optax.GradientTransformation, leaves: Sequence[ParamLayout]) -> Traced:
    shapes, state = _shapes(tx, leaves)
    by_index = {leaf.index: leaf.path for leaf in leaves}
    number = to_tree({leaf.path: leaf.index for leaf in leaves})

    def update(grads: PyTree[Array], state: PyTree[Array], params: PyTree[Array]) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found = places(by_moment(leaves, state, lambda leaf, _: leaf.index, lambda _: -1))
    return Traced(
        jax.make_jaxpr(update)(shapes, state, shapes),
        tuple(by_index[index] for index in jax.tree.leaves(number)),
        tuple(found),
        {key: by_index[int(index)] for key, index in found.items() if index >= 0},
    )


def _run(
    traced: Traced,
    grads: Mapping[Path, Array],
    state: Mapping[str, Array],
    params: Mapping[Path, Array],
    reduction: Callable[[core.JaxprEqn, list[_Value]], list[_Value]],
) -> tuple[dict[Path, _Value], dict[str, _Value]]:
    """Evaluate an update's program as far as the given values go."""

    def run(equation: core.JaxprEqn, given: list[_Value]) -> Sequence[_Value]:
        name = equation.primitive.name
        if (name.startswith("reduce_") and name != "reduce_precision") or name in _REDUCTIONS:
            return reduction(equation, given)
        if name in _CALLED:
            inner = equation.params[_CALLED[name]]
            return evaluate(inner.jaxpr, inner.consts, given, run)
        if name == "cond":
            return _chosen(equation, given, run)
        return _unless_absent(equation, given)

    given = [
        *(grads.get(path, _ABSENT) for path in traced.paths),
        *(state.get(key, _ABSENT) for key in traced.keys),
        *(params.get(path, _ABSENT) for path in traced.paths),
    ]
    program = traced.program
    results = evaluate(program.jaxpr, program.consts, given, run)
    count = len(traced.paths)
    return (
        dict(zip(traced.paths, results[:count], strict=True)),
        dict(zip(traced.keys, results[count:], strict=True)),
    )


def _chosen(equation: core.JaxprEqn, given: Sequence[_Value], run: _Run) -> list[_Value]:
    """The results of a branch, of which some may be there though an operand is absent (``optax.MultiSteps``).

    All branches are computed, so that each norm has its place.
    """
    index, *operands = given
    branches = [evaluate(b.jaxpr, b.consts, operands, run) for b in equation.params["branches"]]

    def choose(*results: _Value) -> _Value:
        there = [x for x in (index, *results) if not isinstance(x, _Absent)]
        if len(there) <= len(results):
            return _ABSENT
        return lax.select_n(*there)

    return list(map(choose, *branches))


def _unless_absent(equation: core.JaxprEqn, given: Sequence[_Value]) -> list[_Value]:
    there = [x for x in given if not isinstance(x, _Absent)]
    if len(there) < len(given):
        return [_ABSENT] * len(equation.outvars)
    return list(as_it_is(equation, there))


def _there[K](values: Mapping[K, _Value]) -> dict[K, Array]:
    """Values of which none may be absent."""
    there = {key: x for key, x in values.items() if not isinstance(x, _Absent)}
    if len(there) < len(values):
        raise ConfigurationError(_NORMS)
    return there
