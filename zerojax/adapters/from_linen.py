"""Flax Linen modules: units are found and gathered by intercepting their ``__call__``.

The interceptor is in force only while a bound model runs, so nothing is left behind in the user's classes.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, traverse_util
from jaxtyping import Array, Num

from zerojax.adapters.base import Bound, LossFn, Other, Parameter, Weights, call_loss
from zerojax.errors import ZeroError
from zerojax.paths import Path
from zerojax.traced import split_traced
from zerojax.unit import Sharded, call_unit
from zerojax.weight_sum import MasterWeights, master_weights

PARAMS = "params"
# What nothing tells apart from a parameter: the state that only lives within one pass.
_PASSING = frozenset({"intermediates", "perturbations"})


@dataclass
class BoundLinen:
    """A Linen module with its variables: called like the module itself."""

    module: linen.Module
    units: tuple[type, ...]
    variables: dict[str, Any]
    key: Array

    @property
    def model(self) -> "BoundLinen":
        """Itself: the loss function calls it."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module; a changed batch statistic is seen by the next call."""
        mutable = [name for name in self.variables if name != PARAMS]
        self.key, key = jax.random.split(self.key)
        rngs = kwargs.pop("rngs", {"params": key, "dropout": key})
        with linen.intercept_methods(self._intercept):
            out, changed = self.module.apply(self.variables, *args, rngs=rngs, mutable=mutable, **kwargs)
        self.variables = {**self.variables, **changed}
        return out

    def other(self) -> Other:
        """The state as the calls so far left it."""
        return _other(self.variables)

    def updated(self) -> dict[Path, Num[Array, "..."]]:
        """See ``Bound.updated``."""
        return {}

    def _intercept(self, run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name == "__call__" and isinstance(module, self.units):
            weights = _flat(module.variables.get(PARAMS, {}))
            if any(isinstance(weight, Sharded) for weight in weights.values()):
                return _call_module(module, weights, args, kwargs)
        return run(*args, **kwargs)


@dataclass
class _Unbound:
    """Stands in for the model while its variables are first made, or its units looked for."""

    module: linen.Module
    rngs: dict[str, Array]
    variables: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("rngs", None)
        if self.variables:
            mutable = [name for name in self.variables if name != PARAMS]
            out, _ = self.module.apply(self.variables, *args, rngs=self.rngs, mutable=mutable, **kwargs)
            return out
        out, variables = self.module.init_with_output(self.rngs, *args, **kwargs)
        self.variables = {name: value for name, value in variables.items() if name not in _PASSING}
        return out


class LinenAdapter:
    """See ``Adapter``."""

    def __init__(self, module: linen.Module, units: tuple[type, ...], loss_fn: LossFn, sample_batch: Any):
        """Look at the model without making it.

        Args:
            module: the model.
            units: the module classes that gather their own weights.
            loss_fn: how the model is called.
            sample_batch: arrays of the right shapes and dtypes; their values are not used.

        Raises:
            ZeroError: the loss never calls the model, or a unit class does not occur in it.
        """
        self._module = module
        self._units = units
        self._loss_fn = loss_fn
        self._batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)),
            sample_batch,
        )
        weights, self.abstract_other = jax.eval_shape(self.init, jax.random.key(0))
        if not weights:
            raise ZeroError("loss_fn made no parameters: it must call the model it is given.")
        layers_of = self._find_units(weights)
        for cls in units:
            if not any(cls in kinds for _, kinds in layers_of.values()):
                raise ZeroError(f"ZeroConfig.units: {cls.__name__} does not occur in the model.")
        self.parameters = tuple(_parameter(path, weight, layers_of) for path, weight in weights.items())

    @property
    def updating(self) -> frozenset[str]:
        """See ``Adapter.updating``: none, for a module has nowhere to keep what it made of its weights."""
        return frozenset()

    def init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], Other]:
        """See ``Adapter.init``."""
        params_key, dropout_key = jax.random.split(key)
        unbound = _Unbound(self._module, {"params": params_key, "dropout": dropout_key})
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._batch)
        with master_weights(unbound, MasterWeights()):
            call_loss(self._loss_fn, unbound, batch, dropout_key)
        weights = _flat(unbound.variables.get(PARAMS, {}))
        floats = {path: w for path, w in weights.items() if jnp.issubdtype(w.dtype, jnp.floating)}
        if len(floats) < len(weights):
            names = ["/".join(path) for path in weights.keys() - floats.keys()]
            raise ZeroError(f"parameters {names} are not floating-point: keep them in another collection.")
        return floats, _other(unbound.variables)

    def bind(self, weights: Weights, other: Other, *, train: bool, key: Array | None) -> Bound:
        """See ``Adapter.bind``; a Linen module is told of evaluation by its own call's arguments."""
        del train
        variables = _variables(weights, other)
        return BoundLinen(self._module, self._units, variables, jax.random.key(0) if key is None else key)

    def whole(self, weights: Weights, other: Other) -> Callable[..., Any]:
        """See ``Adapter.whole``: the module's ``apply`` with its variables."""
        return functools.partial(self._module.apply, _variables(weights, other))

    def _find_units(self, weights: Any) -> dict[Path, tuple[int | None, set[type]]]:
        """Where units occur: per module path, the layers if stacked, and the classes."""
        found: dict[Path, tuple[int | None, set[type]]] = {}

        def intercept(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            kinds = {cls for cls in self._units if isinstance(module, cls)}
            outermost = not any(module.path[:n] in found for n in range(len(module.path)))
            if context.method_name == "__call__" and kinds and outermost:
                sliced = _flat(module.variables.get(PARAMS, {}))
                layers = {_layers(weights[(*module.path, *path)], x) for path, x in sliced.items()}
                if len(layers) > 1:
                    raise ZeroError(
                        f"unit {'/'.join(module.path)!r}: some of its parameters are stacked and some "
                        "are not; scan them all over axis 0 (variable_axes={'params': 0})."
                    )
                found[module.path] = (layers.pop() if layers else None, kinds)
            return run(*args, **kwargs)

        def look(weights: Any, other: Any, batch: Any) -> Array:
            unbound = _Unbound(self._module, {"params": jax.random.key(0), "dropout": jax.random.key(0)})
            unbound.variables = _variables(weights, other)
            with linen.intercept_methods(intercept), master_weights(unbound, MasterWeights()):
                return call_loss(self._loss_fn, unbound, batch, jax.random.key(0))[0]

        jax.eval_shape(look, weights, self.abstract_other, self._batch)
        return found


def _flat(tree: Mapping[str, Any]) -> dict[Path, Any]:
    return dict(traverse_util.flatten_dict(tree))


def _other(variables: Mapping[str, Any]) -> Other:
    kept = {name: value for name, value in variables.items() if name not in {PARAMS, *_PASSING}}
    return {"/".join(path): value for path, value in _flat(kept).items()}


def _variables(weights: Weights, other: Other) -> dict[str, Any]:
    rest = traverse_util.unflatten_dict({tuple(name.split("/")): x for name, x in other.items()})
    return {PARAMS: traverse_util.unflatten_dict(dict(weights)), **rest}


def _layers(whole: Any, sliced: Any) -> int | None:
    """How many layers ``whole`` stacks along axis 0, if ``sliced`` is one of them; None if it is it."""
    if whole.shape == sliced.shape:
        return None
    if whole.shape[1:] == sliced.shape:
        return whole.shape[0]
    raise ZeroError(
        f"a unit's parameter of shape {sliced.shape} is scanned out of one of shape {whole.shape} along an "
        "axis other than 0: use variable_axes={'params': 0}."
    )


def _parameter(path: Path, weight: Any, units: Mapping[Path, tuple[int | None, set[type]]]) -> Parameter:
    for depth in range(len(path)):
        if path[:depth] in units:
            layers, _ = units[path[:depth]]
            shape = weight.shape if layers is None else weight.shape[1:]
            return Parameter(path, tuple(shape), weight.dtype.name, layers, "/".join(path[:depth]))
    return Parameter(path, tuple(weight.shape), weight.dtype.name, None, None)


def _call_module(module: Any, weights: Mapping[Path, Sharded], args: Any, kwargs: Any) -> Any:
    """Run a unit's ``__call__`` on a free copy of it that has whole weights, and take its state back."""
    paths = tuple(weights)
    arrays, join = split_traced((args, kwargs))
    free, variables = module.unbind()
    state = {name: value for name, value in variables.items() if name != PARAMS}
    rngs = {name: module.make_rng(name) for name in module.scope.rngs}

    def body(whole: Any, inputs: Any) -> Any:
        state, rngs, arrays = inputs
        args, kwargs = join(arrays)
        params = traverse_util.unflatten_dict(dict(zip(paths, whole, strict=True)))
        mutable = [name for name in state if name not in _PASSING]
        return free.apply({PARAMS: params, **state}, *args, rngs=rngs, mutable=mutable, **kwargs)

    out, changed = call_unit(body, list(weights.values()), (state, rngs, arrays))
    for collection, values in changed.items():
        for name, value in values.items():
            module.put_variable(collection, name, value)
    return out
