"""Transformations of functions: traced once, or differentiated in another way."""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, Self, cast

import jax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, PyTree

from zerojax.sharding.memory import in_host, to_host


class Pullback(Protocol):
    """What ``jax.vjp`` returns: a pytree of residuals that maps cotangents back.

    ``args_res`` are those of its residuals that are the function's own arguments. They can be taken out, and
    put back before the call, so that a loop stacks and keeps only the rest for the backward pass.
    """

    @property
    def args_res(self) -> list[PyTree[Array]]:
        """One for each argument."""
        ...

    def replace(self, *, args_res: Sequence[PyTree[Array]]) -> Self:
        """The same with other arguments; None takes one out."""
        ...

    def __call__(self, cotangents: PyTree[Array], /) -> tuple[PyTree[Array], ...]:
        """The cotangents of the arguments."""
        ...


def pullback[T](function: Callable[..., T], *primals: PyTree[Array]) -> tuple[T, Pullback]:
    """``jax.vjp``, typed."""
    out, vjp = jax.vjp(function, *primals)
    return out, cast(Pullback, vjp)


class TracedOnce[*Args, T: PyTree[Array]]:
    """A pure function that is traced once, for the first arguments it gets."""

    def __init__(self, function: Callable[[*Args], T]) -> None:
        self._function = function
        self._traced: tuple[Callable[..., list[Array]], T] | None = None

    def __call__(self, *args: *Args) -> T:
        """Run what was traced."""
        self.shapes(*args)
        assert self._traced is not None
        call, shapes = self._traced
        return jax.tree.unflatten(jax.tree.structure(shapes), call(*jax.tree.leaves(args)))

    def shapes(self, *args: *Args) -> T:
        """ShapeDtypeStructs in place of the arrays that the function returns."""
        if self._traced is None:
            closed, shapes = jax.make_jaxpr(self._function, return_shape=True)(*args)
            self._traced = jaxpr_as_fun(closed), shapes
        return self._traced[1]


def with_derivatives_of[T: PyTree[Array]](
    plain: Callable[..., T], function: Callable[..., T]
) -> Callable[..., T]:
    """``function``, with the derivatives of ``plain(result, *args)``, which computes the same differently."""

    @jax.custom_vjp
    def run(*args: PyTree[Array]) -> T:
        return function(*args)

    def forward(*args: PyTree[Array]) -> tuple[T, tuple[tuple[PyTree[Array], ...], T]]:
        result = run(*args)  # not `function`: it may be differentiated again
        return result, (args, result)

    def backward(residuals: tuple[tuple[PyTree[Array], ...], T], cotangents: T) -> tuple[PyTree[Array], ...]:
        args, result = residuals
        found = jax.vjp(functools.partial(plain, result), *args)[1](cotangents)
        # JAX's zeros for what `plain` does not read are on the device.
        return jax.tree.map(lambda x, arg: to_host(x) if in_host(arg) else x, found, args)

    run.defvjp(forward, backward)
    return run
