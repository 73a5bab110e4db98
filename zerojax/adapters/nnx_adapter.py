"""Flax NNX models: their parameters, the units that these belong to, and the model with given weights."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import PathParts
from jaxtyping import Array, Num

from zerojax.adapters.adapter import Adapter, Bound, Given, ModelState, Parameter
from zerojax.adapters.nnx_creation import create, forget_shapes, stack_of
from zerojax.adapters.nnx_units import (
    STATE,
    Stack,
    gathering_class,
    leaf_path,
    leaves_of,
    leaves_within,
    replaced_weights,
)
from zerojax.adapters.roles import ExpertParam, RouterState
from zerojax.errors import ConfigurationError
from zerojax.schedule.unit import Sharded, is_sharded
from zerojax.sharding.param_tree import Path


@dataclass(frozen=True)
class BoundNNX(Bound):
    """An ``nnx.Module``, the weights in it, the state from before the pass, and its random keys."""

    model: nnx.Module
    weights: Given
    before: ModelState
    keys: ModelState

    def model_state(self) -> ModelState:
        """The state after the pass, but with the random keys from before it.

        Refuse variables that did not exist when the model was created.
        """
        after = {"/".join(path): leaf for path, leaf in leaves_of(nnx.state(self.model, STATE))}
        if new := after.keys() - self.before.keys():
            raise ConfigurationError(
                f"the model made the variable {min(new)!r} in a step, but not when it was created. Make it "
                "in __init__. For values of one call, sow an nnx.Intermediate, or let the loss nnx.pop them."
            )
        return {**self.before, **after, **self.keys}

    def sharded(self) -> list[Sharded]:
        """See ``Bound.sharded``."""
        leaves = jax.tree.leaves(nnx.state(self.model, nnx.Param), is_leaf=is_sharded)
        return [part for weight in filter(is_sharded, leaves) for part in (weight, *weight.adapter)]

    def replaced(self) -> dict[Path, Num[Array, "..."]]:
        """See ``Bound.replaced``."""
        return replaced_weights(self.model, self.weights)


class NNXAdapter(Adapter):
    """See ``Adapter``; inspects the model without creating its values."""

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
        modules = nnx.iter_modules(abstract)
        self.orders = {"/".join(map(str, path)): x.order for path, x in modules if isinstance(x, Stack)}
        users = _users(found)
        self.parameters = _parameters(abstract, found, users)
        self.ends = frozenset(unit.name for unit in found if unit.ends)
        # A unit that shares a parameter with the stack would not see it updated.
        sharing = {unit.within for every in users.values() if every[1:] for unit in every}
        self.updating = frozenset(unit.name for unit in found if unit.within not in {None, *sharing})
        for unit in found:
            unit.module.__class__ = gathering_class(type(unit.module))
        self._graph, state = nnx.split(abstract)
        self._held = list(nnx.to_flat_state(state))
        self._weights = frozenset(parameter.path for parameter in self.parameters)
        self._keys = ["/".join(map(str, path)) for path, held in self._held if isinstance(held, nnx.RngKey)]
        _, others = self._values(state)
        routers = [leaves_within(*item) for item in self._held if isinstance(item[1], RouterState)]
        self._describe_state(others, {path for leaves in routers for path, _ in leaves})

    def init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], ModelState]:
        """See ``Adapter.init``."""
        weights, state = self._values(nnx.state(self._create(nnx.Rngs(key))))
        return {path: jnp.asarray(x) for path, x in weights.items()}, self._named(state)

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

    def _values(self, state: nnx.State) -> tuple[dict[Path, Array], dict[Path, Array]]:
        """The weights in a state of the model, and its other values, by path."""
        values = dict(leaves_of(state))
        weights = {path: values.pop(path) for path in list(values) if path in self._weights}
        return weights, values

    def _merge(self, graph: nnx.GraphDef[nnx.Module], weights: Given, model_state: ModelState) -> nnx.Module:
        """The model with a value for each leaf of its state."""
        filled: list[tuple[PathParts, object]] = []
        for path, held in self._held:
            variable = isinstance(held, nnx.Variable)
            leaves, structure = jax.tree.flatten_with_path(held.get_raw_value() if variable else held)
            names = [leaf_path(path, inner) for inner, _ in leaves]
            values = [weights[name] if name in weights else model_state["/".join(name)] for name in names]
            value = jax.tree.unflatten(structure, values)
            filled.append((path, held.replace(value) if variable else value))
        return nnx.merge(graph, nnx.from_flat_state(filled))


def _own_key(keys: Array, key: Array) -> Array:
    """Random keys for this device and pass: each of ``keys`` with the bits of ``key`` folded in."""
    bits = jax.random.bits(key, (), jnp.uint32)
    fold = functools.partial(jax.random.fold_in, data=bits)
    return jax.vmap(fold)(keys.reshape(-1)).reshape(keys.shape)


class _Unit(NamedTuple):
    """A unit of a model.

    ``stack`` is as in ``Parameter``. ``within`` is the name of its ``Stack``. ``ends`` says whether it has
    the last layer of that stack.
    """

    name: str
    module: nnx.Module
    stack: tuple[int, ...]
    within: str | None = None
    ends: bool = False


_Users = dict[int, list[_Unit]]
"""By a parameter's id, the units that it is in."""


