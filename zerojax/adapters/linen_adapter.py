"""Flax Linen modules: units are found and gathered by intercepting their methods.

The interceptor is active only while a bound model runs, so the user's classes are not changed.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core.scope import DenyList, in_filter, intersect_filters
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Num

from zerojax.adapters.adapter import Bound, LossFn, ModelState, Parameter, Weights, call_loss
from zerojax.errors import ConfigurationError
from zerojax.schedule.partition import split_arrays
from zerojax.schedule.sharded import Sharded
from zerojax.schedule.unit import call_unit
from zerojax.schedule.weight_sum import MasterWeights, master_weights
from zerojax.sharding.mesh import LOCAL, NODE, MeshShape
from zerojax.sharding.param_tree import Path, from_tree, to_tree

Shape = tuple[int, ...]
PARAMS = "params"
# Collections that live for one call only.
_PASSING = frozenset({"intermediates", "perturbations"})


class _LinenModel:
    """The model that a loss function gets, which is called like the module itself."""

    def __init__(self, module: linen.Module, variables: dict[str, Any]):
        self._module = module
        self.variables = variables

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
    """A Linen module with its variables, for one forward pass."""

    def __init__(
        self, module: linen.Module, units: frozenset[Path], variables: dict[str, Any], key: Array
    ) -> None:
        """Bind the module.

        Args:
            module: the model.
            units: the module paths of its units.
            variables: ``Sharded`` parameters in units, whole arrays elsewhere.
            key: for the random bits of this pass.
        """
        super().__init__(module, variables)
        self._units = units
        self._key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module; the next call sees changed state, such as batch statistics.

        Args:
            *args: the module's.
            **kwargs: the module's, and those of ``linen.Module.apply``. Without ``mutable`` all state of
                the model may change. With it, collections are mutable and returned as by ``apply``.
        """
        state = [name for name in self.variables if name != PARAMS]
        mutable = kwargs.pop("mutable", None)
        self._key, key = jax.random.split(self._key)
        rngs = kwargs.pop("rngs", {"params": key, "dropout": key})
        every = state if mutable is None else mutable
        result = self.apply(self.variables, *args, rngs=rngs, mutable=every, **kwargs)
        if every is False:
            return result
        out, changed = result
        self.variables = {**self.variables, **{name: changed[name] for name in state if name in changed}}
        return out if mutable is None else result

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
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

    def _intercept(self, run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Gather the weights of a unit, or of a part of it that is called from outside, for the call.

        A function that is not the module's own method of that name runs unchanged: its calls are such parts.
        """
        module = context.module
        within = any(module.path[:n] in self._units for n in range(len(module.path) + 1))
        if within and _is_method(type(module), context):
            weights = from_tree(module.variables.get(PARAMS, {}))
            if any(isinstance(weight, Sharded) for weight in weights.values()):
                return _call_module(module, context.method_name, weights, args, kwargs)
        return run(*args, **kwargs)


class _Pass:
    """See ``Bound``."""

    def __init__(self, model: BoundLinen) -> None:
        self.model = model

    def model_state(self) -> ModelState:
        """The state after the calls so far."""
        return _model_state(self.model.variables)

    def updated(self) -> dict[Path, Num[Array, "..."]]:
        """See ``Bound.updated``."""
        return {}


class _Unbound(_LinenModel):
    """Stands in for the model while its variables are created: each call adds those that it needs."""

    def __init__(self, module: linen.Module, rngs: dict[str, Array]) -> None:
        super().__init__(module, _NotYet())
        self._rngs = rngs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mutable = kwargs.pop("mutable", None)
        kwargs.pop("rngs", None)
        out, variables = self._module.init_with_output(self._rngs, *args, mutable=True, **kwargs)
        kept = {name: value for name, value in variables.items() if name not in _PASSING}
        self.variables = _NotYet(to_tree({**from_tree(kept), **from_tree(self.variables)}))
        if mutable is None or mutable is False:
            return out
        return out, {name: value for name, value in variables.items() if in_filter(mutable, name)}

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if variables.get(PARAMS):
            return self._module.apply(variables, *args, **kwargs)
        return self(*args, **kwargs)


class _NotYet(dict[str, Any]):
    """Variables before the calls that create them: every collection exists and is empty."""

    def __missing__(self, name: str) -> Any:
        return _Nothing(name)


class _Nothing(dict[str, Any]):
    """A collection that is empty so far; it can be passed to ``apply`` and summed, but not indexed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __missing__(self, name: str) -> Any:
        raise ConfigurationError(
            f"model.variables[{self.name!r}][{name!r}] is read before the model was called, and a Linen "
            "module has no variables before: call the model first."
        )


jax.tree_util.register_pytree_node(_Nothing, lambda empty: ((), empty.name), lambda name, _: _Nothing(name))


class LinenAdapter:
    """See ``Adapter``."""

    def __init__(
        self,
        module: linen.Module,
        units: tuple[type, ...],
        loss_fn: LossFn,
        sample_batch: Any,
        world: MeshShape,
    ):
        """Inspect the model without creating its values.

        Args:
            module: the model.
            units: the module classes that gather their own weights.
            loss_fn: calls the model.
            sample_batch: arrays of the right shapes and dtypes; their values are not used.
            world: the mesh's extents, whose axes the model may name.

        Raises:
            ConfigurationError: the loss never calls the model, or a unit class does not occur in it.
        """
        self._module = module
        self._units = units
        self._loss_fn = loss_fn
        self._batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)),
            sample_batch,
        )
        self._axes = ((NODE, world.nodes), (LOCAL, world.local))
        _, (weights, self.abstract_model_state) = self._trace(self._init, jax.random.key(0))
        if not weights:
            raise ConfigurationError("loss_fn made no parameters: it must call the model it is given.")
        found = self._find_units(weights)
        for cls in units:
            if not any(cls in kinds for _, kinds in found.values()):
                raise ConfigurationError(f"ZeroConfig.units: {cls.__name__} does not occur in the model.")
        self._paths = frozenset(found)
        self.parameters = tuple(_parameter(path, weight, found) for path, weight in weights.items())

    @property
    def updating(self) -> frozenset[str]:
        """See ``Adapter.updating``: none, since a Linen module cannot keep an updated copy."""
        return frozenset()

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
                "spread over the mesh, so make it of local ones."
            ) from error
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    def _init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], ModelState]:
        params_key, dropout_key = jax.random.split(key)
        unbound = _Unbound(self._module, {"params": params_key, "dropout": dropout_key})
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._batch)
        with master_weights(unbound, MasterWeights()):
            call_loss(self._loss_fn, unbound, batch, dropout_key)
        weights = from_tree(unbound.variables.get(PARAMS, {}))
        floats = {path: w for path, w in weights.items() if jnp.issubdtype(w.dtype, jnp.floating)}
        if len(floats) < len(weights):
            names = ["/".join(path) for path in weights.keys() - floats.keys()]
            raise ConfigurationError(
                f"parameters {names} are not floating-point: keep them in another collection."
            )
        return floats, _model_state(unbound.variables)

    def bind(self, weights: Weights, model_state: ModelState, *, train: bool, key: Array | None) -> Bound:
        """See ``Adapter.bind``; a Linen module learns of evaluation from its own call's arguments."""
        del train
        key = jax.random.key(0) if key is None else key
        return _Pass(BoundLinen(self._module, self._paths, _variables(weights, model_state), key))

    def whole(self, weights: Weights, model_state: ModelState) -> Callable[..., Any]:
        """See ``Adapter.whole``: the module's ``apply`` with its variables."""
        return functools.partial(self._module.apply, _variables(weights, model_state))

    def _trace(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """The jaxpr and result shapes of one device's computation; no device is used."""
        return jax.make_jaxpr(function, axis_env=self._axes, return_shape=True)(*args)

    def _find_units(self, weights: Any) -> dict[Path, tuple[Shape, set[type]]]:
        """The units: per module path, the ``Parameter.stack`` and the classes."""
        found: dict[Path, tuple[Shape, set[type]]] = {}

        def intercept(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            kinds = {cls for cls in self._units if isinstance(module, cls)}
            outermost = not any(module.path[:n] in found for n in range(len(module.path) + 1))
            if kinds and outermost and any(_is_method(cls, context) for cls in type(module).__mro__):
                sliced = from_tree(module.variables.get(PARAMS, {}))
                stacks = {_stack(weights[(*module.path, *path)], x) for path, x in sliced.items()}
                if len(stacks) > 1:
                    raise ConfigurationError(
                        f"unit {'/'.join(module.path)!r}: some of its parameters are stacked and some "
                        "are not; scan them all over axis 0 (variable_axes={'params': 0})."
                    )
                found[module.path] = (stacks.pop() if stacks else (), kinds)
            return run(*args, **kwargs)

        def look(weights: Any, model_state: Any, batch: Any) -> Array:
            model = BoundLinen(self._module, frozenset(), _variables(weights, model_state), jax.random.key(0))
            with linen.intercept_methods(intercept), master_weights(model, MasterWeights()):
                return call_loss(self._loss_fn, model, batch, jax.random.key(0))[0]

        self._trace(look, weights, self.abstract_model_state, self._batch)
        return found


def _model_state(variables: Mapping[str, Any]) -> ModelState:
    kept = {name: value for name, value in variables.items() if name not in {PARAMS, *_PASSING}}
    return {"/".join(path): value for path, value in from_tree(kept).items()}


def _variables(weights: Weights, model_state: ModelState) -> dict[str, Any]:
    rest = to_tree({tuple(name.split("/")): x for name, x in model_state.items()})
    return {PARAMS: to_tree(weights), **rest}


def _stack(whole: Any, sliced: Any) -> Shape:
    """The ``Parameter.stack`` of a parameter ``whole``, of which a unit gets ``sliced``."""
    if whole.shape == sliced.shape:
        return ()
    if whole.shape[1:] == sliced.shape:
        return whole.shape[:1]
    raise ConfigurationError(
        f"a unit's parameter of shape {sliced.shape} is scanned out of one of shape {whole.shape} along an "
        "axis other than 0: use variable_axes={'params': 0}."
    )


def _parameter(path: Path, weight: Any, units: Mapping[Path, tuple[Shape, set[type]]]) -> Parameter:
    for depth in range(len(path)):
        if path[:depth] in units:
            stack, _ = units[path[:depth]]
            shape = weight.shape[len(stack) :]
            return Parameter(path, shape, weight.dtype.name, stack, "/".join(path[:depth]))
    return Parameter(path, weight.shape, weight.dtype.name, (), None)


def _is_method(cls: type, context: Any) -> bool:
    """Whether the intercepted call is to the method that ``cls`` has by this name.

    Functions that Flax's transforms run on a module are called like its methods, and a base class's method
    may be called although the module's class overrides it.
    """
    method = getattr(cls, context.method_name, None)
    while method is not None and method is not context.orig_method.func:
        method = getattr(method, "__wrapped__", None)  # Flax's wrappers, and those of its transforms
    return method is not None and context.method_name != "setup"


def _call_module(module: Any, method: str, weights: Mapping[Path, Sharded], args: Any, kwargs: Any) -> Any:
    """Run a unit's method on an unbound copy that has whole weights, and copy its state back."""
    paths = tuple(weights)
    arrays, join = split_arrays((args, kwargs))
    free, variables = module.unbind()
    state = {name: value for name, value in variables.items() if name != PARAMS}
    rngs = {name: module.make_rng(name) for name in module.scope.rngs}
    mutable = intersect_filters(module.scope.mutable, DenyList(PARAMS)) or []

    def body(whole: Any, inputs: Any) -> Any:
        state, rngs, arrays = inputs
        args, kwargs = join(arrays)
        params = to_tree(dict(zip(paths, whole, strict=True)))

        def call(unit: linen.Module) -> Any:
            return getattr(unit, method)(*args, **kwargs)

        return free.apply({PARAMS: params, **state}, rngs=rngs, method=call, mutable=mutable)

    out, changed = call_unit(body, list(weights.values()), (state, rngs, arrays))
    for collection, values in changed.items():
        for name, value in values.items():
            module.put_variable(collection, name, value)
    return out
