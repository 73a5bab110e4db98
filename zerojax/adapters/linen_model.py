"""Linen models as loss functions get them: called like the module itself, with units that gather.

Units are found by intercepting their methods. The interceptor is active only while a bound model runs, so the
user's classes are not changed.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never, Self, cast

import jax
from flax import linen
from flax.core import meta
from flax.core.scope import DenyList, in_filter, intersect_filters
from flax.linen.module import InterceptorContext
from jaxtyping import Array, PyTree

from zerojax.adapters.roles import Box, ExpertBox
from zerojax.errors import ConfigurationError
from zerojax.schedule.unit import Arrays, Sharded, call_unit, is_sharded
from zerojax.schedule.user_code import read_outside, translated_errors
from zerojax.sharding.param_tree import Path, by_path, from_tree, to_tree

Variables = dict[str, PyTree[Array]]
"""A Linen model's variables, nested by module, by the names of their collections."""
PARAMS = "params"
PASSING = frozenset({"intermediates", "perturbations"})
"""Collections that live for one call only."""
ANOTHER_AXIS = (
    "along an axis other than 0: use variable_axes={'params': 0} (in MaxText param_scan_axis=0), or leave "
    "its class out of ZeroConfig.units."
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class InScope(Sharded, Box):
    """A unit's parameter in a Flax scope: a box, which ``Module.param`` opens."""

    def unbox(self) -> "_Unread":
        """The value that ``setup`` gets outside of the unit's call."""
        return _Unread(**vars(self))

    def replace_boxed(self, val: PyTree) -> PyTree:
        """A new value, without the box."""
        return val

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """Called when a loop or a map over layers slices the parameter. Refuse any axis but the first."""
        if index != 0:
            name = self.weight.layout.name
            raise ConfigurationError(f"the unit's parameter {name!r} is scanned {ANOTHER_AXIS}")
        return super().remove_axis(index, params)


class _Unread(Sharded):
    """A leaf of the shape that Flax expects of the parameter, which cannot be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return self.weight.layout.shape

    def __getattr__(self, name: str) -> Never:
        """Refuse all other attributes of arrays."""
        raise WeightReadError(read_outside(self.weight.layout.name))

    @property
    def __jax_array__(self) -> Never:  # pyrefly: ignore[bad-override]  (JAX calls no leaf's)
        """Refuse a conversion to an array of JAX."""
        raise ConfigurationError(read_outside(self.weight.layout.name))


class WeightReadError(ConfigurationError, AttributeError):
    """A weight was read outside its unit's call. It is an AttributeError too, so that ``hasattr`` works."""


class LinenModel:
    """The model that a loss function gets, which is called like the module itself."""

    def __init__(self, module: linen.Module, variables: Variables):
        self._module = module
        self.variables = variables

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        """Call the module with zerojax's variables; it takes ``apply``'s arguments, too."""
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


class BoundModel(LinenModel):
    """A Linen module with its variables and a key, for one forward pass; weights of units are ``Sharded``."""

    def __init__(
        self, module: linen.Module, units: frozenset[Path], variables: Variables, key: Array
    ) -> None:
        super().__init__(module, variables)
        self._units = units
        self._key = key

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        """Apply the module; the next call sees changed state, such as batch statistics.

        It takes the arguments of the module and of ``linen.Module.apply``. Without ``mutable`` all state of
        the model may change. With it, collections are mutable and returned as by ``apply``.
        """
        state = [name for name in self.variables if name != PARAMS]
        mutable = kwargs.pop("mutable", None)
        self._key, key = jax.random.split(self._key)
        # "params" serves every other stream as well: Flax counts their draws from it.
        rngs = kwargs.pop("rngs", {"params": jax.random.fold_in(key, 1), "dropout": key})
        every = state if mutable is None else mutable
        result = self.apply(self.variables, *args, rngs=rngs, mutable=every, **kwargs)
        if every is False:
            return result
        out, changed = result
        self.variables = {**self.variables, **{name: changed[name] for name in state if name in changed}}
        return out if mutable is None else result

    def apply(self, variables: Mapping[str, PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        """``linen.Module.apply`` with any variables; the model's own do not change.

        Raises:
            ConfigurationError: ``mutable`` has the parameters, or intermediates would be captured inside
                units.
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
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        context: InterceptorContext,
    ) -> Arrays:
        """Gather a unit's weights for a call of the unit, or of its submodule from outside the unit.

        A function that Flax runs in place of the module's method runs unchanged: the methods that it calls
        are intercepted.
        """
        module = context.module
        if not any(module.path[:n] in self._units for n in range(len(module.path) + 1)):
            return run(*args, **kwargs)
        params = module.variables.get(PARAMS, {})
        if not any(map(is_sharded, jax.tree.leaves(params, is_leaf=is_sharded))):
            return run(*args, **kwargs)
        if context.method_name == "setup":
            # It runs again, on whole weights, in the call; here it only creates submodules.
            with contextlib.suppress(ConfigurationError), translated_errors():
                run(*args, **kwargs)
            return None
        if not is_method(type(module), context):
            return run(*args, **kwargs)
        return _call_unit(module, context.method_name, params, args, kwargs)


class UncreatedModel(LinenModel):
    """Stands in for the model while its variables are created: each call adds those that it needs."""

    def __init__(self, module: linen.Module, rngs: dict[str, Array]) -> None:
        super().__init__(module, _NotYet())
        self._rngs = rngs
        self.boxed: Variables = {}

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        """As ``BoundModel``; creates the variables that the call needs and that do not exist yet."""
        mutable = kwargs.pop("mutable", None)
        kwargs.pop("rngs", None)
        out, variables = self._module.init_with_output(self._rngs, *args, mutable=True, **kwargs)
        opened = jax.tree.map(
            lambda x: x if isinstance(x, ExpertBox) else meta.unbox(x),
            cast(Variables, variables),
            is_leaf=lambda x: isinstance(x, meta.AxisMetadata),
        )
        variables = meta.unbox(opened)
        passing = PASSING | self._appended(variables, args, kwargs)
        kept = {name: value for name, value in opened.items() if name not in passing}
        self.boxed = to_tree({**from_tree(kept), **from_tree(self.boxed)})
        self.variables = _NotYet(meta.unbox(self.boxed).items())
        if mutable is None or mutable is False:
            return out
        return out, {name: value for name, value in variables.items() if in_filter(mutable, name)}

    def _appended(
        self, variables: Variables, args: tuple[PyTree, ...], kwargs: Mapping[str, Any]
    ) -> frozenset[str]:
        """The collections to which each call appends (``Module.sow``), and which thus live for one call."""
        state = {name: value for name, value in variables.items() if name not in {PARAMS, *PASSING}}
        values = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, tuple))
        if not any(isinstance(value, tuple) for value in values):
            return frozenset()

        def again() -> Mapping[str, PyTree]:
            rest = DenyList(PARAMS)
            return self._module.apply(variables, *args, rngs=self._rngs, mutable=rest, **kwargs)[1]

        longer = jax.eval_shape(again)
        return frozenset(
            name
            for name, value in state.items()
            if jax.tree.structure(value) != jax.tree.structure(longer[name])
        )

    def apply(self, variables: Mapping[str, PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree[Array]:
        """As ``BoundModel.apply``; without parameters it creates them."""
        if variables.get(PARAMS):
            return self._module.apply(variables, *args, **kwargs)
        return self(*args, **kwargs)


class _NotYet(Variables):
    """Variables before the calls that create them: every collection exists and is empty.

    An empty collection can be passed to ``apply`` and summed, but not indexed.
    """

    def __init__(self, given: Iterable[tuple[str, PyTree]] = (), collection: str | None = None) -> None:
        super().__init__(given)
        self.collection = collection

    def __missing__(self, name: str) -> "_NotYet":
        if self.collection is None:
            return _NotYet(collection=name)
        raise ConfigurationError(
            f"model.variables[{self.collection!r}][{name!r}] is read, but the model has not been "
            "called, and a Linen module has no variables until then: call the model first."
        )


jax.tree_util.register_pytree_node(
    _NotYet,
    lambda found: (tuple(found.values()), (tuple(found), found.collection)),
    lambda names, values: _NotYet(zip(names[0], values, strict=True), names[1]),
)


def variables_by_path(variables: PyTree) -> dict[Path, Any]:
    """Variables by path; a variable that holds a pytree counts as one for each leaf."""
    return by_path(variables, lambda x: isinstance(x, Sharded | ExpertBox))


def is_method(cls: type, context: InterceptorContext) -> bool:
    """Whether the intercepted call is to the method that ``cls`` has by this name.

    Functions that Flax's transforms run on a module are called like its methods, and a base class's method
    may be called although the module's class overrides it.
    """
    called = cast("functools.partial[object]", context.orig_method).func
    method = getattr(cls, context.method_name, None)
    while method is not None and method is not called:
        method = getattr(method, "__wrapped__", None)  # Flax and its transforms wrap methods
    return method is not None and context.method_name != "setup"


def _call_unit(
    module: linen.Module,
    method: str,
    params: PyTree,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> Arrays:
    """Run a unit's method on an unbound copy that has whole weights, and copy its state back."""
    free, variables = module.unbind()
    state = {name: value for name, value in variables.items() if name != PARAMS}
    assert module.scope is not None  # it is being called
    rngs = {name: module.make_rng(name) for name in module.scope.rngs}
    mutable = intersect_filters(module.scope.mutable, DenyList(PARAMS)) or []

    def run(
        params: PyTree, held: tuple[Arrays, Arrays], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[Arrays, Mapping[str, PyTree[Array]]]:
        state, rngs = held

        def call(unit: linen.Module) -> Arrays:
            return getattr(unit, method)(*args, **kwargs)

        return free.apply({PARAMS: params, **state}, rngs=rngs, method=call, mutable=mutable)

    out, changed = call_unit(run, params, (state, rngs), args, kwargs)
    for collection, values in changed.items():
        for name, value in values.items():
            module.put_variable(collection, name, value)
    return out
