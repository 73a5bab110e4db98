"""Flax Linen modules: units are found and gathered by intercepting their methods.

The interceptor is active only while a bound model runs, so the user's classes are not changed.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core import meta
from flax.core.scope import DenyList, in_filter, intersect_filters
from flax.linen.module import InterceptorContext
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Num, PyTree

from zerojax.adapters.adapter import Adapter, Bound, Given, LossFn, ModelState, Parameter, call_loss
from zerojax.adapters.roles import ROUTER_STATE, ExpertBox
from zerojax.adapters.weight_sum import MasterWeights, master_weights
from zerojax.errors import ConfigurationError
from zerojax.schedule.partition import split_arrays
from zerojax.schedule.sharded import Sharded, read_outside, translated_errors
from zerojax.schedule.unit import Arrays, call_unit
from zerojax.sharding.mesh import LOCAL, NODE, MeshShape
from zerojax.sharding.param_tree import Path, by_name, from_tree, to_tree

Shape = tuple[int, ...]
Variables = dict[str, PyTree[Array]]
"""A Linen model's variables, nested by module, by the names of their collections."""
Units = dict[Path, tuple[Shape, set[type]]]
"""The units of a model: per module path, the ``Parameter.stack`` and the classes."""
PARAMS = "params"
# Collections that live for one call only.
_PASSING = frozenset({"intermediates", "perturbations"})
_ANOTHER_AXIS = (
    "along an axis other than 0: use variable_axes={'params': 0} (in MaxText param_scan_axis=0), or leave "
    "its class out of ZeroConfig.units."
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class _InScope(Sharded, meta.AxisMetadata[Any]):
    """A unit's parameter in a scope of Flax's: a box, which ``Module.param`` opens."""

    def unbox(self) -> "_Unread":
        """What ``setup`` gets outside of the unit's call."""
        return _Unread(**vars(self))

    def replace_boxed(self, val: PyTree) -> PyTree:
        """A new value has no use for the box."""
        return val

    def add_axis(self, index: int, params: Mapping[object, object]) -> Self:
        """See ``AxisMetadata``."""
        del index, params
        return self

    def remove_axis(self, index: int, params: Mapping[object, object]) -> Self:
        """Called where a loop or a map over layers slices the parameter."""
        del params
        if index != 0:
            raise ConfigurationError(f"the unit's parameter {self.leaf.name!r} is scanned {_ANOTHER_AXIS}")
        return self


class _Unread(Sharded):
    """A leaf of the shape that Flax expects of the parameter, which cannot be read."""

    @property
    def shape(self) -> Shape:
        """Of the whole parameter."""
        return self.leaf.shape

    def __getattr__(self, name: str) -> Never:
        """Refuse all other attributes of arrays."""
        raise WeightReadError(read_outside(self.leaf.name))

    @property
    def __jax_array__(self) -> Never:  # pyright: ignore[reportIncompatibleMethodOverride]  (JAX calls no leaf's)
        """Refuse when JAX looks whether this could be an array."""
        raise ConfigurationError(read_outside(self.leaf.name))


class WeightReadError(ConfigurationError, AttributeError):
    """A weight was read outside its unit's call. It is an AttributeError too, so that ``hasattr`` works."""


class _LinenModel:
    """The model that a loss function gets, which is called like the module itself."""

    def __init__(self, module: linen.Module, variables: Variables):
        self._module = module
        self.variables = variables

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        """Call the module with zerojax's variables; other arguments as for ``apply``."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """The module's other methods and submodules, called like the module itself, and its fields."""
        module = self.__dict__.get("_module")  # not set yet while a copy is being created
        if hasattr(linen.Module, name):
            raise AttributeError(
                f"model.{name}: a loss function may call the model, its methods and `apply`, and read its "
                "`variables` and fields. For the rest of linen.Module use the module itself."
            )
        value = getattr(module, name)
        if inspect.ismethod(value) and value.__self__ is module:
            return functools.partial(self, method=name)
        if isinstance(value, linen.Module):
            return functools.partial(self, method=lambda module, *a, **k: getattr(module, name)(*a, **k))
        return value


class BoundLinen(_LinenModel):
    """A Linen module with its variables, ``Sharded`` in units, and a key, for one forward pass."""

    def __init__(
        self, module: linen.Module, units: frozenset[Path], variables: Variables, key: Array
    ) -> None:
        super().__init__(module, variables)
        self._units = units
        self._key = key

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        """Apply the module; the next call sees changed state, such as batch statistics.

        Arguments are the module's, and those of ``linen.Module.apply``. Without ``mutable`` all state of the
        model may change. With it, collections are mutable and returned as by ``apply``.
        """
        state = [name for name in self.variables if name != PARAMS]
        mutable = kwargs.pop("mutable", None)
        self._key, key = jax.random.split(self._key)
        # "params" is also every other stream's: Flax counts their draws from it.
        rngs = kwargs.pop("rngs", {"params": jax.random.fold_in(key, 1), "dropout": key})
        every = state if mutable is None else mutable
        result = self.apply(self.variables, *args, rngs=rngs, mutable=every, **kwargs)
        if every is False:
            return result
        out, changed = result
        self.variables = {**self.variables, **{name: changed[name] for name in state if name in changed}}
        return out if mutable is None else result

    def apply(self, variables: Mapping[str, PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        """``linen.Module.apply`` with any variables; those of the model do not change.

        Raises:
            ConfigurationError: ``mutable`` includes the parameters; or ``capture_intermediates`` in a model
                with units, whose insides it would not see.
        """
        if in_filter(kwargs.get("mutable", False), PARAMS):
            raise ConfigurationError(
                "mutable has the parameters in it, which only the optimizer changes: name the other "
                'collections, or all of them as flax.core.DenyList("params").'
            )
        if kwargs.get("capture_intermediates") and self._units:
            raise ConfigurationError(
                "capture_intermediates does not see what happens within a unit: let the modules sow what "
                'is wanted, and call the model with mutable=["intermediates"].'
            )
        with linen.intercept_methods(self._intercept):
            return self._module.apply(variables, *args, **kwargs)

    def _intercept(
        self,
        run: Callable[..., Arrays],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        context: InterceptorContext,
    ) -> Arrays:
        """Gather the weights of a unit, or of a part of it that is called from outside, for the call.

        A function that is not the module's own method of that name runs unchanged: its calls are such parts.
        """
        module = context.module
        if not any(module.path[:n] in self._units for n in range(len(module.path) + 1)):
            return run(*args, **kwargs)
        params = module.variables.get(PARAMS, {})
        if not any(isinstance(x, Sharded) for x in jax.tree.leaves(params, is_leaf=_is_param)):
            return run(*args, **kwargs)
        if context.method_name == "setup":
            # It runs again, on whole weights, in the call; here it only creates submodules.
            with contextlib.suppress(ConfigurationError), translated_errors():
                run(*args, **kwargs)
            return None
        if not _is_method(type(module), context):
            return run(*args, **kwargs)
        return _call_module(module, context.method_name, params, args, kwargs)


@dataclass(frozen=True)
class _Pass(Bound):
    """See ``Bound``; a Linen module has no ``Stack``, keeps no updated copy, and its parameters are fixed."""

    model: BoundLinen
    state: Mapping[str, Path]

    def model_state(self) -> ModelState:
        """The state after the calls so far.

        Raises:
            ConfigurationError: the model made variables that it did not make at its creation.
        """
        values = _state(self.model.variables)
        if new := values.keys() - self.state.values():
            raise ConfigurationError(
                f"the model made the variable {'/'.join(min(new))!r} in a step, but not when it was created: "
                "let the module make it in every call."
            )
        return {name: values[path] for name, path in self.state.items()}


class _Unbound(_LinenModel):
    """Stands in for the model while its variables are created: each call adds those that it needs."""

    def __init__(self, module: linen.Module, rngs: dict[str, Array]) -> None:
        super().__init__(module, _NotYet())
        self._rngs = rngs
        self.of_experts: set[Path] = set()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        mutable = kwargs.pop("mutable", None)
        kwargs.pop("rngs", None)
        out, variables = self._module.init_with_output(self._rngs, *args, mutable=True, **kwargs)
        created = _by_path(cast(Variables, variables).get(PARAMS, {}))
        self.of_experts |= {path for path, value in created.items() if isinstance(value, ExpertBox)}
        variables = meta.unbox(variables)
        kept = {name: value for name, value in variables.items() if name not in _PASSING}
        self.variables = _NotYet(to_tree({**from_tree(kept), **from_tree(self.variables)}))
        if mutable is None or mutable is False:
            return out
        return out, {name: value for name, value in variables.items() if in_filter(mutable, name)}

    def apply(self, variables: Mapping[str, PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        if variables.get(PARAMS):
            return self._module.apply(variables, *args, **kwargs)
        return self(*args, **kwargs)


class _NotYet(Variables):
    """Variables before the calls that create them: every collection exists and is empty."""

    def __missing__(self, name: str) -> "_Nothing":
        return _Nothing(name)


class _Nothing(dict[str, PyTree[Array]]):
    """A collection that is empty so far; it can be passed to ``apply`` and summed, but not indexed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __missing__(self, name: str) -> Never:
        raise ConfigurationError(
            f"model.variables[{self.name!r}][{name!r}] is read before the model was called, and a Linen "
            "module has no variables before: call the model first."
        )


jax.tree_util.register_pytree_node(_Nothing, lambda empty: ((), empty.name), lambda name, _: _Nothing(name))


class LinenAdapter(Adapter):
    """See ``Adapter``; inspects the model without creating its values.

    Of the sample batch only shapes and dtypes are used. The model may name the mesh's axes.

    Raises:
        ConfigurationError: the loss never calls the model, or a unit class does not occur in it.
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
        _, (weights, state) = self._trace(self._init, jax.random.key(0))
        if not weights:
            raise ConfigurationError("loss_fn made no parameters: it must call the model it is given.")
        self._state = by_name(state)
        self.abstract_model_state: ModelState = {name: state[path] for name, path in self._state.items()}
        self.counts = frozenset(
            name
            for name, path in self._state.items()
            if path[0] == ROUTER_STATE and jnp.issubdtype(state[path].dtype, jnp.integer)
        )
        found = self._find_units(weights)
        holding = {path[:depth] for path in weights for depth in range(len(path))}
        for cls in units:
            modules = {path for path, (_, kinds) in found.items() if cls in kinds}
            if not modules:
                raise ConfigurationError(f"ZeroConfig.units: {cls.__name__} does not occur in the model.")
            if holding.isdisjoint(modules):
                raise ConfigurationError(
                    f"ZeroConfig.units: {cls.__name__} has no parameters of its own. The modules that it is "
                    "given belong to the one that makes them: name their classes, or make them within "
                    f"{cls.__name__}."
                )
        self._paths = frozenset(found)
        self.parameters = tuple(
            _parameter(path, weight, found, path in self._of_experts) for path, weight in weights.items()
        )

    def init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], ModelState]:
        """See ``Adapter.init``."""
        jaxpr, shapes = self._trace(self._init, key)
        # There are no named axes here, so the forward pass, whose collectives need them, is eliminated.
        initial, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        try:
            values = jaxpr_as_fun(initial)(key)
        except NameError as error:
            raise ConfigurationError(
                f"an initial value depends on a collective ({error}): values are made before they are "
                "spread over the mesh, so compute it from local ones."
            ) from error
        weights, state = jax.tree.unflatten(jax.tree.structure(shapes), values)
        return weights, {name: state[path] for name, path in self._state.items()}

    def _init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], dict[Path, Array]]:
        params_key, dropout_key = jax.random.split(key)
        unbound = _Unbound(self._module, {"params": params_key, "dropout": dropout_key})
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._batch)
        with master_weights(unbound, MasterWeights()):
            call_loss(self._loss_fn, unbound, batch, dropout_key)
        self._of_experts = frozenset(unbound.of_experts)
        weights = _by_path(params := unbound.variables.get(PARAMS, {}))
        self._order, self._structure = list(weights), jax.tree.structure(params)
        floats = {path: w for path, w in weights.items() if jnp.issubdtype(w.dtype, jnp.floating)}
        if len(floats) < len(weights):
            names = ["/".join(path) for path in weights.keys() - floats.keys()]
            raise ConfigurationError(
                f"parameters {names} are not floating-point: keep them in another collection."
            )
        return floats, _state(unbound.variables)

    def bind(self, weights: Given, model_state: ModelState, *, train: bool, key: Array | None) -> Bound:
        """See ``Adapter.bind``; a Linen module learns of evaluation from its own call's arguments."""
        del train
        key = jax.random.key(0) if key is None else key
        variables = self._variables(weights, model_state)
        return _Pass(BoundLinen(self._module, self._paths, variables, key), self._state)

    def whole(self, weights: Given, model_state: ModelState) -> Callable[..., PyTree[Array]]:
        """See ``Adapter.whole``: the module's ``apply`` with its variables."""
        return functools.partial(self._module.apply, self._variables(weights, model_state))

    def _variables(self, weights: Given, model_state: ModelState) -> Variables:
        rest = to_tree({path: model_state[name] for name, path in self._state.items()})
        boxed = [_InScope(**vars(x)) if isinstance(x := weights[p], Sharded) else x for p in self._order]
        return {PARAMS: jax.tree.unflatten(self._structure, boxed), **rest}

    def _trace[*Args, T: PyTree[Array]](
        self, function: Callable[[*Args], T], *args: *Args
    ) -> tuple[ClosedJaxpr, T]:
        """The jaxpr and result shapes of one device's computation; no device is used."""
        return jax.make_jaxpr(function, axis_env=self._axes, return_shape=True)(*args)

    def _find_units(self, weights: dict[Path, Array]) -> Units:
        found: Units = {}

        def intercept(
            run: Callable[..., Arrays],
            args: Sequence[object],
            kwargs: Mapping[str, object],
            context: InterceptorContext,
        ) -> Arrays:
            module = context.module
            kinds = {cls for cls in self._units if isinstance(module, cls)}
            outermost = not any(module.path[:n] in found for n in range(len(module.path) + 1))
            if kinds and outermost and any(_is_method(cls, context) for cls in type(module).__mro__):
                sliced = _by_path(module.variables.get(PARAMS, {}))
                own = {(*module.path, *path): x for path, x in sliced.items()}
                stacks = {_stack("/".join(path), weights[path], x) for path, x in own.items()}
                if len(stacks) > 1:
                    raise ConfigurationError(
                        f"unit {'/'.join(module.path)!r}: some of its parameters are stacked and some "
                        "are not; scan them all over axis 0 (variable_axes={'params': 0})."
                    )
                found[module.path] = (stacks.pop() if stacks else (), kinds)
            return run(*args, **kwargs)

        def look(weights: Given, model_state: ModelState, batch: PyTree[Array]) -> Array:
            variables = self._variables(weights, model_state)
            model = BoundLinen(self._module, frozenset(), variables, jax.random.key(0))
            with linen.intercept_methods(intercept), master_weights(model, MasterWeights()):
                return call_loss(self._loss_fn, model, batch, jax.random.key(0))[0]

        self._trace(look, weights, self.abstract_model_state, self._batch)
        return found


