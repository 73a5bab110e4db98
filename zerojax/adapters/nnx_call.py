"""Calls of NNX modules as pure functions of their weights and state, and units that gather when called.

A unit's instances get a subclass of their own class. Its methods gather the weights, restore the class, and
run the original method on a copy that has whole weights. This class is set on the abstract copy that zerojax
keeps, never on the user's class or objects, so any number of models live side by side.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import PathParts
from jax.tree_util import KeyPath
from jaxtyping import Array, Num, PyTree

from zerojax.dataflow import changed
from zerojax.errors import ConfigurationError
from zerojax.schedule.unit import Arrays, call_unit, is_sharded
from zerojax.schedule.user_code import assigned
from zerojax.sharding.param_tree import Path

STATE = nnx.Not(nnx.Any(nnx.Param, nnx.Intermediate))
"""Filter for the state that a module keeps between calls, besides its parameters."""
_NORMALISING = (nnx.SpectralNorm, nnx.WeightNorm)
"""Layers that assign to another layer's weights for the time of a call."""


@functools.cache
def gathering_class(cls: type[nnx.Module]) -> type[nnx.Module]:
    """A subclass whose methods gather the weights when they are called from outside."""
    names: dict[str, object] = {"__module__": cls.__module__}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nnx.Module)]):
        for name, member in vars(base).items():
            # A method that overrides Flax's, such as ToNNX's ``_setattr``, does not compute with weights.
            own = name == "__call__" or not (name.startswith("__") or hasattr(nnx.Module, name))
            if inspect.isfunction(member) and own:
                names[name] = _gathering(cls, getattr(cls, name))
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(names))


def _gathering(cls: type[nnx.Module], original: Callable[..., Arrays]) -> Callable[..., Arrays]:
    @functools.wraps(original)
    def method(self: nnx.Module, *args: object, **kwargs: object) -> Arrays:
        # The original finds its own methods as they are.
        gathering = type(self)
        self.__class__ = cls
        try:
            return _call_unit(self, original, args, kwargs)
        finally:
            self.__class__ = gathering

    return method


def _call_unit(
    module: nnx.Module, method: Callable[..., Arrays], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Arrays:
    """Run a unit's method on a copy that has whole weights, and copy its state back."""
    graph, params, state = nnx.split(module, nnx.Param, ...)
    sharded = list(filter(is_sharded, jax.tree.leaves(params, is_leaf=is_sharded)))
    if not sharded:
        return method(module, *args, **kwargs)
    if any(jnp.ndim(weight.seed) for weight in sharded):
        raise ConfigurationError(
            f"the unit {type(module).__name__} was created by nnx.vmap, as a stack of "
            f"{sharded[0].leaf.layers}, and is called as one: run it by nnx.scan or nnx.vmap, or leave its "
            "class out of ZeroConfig.units."
        )

    def run(
        params: nnx.State, state: nnx.State, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Arrays, list[nnx.State]]:
        def use(unit: nnx.Module) -> tuple[Arrays, list[nnx.State]]:
            out = method(unit, *args, **kwargs)
            return out, [changed_state(one) for one in (unit, *modules_in((args, kwargs)))]

        return call_with_weights(graph, params, state, use)

    out, states = call_unit(run, params, state, args, kwargs)
    for one, after in zip((module, *modules_in((args, kwargs))), states, strict=True):
        nnx.update(one, after)
    return out


def call_with_weights[T](
    graph: nnx.GraphDef, params: nnx.State, state: nnx.State, use: Callable[[nnx.Module], T]
) -> T:
    """Call ``use`` with a temporary copy of a unit that has whole weights.

    Refuse assignments to its weights.
    """
    before = jax.tree.map(lambda x: x, params)  # the copy shares its variables with ``params``
    given = dict(leaves_of(before))
    unit = nnx.merge(graph, params, state)
    result = use(unit)
    replaced = replaced_weights(unit, given)

    def left(params: nnx.State) -> list[Num[Array, "..."]]:
        again = nnx.merge(graph, params, jax.tree.map(lambda x: x, state))  # with variables of this trace
        use(again)
        found = dict(leaves_of(nnx.state(again, nnx.Param)))
        return [found[path] for path in replaced]

    if replaced:
        # Flax's transformations return every weight as another array, so only the program shows assignments.
        jaxpr = jax.make_jaxpr(left)(before).jaxpr
        if paths := changed(jaxpr, list(given), list(replaced)):
            raise ConfigurationError(assigned("/".join(paths[0]), f"the unit {type(unit).__name__}"))
    return result


def replaced_weights(module: nnx.Module, given: Mapping[Path, object]) -> dict[Path, Num[Array, "..."]]:
    """The weights of a module, by path, that other arrays, even of equal values, replaced since ``given``.

    Weights that Flax's own layers replace in every call are skipped.
    """
    normalising = [layer for _, layer in nnx.iter_modules(module) if isinstance(layer, _NORMALISING)]
    theirs = {id(node) for layer in normalising for _, node in nnx.iter_graph(layer)}
    # The layer that they normalise may be an attribute of another module as well.
    skipped = [path for path, node in nnx.iter_graph(module) if id(node) in theirs]
    return {
        path: value
        for path, value in leaves_of(nnx.state(module, nnx.Param))
        if path in given
        and not (is_sharded(value) or value is given[path])
        and not any(path[: len(prefix)] == tuple(map(str, prefix)) for prefix in skipped)
    }


def modules_in(arguments: PyTree) -> list[nnx.Module]:
    """The modules in a call's arguments, which may be pytrees."""
    leaves = jax.tree.leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, nnx.Module))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def changed_state(module: nnx.Module) -> nnx.State:
    """All state of a module that a call may have changed, sown values included.

    Raises:
        ConfigurationError: the call assigned an array to a plain attribute, which would be lost.
    """
    state = nnx.state(module, nnx.Not(nnx.Param))
    known = {id(leaf) for leaf in jax.tree.leaves(state)}
    for path, inner in nnx.iter_modules(module):
        for name, value in vars(inner).items():
            if isinstance(value, jax.Array) and id(value) not in known:
                raise ConfigurationError(
                    f"the unit {type(module).__name__} assigned an array to its attribute "
                    f"{'/'.join(map(str, (*path, name)))!r}, which a unit cannot keep: make it an "
                    "nnx.Variable, or return it."
                )
    return state


def leaves_of(state: nnx.State) -> Iterator[tuple[Path, Array]]:
    """The leaves of a state by path: of its variables, without their hooks, and of plain attributes."""
    for path, held in nnx.to_flat_state(state):
        yield from leaves_within(path, held)


def leaves_within(path: PathParts, held: object) -> Iterator[tuple[Path, Array]]:
    """The leaves of a variable or an attribute at a path, by path; one that holds a pytree has several."""
    value = held.get_raw_value() if isinstance(held, nnx.Variable) else held
    for inner, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_sharded):
        yield leaf_path(path, inner), leaf


def leaf_path(path: PathParts, inner: KeyPath) -> Path:
    """The path of a leaf within the value at a path."""
    return (*map(str, path), *(jax.tree_util.keystr((key,), simple=True) for key in inner))
