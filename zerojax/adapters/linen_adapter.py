"""Flax Linen models: their parameters, the units that these belong to, and the model with given weights."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core import meta
from flax.linen.module import InterceptorContext
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Num, PyTree

from zerojax.adapters.adapter import Adapter, Bound, Given, ModelState, Parameter
from zerojax.adapters.linen_model import (
    ANOTHER_AXIS,
    PARAMS,
    BoundModel,
    InScope,
    UncreatedModel,
    Variables,
    is_method,
    variables_by_path,
)
from zerojax.adapters.loss import CONTEXT, LossContext, LossFn, call_loss
from zerojax.adapters.roles import ROUTER_STATE, ExpertBox
from zerojax.errors import ConfigurationError
from zerojax.schedule.transforms import holding
from zerojax.schedule.unit import Arrays, Sharded
from zerojax.sharding.mesh import LOCAL, NODE, MeshShape
from zerojax.sharding.param_tree import Path

Units = dict[Path, tuple[tuple[int, ...], set[type]]]
"""The units of a model: per module path, the ``Parameter.stack`` and the classes."""


@dataclass(frozen=True)
class BoundLinen(Bound):
    """See ``Bound``; a Linen module has no ``Stack``, keeps no updated copy, and its parameters are fixed."""

    model: BoundModel
    state: Mapping[str, Path]

    def model_state(self) -> ModelState:
        """The state after the calls so far.

        Refuse variables that did not exist when the model was created.
        """
        _, values = _split(self.model.variables)
        if new := values.keys() - self.state.values():
            raise ConfigurationError(
                f"the model made the variable {'/'.join(min(new))!r} in a step, but not when it was created: "
                "let the module make it in every call."
            )
        return {name: values[path] for name, path in self.state.items()}


class LinenAdapter(Adapter):
    """See ``Adapter``; inspects the model without creating its values.

    Of the sample batch only shapes and dtypes are used. The model may name the mesh's axes.
    """

    def __init__(
        self,
        module: linen.Module,
        units: tuple[type, ...],
        loss_fn: LossFn,
        sample_batch: PyTree[Array],
        world: MeshShape,
    ):
        self._module = module
        self._units = units
        self._loss_fn = loss_fn
        self._batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)),
            sample_batch,
        )
        self._axes = ((NODE, world.nodes), (LOCAL, world.local))
        _, self._created = self._trace(self._create, jax.random.key(0))
        weights = variables_by_path(self._created.get(PARAMS, {}))
        if not weights:
            raise ConfigurationError("loss_fn made no parameters: it must call the model it is given.")
        of_experts = {path for path, weight in weights.items() if isinstance(weight, ExpertBox)}
        weights, state = _split(self._created)
        if integers := [p for p, w in weights.items() if not jnp.issubdtype(w.dtype, jnp.floating)]:
            raise ConfigurationError(
                f"parameters {['/'.join(path) for path in integers]} are not floating-point: keep them in "
                "another collection."
            )
        self._describe_state(state, {path for path in state if path[0] == ROUTER_STATE})
        found = self._find_units(weights)
        _check_units(units, found, weights)
        self._paths = frozenset(found)
        self.parameters = tuple(
            Parameter.of(path, weight, _unit_of(path, found), path in of_experts)
            for path, weight in weights.items()
        )

    def init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], ModelState]:
        """See ``Adapter.init``."""
        jaxpr, _ = self._trace(self._create, key)
        # There are no named axes here, so the forward pass, whose collectives need them, is eliminated.
        initial, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        try:
            values = jaxpr_as_fun(initial)(key)
        except NameError as error:
            raise ConfigurationError(
                f"an initial value depends on a collective ({error}), but values are created before they are "
                "spread over the mesh: compute it without collectives."
            ) from error
        weights, state = _split(jax.tree.unflatten(jax.tree.structure(self._created), values))
        return weights, self._named(state)

    def _create(self, key: Array) -> Variables:
        """The variables that the loss function needs, with each weight of experts in its ``ExpertBox``."""
        params_key, dropout_key = jax.random.split(key)
        model = UncreatedModel(self._module, {"params": params_key, "dropout": dropout_key})
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._batch)
        with holding(CONTEXT, LossContext(model)):
            call_loss(self._loss_fn, model, batch, dropout_key)
        return model.boxed

    def bind(self, weights: Given, model_state: ModelState, *, train: bool, key: Array | None) -> Bound:
        """See ``Adapter.bind``; a Linen module learns of evaluation from its own call's arguments."""
        del train
        key = jax.random.key(0) if key is None else key
        variables = self._variables(weights, model_state)
        return BoundLinen(BoundModel(self._module, self._paths, variables, key), self._state)

    def whole(self, weights: Given, model_state: ModelState) -> Callable[..., PyTree[Array]]:
        """See ``Adapter.whole``: the module's ``apply`` with its variables."""
        return functools.partial(self._module.apply, self._variables(weights, model_state))

    def _variables(self, weights: Given, model_state: ModelState) -> Variables:
        state = {name: tree for name, tree in self._created.items() if name != PARAMS}
        rest = jax.tree.unflatten(jax.tree.structure(state), [model_state[name] for name in self._state])
        boxed = {p: InScope(**vars(x)) if isinstance(x, Sharded) else x for p, x in weights.items()}
        return {PARAMS: self.nested(boxed), **rest}

    def nested[T](self, weights: Mapping[Path, T]) -> dict[str, PyTree[T]]:
        """See ``Adapter.nested``; the lists in a module's parameters stay lists."""
        params = meta.unbox(self._created[PARAMS])
        return jax.tree.unflatten(
            jax.tree.structure(params), [weights[path] for path in variables_by_path(params)]
        )

    def _trace[*Args, T: PyTree[Array]](
        self, function: Callable[[*Args], T], *args: *Args
    ) -> tuple[ClosedJaxpr, T]:
        """The jaxpr and result shapes of one device's computation; no device is used."""
        return jax.make_jaxpr(function, axis_env=self._axes, return_shape=True)(*args)

    def _find_units(self, weights: dict[Path, Array]) -> Units:
        found: Units = {}
        running: list[Path] = []  # the unit whose method runs, if any

        def intercept(
            run: Callable[..., Arrays],
            args: Sequence[object],
            kwargs: Mapping[str, object],
            context: InterceptorContext,
        ) -> Arrays:
            module = context.module
            if running:
                _refuse_from_outside(running[0], module)
            kinds = {cls for cls in self._units if isinstance(module, cls)}
            outermost = not any(module.path[:n] in found for n in range(len(module.path) + 1))
            if kinds and outermost and any(is_method(cls, context) for cls in type(module).__mro__):
                sliced = variables_by_path(module.variables.get(PARAMS, {}))
                own = {(*module.path, *path): x for path, x in sliced.items()}
                stacks = {_stack("/".join(path), weights[path], x) for path, x in own.items()}
                if len(stacks) > 1:
                    raise ConfigurationError(
                        f"unit {'/'.join(module.path)!r}: some of its parameters are stacked and some "
                        "are not; scan them all over axis 0 (variable_axes={'params': 0})."
                    )
                found[module.path] = (stacks.pop() if stacks else (), kinds)
            if running or module.path not in found:
                return run(*args, **kwargs)
            running.append(module.path)
            try:
                return run(*args, **kwargs)
            finally:
                running.pop()

        def look(weights: Given, model_state: ModelState, batch: PyTree[Array]) -> Array:
            variables = self._variables(weights, model_state)
            model = BoundModel(self._module, frozenset(), variables, jax.random.key(0))
            with linen.intercept_methods(intercept), holding(CONTEXT, LossContext(model)):
                return call_loss(self._loss_fn, model, batch, jax.random.key(0))[0]

        self._trace(look, weights, self.abstract_model_state, self._batch)
        return found


