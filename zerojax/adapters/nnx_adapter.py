"""Flax NNX models: which parameters belong to which unit, and units that gather when called.

A unit's instances are given a subclass of their own class whose methods gather the weights, restore the
class, and run the original on a copy with whole weights. The swap is made on the abstract copy that
zerojax keeps, never on the user's class or objects, so any number of models live side by side.
"""

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Num

from zerojax.adapters.adapter import Bound, ModelState, Parameter, Weights
from zerojax.adapters.stack import STATE, Stack, changed_state, modules_in
from zerojax.errors import ConfigurationError
from zerojax.schedule.partition import split_arrays
from zerojax.schedule.sharded import Sharded
from zerojax.schedule.unit import call_unit
from zerojax.sharding.param_tree import Path


@dataclass(frozen=True)
class BoundNNX:
    """An ``nnx.Module`` with its weights in place, the state from before the pass, and its random keys."""

    model: nnx.Module
    before: ModelState
    keys: ModelState

    def model_state(self) -> ModelState:
        """The state after the pass, but with the random keys from before it."""
        return {**self.before, **_named(nnx.state(self.model, STATE)), **self.keys}

    def updated(self) -> dict[Path, Num[Array, "..."]]:
        """See ``Bound.updated``."""
        copies: dict[Path, Num[Array, ...]] = {}
        for _, variable in nnx.to_flat_state(nnx.state(self.model, _is_sharded)):
            copies |= variable.get_raw_value().secondary_copies()
        return copies


class NNXAdapter:
    """See ``Adapter``."""

    def __init__(self, factory: Callable[[nnx.Rngs], nnx.Module], units: tuple[type, ...]):
        """Inspect the model without creating its values.

        Args:
            factory: creates the model from its rngs.
            units: the module classes that gather their own weights.

        Raises:
            ConfigurationError: the factory returns no ``nnx.Module``, or a unit class does not occur in it.
        """
        self._factory = factory
        abstract = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))
        if not isinstance(abstract, nnx.Module):
            raise ConfigurationError(
                f"model(rngs) returned a {type(abstract).__name__}, not an nnx.Module. Pass a callable "
                "that takes nnx.Rngs and returns the model, or a Linen module with sample_batch=."
            )
        self._plain = nnx.graphdef(abstract)
        # By the module: two stacks may share a block.
        found = list({id(unit.module): unit for unit in _find_units(abstract, units)}.values())
        for cls in units:
            if not any(isinstance(unit.module, cls) for unit in found):
                inside = any(isinstance(module, cls) for _, module in nnx.iter_modules(abstract))
                where = "occurs only inside another unit" if inside else "does not occur in the model"
                raise ConfigurationError(f"ZeroConfig.units: {cls.__name__} {where}.")
        self.parameters = _parameters(abstract, found)
        self.updating = _updating(found)
        for unit in found:
            unit.module.__class__ = _gathering_class(type(unit.module))
        self._graph, params, model_state = nnx.split(abstract, _is_weight, ...)
        self._params = {_key(path): (path, variable) for path, variable in nnx.to_flat_state(params)}
        self._model_state = {
            "/".join(_key(path)): (path, variable) for path, variable in nnx.to_flat_state(model_state)
        }
        self.abstract_model_state: ModelState = _named(model_state)

    def init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], ModelState]:
        """See ``Adapter.init``."""
        _, params, model_state = nnx.split(self._factory(nnx.Rngs(key)), _is_weight, ...)
        weights = {_key(path): variable.get_raw_value() for path, variable in nnx.to_flat_state(params)}
        return weights, _named(model_state)

    def bind(self, weights: Weights, model_state: ModelState, *, train: bool, key: Array | None) -> Bound:
        """See ``Adapter.bind``."""
        keys = {
            name: model_state[name]
            for name, (_, var) in self._model_state.items()
            if isinstance(var, nnx.RngKey)
        }
        own = keys if key is None else {name: _own_key(value, key) for name, value in keys.items()}
        model = self._merge(self._graph, weights, {**model_state, **own})
        if not train:
            model.eval()
        return BoundNNX(model, model_state, keys)

    def whole(self, weights: Weights, model_state: ModelState) -> nnx.Module:
        """See ``Adapter.whole``."""
        model = self._merge(self._plain, weights, model_state)
        model.eval()
        return model

    def _merge(self, graph: Any, weights: Weights, model_state: ModelState) -> nnx.Module:
        params = [(path, var.replace(weights[name])) for name, (path, var) in self._params.items()]
        rest = [
            (path, old.replace(model_state[name]) if isinstance(old, nnx.Variable) else model_state[name])
            for name, (path, old) in self._model_state.items()
        ]
        return nnx.merge(graph, nnx.from_flat_state(params), nnx.from_flat_state(rest))


def _key(path: tuple[Any, ...]) -> Path:
    return tuple(str(part) for part in path)


def _named(state: nnx.State) -> ModelState:
    """The arrays of a state: of its variables, as they are without their hooks, and of plain attributes."""
    return {
        "/".join(_key(path)): leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }


def _own_key(keys: Array, key: Array) -> Array:
    """Random keys for this device and pass: each of ``keys`` with the bits of ``key`` folded in."""
    bits = jax.random.bits(key, (), jnp.uint32)
    fold = functools.partial(jax.random.fold_in, data=bits)
    return jax.vmap(fold)(keys.reshape(-1)).reshape(keys.shape)


