"""Creates an NNX model under a trace, where Flax treats two things differently.

Flax takes arrays that are plain attributes for static values, and ``nnx.vmap`` leaves no sign that a module's
parameters belong to several modules. So zerojax observes every call of a module class in this thread until
the model exists. The user's classes are not changed.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from zerojax.adapters.nnx_units import leaves_of
from zerojax.errors import ConfigurationError
from zerojax.schedule.user_code import line_of_error

Shape = tuple[int, ...]

_SHAPES = "_zerojax_shapes"
_META: Any = type(nnx.Module)  # to type checkers it is `type`, to whose call nothing is assigned
_lock = threading.RLock()
_stacked: ContextVar[tuple[type, ...] | None] = ContextVar("classes whose shapes are noted", default=None)
_READS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def create(factory: Callable[..., object], rngs: nnx.Rngs, stacked: tuple[type, ...]) -> nnx.Module:
    """Create a model, whose plain arrays are then part of its state.

    The factory takes the rngs by position, or by the name ``rngs`` if it is keyword-only. ``stack_of`` works
    for modules of the ``stacked`` classes.
    """
    with _observed(stacked):
        try:
            model = factory(rngs=rngs) if _by_name(factory) else factory(rngs)
        except _READS as error:
            raise ConfigurationError(
                f"model(rngs) reads the value of an array at {line_of_error(error)}, and there is none yet: "
                "weights are created later, on the devices that store them. Compute with jax.numpy "
                "(jnp.where instead of if). Values that do not depend on rngs may be NumPy's."
            ) from error
    if not isinstance(model, nnx.Module):
        raise ConfigurationError(
            f"model(rngs) returned a {type(model).__name__}, not an nnx.Module. Pass a callable "
            "that takes nnx.Rngs and returns the model, or a Linen module with sample_batch=."
        )
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Pytree):
            _make_data(node)
        for leaf in jax.tree.leaves(node.get_raw_value()) if isinstance(node, nnx.Variable) else ():
            if isinstance(leaf, str | bytes) or callable(leaf):
                raise ConfigurationError(
                    f"the variable {'/'.join(map(str, path))!r} holds a {type(leaf).__name__}, and a step "
                    "keeps only arrays and numbers: make it a plain attribute."
                )
    return model


def stack_of(unit: str, module: nnx.Module) -> Shape:
    """The leading axes that ``nnx.vmap`` gave to the parameters of a ``stacked`` module, or ().

    Raises:
        ConfigurationError: not all parameters have one more axis, the first.
    """
    born = dict(vars(module).get(_SHAPES, ()))
    params = leaves_of(nnx.state(module, nnx.Param))
    shapes = [(jnp.shape(leaf), born[path]) for path, leaf in params if path in born]
    longer = [(now, own) for now, own in shapes if len(now) > len(own)]
    stacks = {now[:1] if now[1:] == own else () for now, own in longer}
    if not longer or (len(longer) < len(shapes) and () in stacks):
        return ()  # the longer ones were replaced after the module's creation
    if len(longer) < len(shapes) or len(stacks) > 1 or () in stacks:
        raise ConfigurationError(
            f"the unit {unit!r} was created by nnx.vmap, and not all its parameters have one more axis, the "
            "first: use one nnx.vmap with out_axes=0, or leave its class out of ZeroConfig.units."
        )
    return stacks.pop()


def forget_shapes(model: nnx.Module) -> None:
    """Remove the shapes that ``stack_of`` reads from the modules of a model."""
    for _, module in nnx.iter_modules(model):
        vars(module).pop(_SHAPES, None)


def _by_name(factory: Callable[..., object]) -> bool:
    """Whether a factory takes its rngs by name only."""
    own = factory if isinstance(factory, functools.partial) else functools.partial(factory)
    if isinstance(own.func, type):
        # A class has the signature of its metaclass's call; None stands for `self`.
        own = functools.partial(own.func.__init__, None, *own.args, **own.keywords)
    try:
        rngs = inspect.signature(own).parameters.get("rngs")
    except (TypeError, ValueError):
        return False  # its call will say why
    return rngs is not None and rngs.kind is rngs.KEYWORD_ONLY


def _make_data(node: object) -> None:
    """Register plain attributes that are traced arrays as data, as Flax does with other arrays."""
    for name, value in list(vars(node).items()):
        if isinstance(value, Tracer):
            setattr(node, name, nnx.data(value))
        elif type(value) in (list, tuple, dict):
            leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable))
            if any(isinstance(leaf, Tracer | np.ndarray) for leaf in leaves):
                raise ConfigurationError(
                    f"the attribute {name!r} of {type(node).__name__} is a {type(value).__name__} of arrays, "
                    "which Flax does not keep as state: make it an nnx.List, an nnx.Dict or an nnx.Variable."
                )


@contextlib.contextmanager
def _observed(stacked: tuple[type, ...]) -> Generator[None]:
    """In this context, new modules register their arrays as data, and stacked ones record their shapes."""
    with _lock:
        call = _META.__call__

        def observe(cls: type[nnx.Module], *args: object, **kwargs: object) -> object:
            module = call(cls, *args, **kwargs)
            classes = _stacked.get()
            if classes is not None and isinstance(module, nnx.Module):
                _make_data(module)
                if isinstance(module, classes):
                    shapes = [
                        (path, jnp.shape(leaf)) for path, leaf in leaves_of(nnx.state(module, nnx.Param))
                    ]
                    setattr(module, _SHAPES, tuple(shapes))
            return module

        token = _stacked.set(stacked)
        _META.__call__ = observe
        try:
            yield
        finally:
            _META.__call__ = call
            _stacked.reset(token)