def _refuse_from_outside(unit: Path, module: linen.Module) -> None:
    """Refuse a module that a unit calls, and whose variables are not the unit's."""
    if module.path[: len(unit)] != unit and module.variables:
        raise ConfigurationError(
            f"unit {'/'.join(unit)!r} calls the module {'/'.join(module.path)!r}, which was made outside of "
            "it. So the unit lacks its weights: make the module within the unit, or name a class in "
            "ZeroConfig.units that makes both."
        )


def _check_units(units: tuple[type, ...], found: Units, weights: Collection[Path]) -> None:
    """Refuse a unit class that does not occur in the model, or that has no parameters there."""
    above = {path[:depth] for path in weights for depth in range(len(path))}
    for cls in units:
        modules = {path for path, (_, kinds) in found.items() if cls in kinds}
        if not modules:
            raise ConfigurationError(f"ZeroConfig.units: {cls.__name__} does not occur in the model.")
        if above.isdisjoint(modules):
            raise ConfigurationError(f"ZeroConfig.units: {cls.__name__} has no parameters: leave it out.")


def _split(variables: Variables) -> tuple[dict[Path, Array], dict[Path, Array]]:
    """The parameters by path, and the state that is kept between calls by path."""
    state = {name: value for name, value in variables.items() if name != PARAMS}
    return variables_by_path(meta.unbox(variables.get(PARAMS, {}))), variables_by_path(state)


def _stack(name: str, whole: Array, sliced: Array) -> tuple[int, ...]:
    """The ``Parameter.stack`` of a parameter ``whole`` that a unit gets as ``sliced``."""
    loops = whole.ndim - sliced.ndim
    if whole.shape[loops:] == sliced.shape:
        return whole.shape[:loops]
    raise ConfigurationError(
        f"the unit's parameter {name!r} of shape {sliced.shape} is scanned out of one of shape {whole.shape} "
        f"{ANOTHER_AXIS}"
    )


def _unit_of(path: Path, units: Units) -> tuple[str, tuple[int, ...]] | None:
    """The name and the ``Parameter.stack`` of a parameter's unit."""
    found = (path[:depth] for depth in range(len(path)) if path[:depth] in units)
    return next((("/".join(unit), units[unit][0]) for unit in found), None)
