"""Transformations of functions: traced once, or differentiated in another way."""

import functools
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun


class TracedOnce:
    """A pure function that is traced once, for the first arguments it gets."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._traced: tuple[Any, Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run what was traced."""
        self.shapes(*args)
        assert self._traced is not None
        call, shapes = self._traced
        return jax.tree.unflatten(jax.tree.structure(shapes), call(*jax.tree.leaves(args)))

    def shapes(self, *args: Any) -> Any:
        """The shapes and dtypes that the function returns."""
        if self._traced is None:
            closed, shapes = jax.make_jaxpr(self._function, return_shape=True)(*args)
            self._traced = jaxpr_as_fun(closed), shapes
        return self._traced[1]


def with_derivatives_of(plain: Any, function: Any) -> Any:
    """``function``, with the derivatives of ``plain(result, *args)``, which computes the same differently."""

    @jax.custom_vjp
    def run(*args: Any) -> Any:
        return function(*args)

    def forward(*args: Any) -> tuple[Any, Any]:
        result = run(*args)  # not `function`: it may be differentiated again
        return result, (args, result)

    def backward(residuals: Any, cotangents: Any) -> Any:
        args, result = residuals
        return jax.vjp(functools.partial(plain, result), *args)[1](cotangents)

    run.defvjp(forward, backward)
    return run