def _is_weight(path: Any, variable: Any) -> bool:
    """A filter for floating-point parameters, the only ones with gradients.

    Raises:
        ConfigurationError: a parameter is complex.
    """
    if not isinstance(variable, nnx.Param):
        return False
    dtype = getattr(variable.get_raw_value(), "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
        raise ConfigurationError(
            f"the parameter {'/'.join(_key(path))!r} is complex, which no optimizer here takes: make it two, "
            "of its real and of its imaginary part."
        )
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _is_sharded(path: Any, variable: Any) -> bool:
    del path
    return isinstance(variable, nnx.Variable) and isinstance(variable.get_raw_value(), Sharded)


class _Unit(NamedTuple):
    """A unit of a model; ``stack`` as ``Parameter.stack``."""

    name: str
    module: nnx.Module
    stack: tuple[int, ...]


def _find_units(module: nnx.Module, units: tuple[type, ...]) -> Iterator[_Unit]:
    """The outermost instances of units."""
    taken: set[int] = set()
    for path, child in sorted(nnx.iter_modules(module), key=lambda item: len(item[0])):
        if id(child) in taken:
            continue
        stack: tuple[int, ...] = ()
        if isinstance(child, Stack):
            stack, path, child = (child.layers,), (*path, "block"), child.block
        elif not isinstance(child, units):
            continue
        taken.update(id(inner) for _, inner in nnx.iter_modules(child))
        yield _Unit("/".join(_key(path)), child, stack)


def _parameters(model: nnx.Module, units: Sequence[_Unit]) -> tuple[Parameter, ...]:
    """Every parameter once, with its unit; None if it is also read outside units."""
    owner: dict[int, tuple[str, tuple[int, ...]]] = {}
    for unit in units:
        for _, variable in nnx.iter_graph(unit.module):
            if isinstance(variable, nnx.Param):
                owner.setdefault(id(variable), (unit.name, unit.stack))
    outside = _read_outside(model, {id(unit.module) for unit in units})
    parameters = []
    seen: set[int] = set()
    for path, variable in nnx.iter_graph(model):
        if id(variable) in seen or not _is_weight(path, variable):
            continue
        seen.add(id(variable))
        name, stack = owner.get(id(variable), (None, ()))
        if id(variable) in outside:
            name, stack = None, ()
        value = variable.get_raw_value()
        shape = value.shape[len(stack) :]
        parameters.append(Parameter(_key(path), shape, value.dtype.name, stack, name))
    order = {_key(path): i for i, (path, _) in enumerate(nnx.to_flat_state(nnx.state(model, _is_weight)))}
    return tuple(sorted(parameters, key=lambda parameter: order[parameter.path]))


def _updating(units: Sequence[_Unit]) -> frozenset[str]:
    """The names of the stacks that share no parameter with another unit, which would not see it updated."""
    parameters = {
        unit.name: {id(leaf) for _, leaf in nnx.iter_graph(unit.module) if isinstance(leaf, nnx.Param)}
        for unit in units
    }
    times = Counter(each for every in parameters.values() for each in every)
    return frozenset(
        unit.name for unit in units if unit.stack and all(times[each] == 1 for each in parameters[unit.name])
    )


def _read_outside(model: nnx.Module, units: set[int]) -> set[int]:
    """The ids of the variables that can be reached without going through a unit."""
    reached: set[int] = set()
    seen: set[int] = set()
    pending: list[Any] = [model]
    while pending:
        node = pending.pop()
        if id(node) in seen or id(node) in units:
            continue
        seen.add(id(node))
        if isinstance(node, nnx.Variable):
            reached.add(id(node))
        elif nnx.graphlib.is_node(node) and (kind := nnx.graphlib.get_node_impl(node)) is not None:
            pending.extend(kind.node_dict(node).values())
    return reached


@functools.cache
def _gathering_class(cls: type[nnx.Module]) -> type[nnx.Module]:
    """A subclass whose methods gather the weights when they are called from outside."""
    names: dict[str, Any] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nnx.Module)]):
        for name, member in vars(base).items():
            if inspect.isfunction(member) and (name == "__call__" or not name.startswith("_")):
                names[name] = _gathering(cls, name)
    names["__module__"] = cls.__module__
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(names))


def _gathering(cls: type[nnx.Module], name: str) -> Callable[..., Any]:
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        gathering = type(self)
        self.__class__ = cls
        try:
            return _call_module(self, original, args, kwargs)
        finally:
            self.__class__ = gathering

    return method


def _call_module(module: nnx.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a unit's method on a copy that has whole weights, and copy its state back."""
    graph, params, state = nnx.split(module, _is_sharded, ...)
    flat = list(nnx.to_flat_state(params))
    if not flat:
        return method(module, *args, **kwargs)
    weights = [variable.get_raw_value() for _, variable in flat]
    empty = [(path, variable.replace(None)) for path, variable in flat]
    arrays, join = split_arrays((args, kwargs))

    def body(whole: Any, inputs: Any) -> Any:
        state, arrays = inputs
        args, kwargs = join(arrays)
        values = [(path, variable.replace(w)) for (path, variable), w in zip(empty, whole, strict=True)]
        copy = nnx.merge(graph, nnx.from_flat_state(values), state)
        out = method(copy, *args, **kwargs)
        return out, [changed_state(one) for one in (copy, *modules_in((args, kwargs)))]

    out, states = call_unit(body, weights, (state, arrays))
    for one, changed in zip((module, *modules_in((args, kwargs))), states, strict=True):
        nnx.update(one, changed)
    return out