def _is_param(value: object) -> bool:
    """Whether a value in a tree of parameters is one, and no container."""
    return isinstance(value, Sharded | ExpertBox)


def _by_path(params: PyTree) -> dict[Path, Any]:
    """Parameters by path; one that holds a pytree is one parameter per leaf."""
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_param)
    return {tuple(jax.tree_util.keystr((key,), simple=True) for key in path): x for path, x in found}


def _state(variables: Variables) -> dict[Path, Array]:
    """What is kept between calls, besides parameters."""
    return from_tree({name: value for name, value in variables.items() if name not in {PARAMS, *_PASSING}})


def _stack(name: str, whole: Array, sliced: Array) -> Shape:
    """The ``Parameter.stack`` of a parameter ``whole``, of which a unit gets ``sliced``."""
    loops = whole.ndim - sliced.ndim
    if whole.shape[loops:] == sliced.shape:
        return whole.shape[:loops]
    raise ConfigurationError(
        f"the unit's parameter {name!r} of shape {sliced.shape} is scanned out of one of shape {whole.shape} "
        f"{_ANOTHER_AXIS}"
    )


def _parameter(path: Path, weight: Array, units: Units, of_experts: bool) -> Parameter:
    for depth in range(len(path)):
        if path[:depth] in units:
            stack, _ = units[path[:depth]]
            shape = weight.shape[len(stack) :]
            name = "/".join(path[:depth])
            return Parameter(path, shape, weight.dtype.name, stack, name, of_experts)
    return Parameter(path, weight.shape, weight.dtype.name, (), None)