def _find_units(module: nnx.Module, units: tuple[type, ...]) -> Iterator[_Unit]:
    """The outermost instances of units."""
    inside: set[int] = set()  # the modules of the units found so far
    # By depth, so that a unit comes before those within it.
    for path, child in sorted(nnx.iter_modules(module), key=lambda item: len(item[0])):
        if id(child) in inside or not isinstance(child, (Stack, *units)):
            continue
        name = "/".join(map(str, path))
        stack = stack_of(name, child)
        inside.update(id(inner) for _, inner in nnx.iter_modules(child))
        if not isinstance(child, Stack):
            yield _Unit(name, child, stack)
            continue
        if stack:
            raise ConfigurationError(
                f"the Stack {name!r} was created by nnx.vmap, and it is stacked already: create several, one "
                "after another, in an nnx.List."
            )
        last = {child.order[part.stop - 1] for part in child.parts}
        for kind, (inner, block) in enumerate(child.stacked.items()):
            own = "/".join(map(str, (*path, *inner)))
            yield _Unit(own, block, (child.order.count(kind),), name, ends=kind in last)


def _users(units: Sequence[_Unit]) -> _Users:
    users: _Users = {}
    for unit in units:
        for _, variable in nnx.iter_graph(unit.module):
            if isinstance(variable, nnx.Param):
                users.setdefault(id(variable), []).append(unit)
    return users


def _parameters(model: nnx.Module, units: Sequence[_Unit], users: _Users) -> tuple[Parameter, ...]:
    """Every parameter once, with its unit; None if it is also read outside units."""
    outside = _read_outside(model, {id(unit.module) for unit in units})
    parameters = {}
    for path, variable in nnx.iter_graph(model):
        if not isinstance(variable, nnx.Param):
            continue
        first = None if id(variable) in outside else users[id(variable)][0]
        unit = None if first is None else (first.name, first.stack)
        for inner, value in leaves_within(path, variable):
            if _is_weight(inner, value):
                parameters[inner] = Parameter.of(inner, value, unit, isinstance(variable, ExpertParam))
    order = leaves_of(nnx.state(model, nnx.Param))
    return tuple(parameters[path] for path, _ in order if path in parameters)


def _is_weight(path: Path, value: Array) -> bool:
    """Whether a parameter's value is floating-point, so that it has a gradient."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise ConfigurationError(
            f"the parameter {'/'.join(path)!r} is complex, which no optimizer here takes: split it into "
            "its real and its imaginary part."
        )
    return jnp.issubdtype(value.dtype, jnp.floating)


def _read_outside(model: nnx.Module, units: set[int]) -> set[int]:
    """The ids of the variables that can be reached without going through a unit."""
    reached: set[int] = set()
    seen = set(units)
    pending: list[object] = [model]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, nnx.Variable):
            reached.add(id(node))
        elif nnx.graphlib.is_node(node) and (kind := nnx.graphlib.get_node_impl(node)) is not None:
            pending.extend(kind.node_dict(node).values())
    return reached
