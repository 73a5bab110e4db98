"""Flax NNX models: which parameters belong to which unit, and units that gather when called.

A unit's instances are given a subclass of their own class whose methods gather the weights, restore the
class, and run the original on a copy with whole weights. The swap is made on the abstract copy that
zerojax keeps, never on the user's class or objects, so any number of models live side by side.
"""

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import PathParts
from jax.tree_util import KeyPath
from jaxtyping import Array, Num, PyTree

from zerojax.adapters.adapter import Adapter, Bound, Given, ModelState, Parameter
from zerojax.adapters.assignments import call_with_weights, replaced_weights
from zerojax.adapters.nnx_creation import (
    create,
    forget_shapes,
    leaf_path,
    leaves_of,
    leaves_within,
    stack_of,
)
from zerojax.adapters.roles import ExpertParam, RouterState
from zerojax.adapters.stack import STATE, Stack, changed_state, modules_in
from zerojax.errors import ConfigurationError
from zerojax.schedule.partition import partition, split_arrays
from zerojax.schedule.sharded import is_sharded
from zerojax.schedule.unit import Arrays, call_unit
from zerojax.sharding.param_tree import Path, by_name
from zerojax.weights.weight import Weight


@dataclass(frozen=True)
class BoundNNX(Bound):
    """An ``nnx.Module``, the weights in it, the state from before the pass, and its random keys."""

    model: nnx.Module
    weights: Given
    before: ModelState
    keys: ModelState

    def model_state(self) -> ModelState:
        """The state after the pass, but with the random keys from before it."""
        after = {"/".join(path): leaf for path, leaf in leaves_of(nnx.state(self.model, STATE))}
        return {**self.before, **after, **self.keys}

    def secondary(self) -> dict[Path, Weight]:
        """See ``Bound.secondary``."""
        found = jax.tree.leaves(nnx.state(self.model, nnx.Param), is_leaf=lambda x: isinstance(x, Weight))
        weights = (weight for weight in found if isinstance(weight, Weight))
        return {w.layout.path: w for w in weights if w.level == "secondary" and not w.layout.frozen}

    def probes(self) -> dict[Path, Array]:
        """See ``Bound.probes``."""
        found = jax.tree.leaves(nnx.state(self.model, nnx.Param), is_leaf=is_sharded)
        return {x.leaf.path: x.probe for x in found if is_sharded(x) and x.probe is not None}

    def replaced(self) -> dict[Path, Num[Array, "..."]]:
        """See ``Bound.replaced``."""
        return replaced_weights(self.model, self.weights)