def _is_method(cls: type, context: InterceptorContext) -> bool:
    """Whether the intercepted call is to the method that ``cls`` has by this name.

    Functions that Flax's transforms run on a module are called like its methods, and a base class's method
    may be called although the module's class overrides it.
    """
    called = cast("functools.partial[object]", context.orig_method).func
    method = getattr(cls, context.method_name, None)
    while method is not None and method is not called:
        method = getattr(method, "__wrapped__", None)  # Flax's wrappers, and those of its transforms
    return method is not None and context.method_name != "setup"


def _call_module(
    module: linen.Module,
    method: str,
    params: PyTree,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Arrays:
    """Run a unit's method on an unbound copy that has whole weights, and copy its state back."""
    weights, structure = jax.tree.flatten(params, is_leaf=_is_param)
    arrays, join = split_arrays((args, kwargs))
    free, variables = module.unbind()
    state = {name: value for name, value in variables.items() if name != PARAMS}
    assert module.scope is not None  # it is being called
    rngs = {name: module.make_rng(name) for name in module.scope.rngs}
    mutable = intersect_filters(module.scope.mutable, DenyList(PARAMS)) or []

    def body(whole: Sequence[Array], inputs: Arrays) -> tuple[Arrays, Mapping[str, PyTree[Array]]]:
        state, rngs, arrays = inputs
        args, kwargs = join(arrays)
        params = jax.tree.unflatten(structure, whole)

        def call(unit: linen.Module) -> Arrays:
            return getattr(unit, method)(*args, **kwargs)

        return free.apply({PARAMS: params, **state}, rngs=rngs, method=call, mutable=mutable)

    out, changed = call_unit(body, weights, (state, rngs, arrays))
    for collection, values in changed.items():
        for name, value in values.items():
            module.put_variable(collection, name, value)
    return out