class NNXAdapter(Adapter):
    """See ``Adapter``; inspects the model without creating its values.

    Raises:
        ConfigurationError: the factory returns no ``nnx.Module``, or a unit class does not occur in it.
    """

    def __init__(self, factory: Callable[[nnx.Rngs], nnx.Module], units: tuple[type, ...]):
        self._create = functools.partial(create, factory, stacked=(Stack, *units))
        abstract = nnx.eval_shape(lambda: self._create(nnx.Rngs(0)))
        # By the module: two stacks may share a block.
        found = list({id(unit.module): unit for unit in _find_units(abstract, units)}.values())
        forget_shapes(abstract)
        self._plain = nnx.graphdef(abstract)
        for cls in units:
            if not any(isinstance(unit.module, cls) for unit in found):
                inside = any(isinstance(module, cls) for _, module in nnx.iter_modules(abstract))
                where = "occurs only inside another unit" if inside else "does not occur in the model"
                raise ConfigurationError(f"ZeroConfig.units: {cls.__name__} {where}.")
        self.parameters = _parameters(abstract, found)
        self.stacks = frozenset(unit.name for unit in found if unit.prefetching)
        self.updating = _updating(found)
        for unit in found:
            unit.module.__class__ = _gathering_class(type(unit.module))
        self._graph, state = nnx.split(abstract)
        self._held = list(nnx.to_flat_state(state))
        self._weights = frozenset(parameter.path for parameter in self.parameters)
        self._keys = ["/".join(map(str, path)) for path, held in self._held if isinstance(held, nnx.RngKey)]
        _, self.abstract_model_state = self._values(state)
        self.counts = frozenset(
            "/".join(inner)
            for path, held in self._held
            if isinstance(held, RouterState)
            for inner, value in leaves_within(path, held)
            if jnp.issubdtype(value.dtype, jnp.integer)
        )
        by_name([path for path, _ in leaves_of(state) if path not in self._weights])

    def init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], ModelState]:
        """See ``Adapter.init``."""
        weights, model_state = self._values(nnx.state(self._create(nnx.Rngs(key))))
        return {path: jnp.asarray(x) for path, x in weights.items()}, model_state

    def bind(self, weights: Given, model_state: ModelState, *, train: bool, key: Array | None) -> Bound:
        """See ``Adapter.bind``."""
        keys = {name: model_state[name] for name in self._keys}
        own = keys if key is None else {name: _own_key(value, key) for name, value in keys.items()}
        model = self._merge(self._graph, weights, {**model_state, **own})
        if not train:
            model.eval()
        return BoundNNX(model, weights, model_state, keys)

    def whole(self, weights: Given, model_state: ModelState) -> nnx.Module:
        """See ``Adapter.whole``."""
        model = self._merge(self._plain, weights, model_state)
        model.eval()
        return model

    def _values(self, state: nnx.State) -> tuple[dict[Path, Array], ModelState]:
        """The weights in a state of the model, by path, and its other values by name."""
        values = dict(leaves_of(state))
        weights = {path: values.pop(path) for path in list(values) if path in self._weights}
        return weights, {"/".join(path): value for path, value in values.items()}

    def _merge(self, graph: nnx.GraphDef[nnx.Module], weights: Given, model_state: ModelState) -> nnx.Module:
        def filled(path: PathParts, held: object) -> PyTree:
            def value(inner: KeyPath, _: object) -> PyTree[Array]:
                name = leaf_path(path, inner)
                return weights[name] if name in weights else model_state["/".join(name)]

            variable = isinstance(held, nnx.Variable)
            values = jax.tree_util.tree_map_with_path(value, held.get_raw_value() if variable else held)
            return held.replace(values) if variable else values

        return nnx.merge(
            graph, nnx.from_flat_state([(path, filled(path, held)) for path, held in self._held])
        )


def _own_key(keys: Array, key: Array) -> Array:
    """Random keys for this device and pass: each of ``keys`` with the bits of ``key`` folded in."""
    bits = jax.random.bits(key, (), jnp.uint32)
    fold = functools.partial(jax.random.fold_in, data=bits)
    return jax.vmap(fold)(keys.reshape(-1)).reshape(keys.shape)


def _is_weight(path: Path, value: Array) -> bool:
    """Whether a value of a parameter is floating-point, as all are that have gradients.

    Raises:
        ConfigurationError: it is complex.
    """
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise ConfigurationError(
            f"the parameter {'/'.join(path)!r} is complex, which no optimizer here takes: split it into "
            "its real and its imaginary part."
        )
    return jnp.issubdtype(value.dtype, jnp.floating)


class _Unit(NamedTuple):
    """A unit of a model; ``stack`` as ``Parameter.stack``, ``prefetching`` if it is in a ``Stack``."""

    name: str
    module: nnx.Module
    stack: tuple[int, ...]
    prefetching: bool


def _find_units(module: nnx.Module, units: tuple[type, ...]) -> Iterator[_Unit]:
    """The outermost instances of units."""
    inside: set[int] = set()  # units found so far
    # By depth, so that a unit comes before those within it.
    for path, child in sorted(nnx.iter_modules(module), key=lambda item: len(item[0])):
        if id(child) in inside:
            continue
        if not isinstance(child, (Stack, *units)):
            continue
        stack = stack_of("/".join(map(str, path)), child)
        prefetching = isinstance(child, Stack)
        if isinstance(child, Stack):
            if stack:
                raise ConfigurationError(
                    f"the Stack {'/'.join(map(str, path))!r} was created by nnx.vmap, and it is stacked "
                    "already: create several, one after another, in an nnx.List."
                )
            stack = (child.layers,)
            path = (*path, "block")
            child = child.block
        inside.update(id(inner) for _, inner in nnx.iter_modules(child))
        yield _Unit("/".join(map(str, path)), child, stack, prefetching)


def _parameters(model: nnx.Module, units: Sequence[_Unit]) -> tuple[Parameter, ...]:
    """Every parameter once, with its unit; None if it is also read outside units."""
    owner: dict[int, tuple[str, tuple[int, ...]]] = {}
    for unit in units:
        for _, variable in nnx.iter_graph(unit.module):
            if isinstance(variable, nnx.Param):
                owner.setdefault(id(variable), (unit.name, unit.stack))
    outside = _read_outside(model, {id(unit.module) for unit in units})
    parameters = {}
    seen: set[int] = set()
    for path, variable in nnx.iter_graph(model):
        if id(variable) in seen or not isinstance(variable, nnx.Param):
            continue
        seen.add(id(variable))
        name, stack = owner.get(id(variable), (None, ()))
        if id(variable) in outside:
            name, stack = None, ()
        for inner, value in leaves_within(path, variable):
            if _is_weight(inner, value):
                shape = value.shape[len(stack) :]
                of_experts = isinstance(variable, ExpertParam) and name is not None
                parameters[inner] = Parameter(inner, shape, value.dtype.name, stack, name, of_experts)
    order = leaves_of(nnx.state(model, nnx.Param))
    return tuple(parameters[path] for path, _ in order if path in parameters)


def _updating(units: Sequence[_Unit]) -> frozenset[str]:
    """The names of the stacks that share no parameter with another unit, which would not see it updated."""
    parameters = {
        unit.name: {id(leaf) for _, leaf in nnx.iter_graph(unit.module) if isinstance(leaf, nnx.Param)}
        for unit in units
    }
    times = Counter(each for every in parameters.values() for each in every)
    return frozenset(
        unit.name
        for unit in units
        if unit.prefetching and all(times[each] == 1 for each in parameters[unit.name])
    )


def _read_outside(model: nnx.Module, units: set[int]) -> set[int]:
    """The ids of the variables that can be reached without going through a unit."""
    reached: set[int] = set()
    seen: set[int] = set()
    pending: list[object] = [model]
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
    names: dict[str, object] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nnx.Module)]):
        for name, member in vars(base).items():
            # What overrides Flax's own, as ToNNX's ``_setattr`` does, is no way to compute with weights.
            own = name == "__call__" or not (name.startswith("__") or hasattr(nnx.Module, name))
            if inspect.isfunction(member) and own:
                names[name] = _gathering(cls, name)
    names["__module__"] = cls.__module__
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(names))


def _gathering(cls: type[nnx.Module], name: str) -> Callable[..., Arrays]:
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: nnx.Module, *args: object, **kwargs: object) -> Arrays:
        # The original's calls of its own methods find them as they are.
        gathering = type(self)
        self.__class__ = cls
        try:
            return _call_module(self, original, args, kwargs)
        finally:
            self.__class__ = gathering

    return method


def _call_module(
    module: nnx.Module,
    method: Callable[..., Arrays],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> Arrays:
    """Run a unit's method on a copy that has whole weights, and copy its state back."""
    graph, params, state = nnx.split(module, nnx.Param, ...)
    weights, others, combine = partition(params, is_sharded, is_leaf=is_sharded)
    if not weights:
        return method(module, *args, **kwargs)
    if any(jnp.ndim(weight.seed) for weight in weights):
        raise ConfigurationError(
            f"the unit {type(module).__name__} was created by nnx.vmap, as a stack of "
            f"{weights[0].leaf.layers}, and is called as one: run it by nnx.scan or nnx.vmap, or leave its "
            "class out of ZeroConfig.units."
        )
    arrays, join = split_arrays((args, kwargs))

    def body(whole: Sequence[Array], inputs: Arrays) -> tuple[Arrays, list[nnx.State]]:
        state, others, arrays = inputs

        def use(unit: nnx.Module) -> tuple[Arrays, list[nnx.State]]:
            args, kwargs = join(arrays)
            out = method(unit, *args, **kwargs)
            return out, [changed_state(one) for one in (unit, *modules_in((args, kwargs)))]

        return call_with_weights(graph, combine(whole, others), state, use)

    out, states = call_unit(body, weights, (state, others, arrays))
    for one, changed in zip((module, *modules_in((args, kwargs))), states, strict=True):
        nnx.update(one, changed)
    return out
