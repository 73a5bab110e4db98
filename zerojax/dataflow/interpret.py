"""Interprets a jaxpr on values of any kind: arrays, abstract values, or variables of another jaxpr."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core, source_info_util
from jaxtyping import Array


def interpret[T](
    jaxpr: core.Jaxpr,
    args: Iterable[T],
    run: Callable[[core.JaxprEqn, list[T]], Sequence[T]],
    literal: Callable[[core.Literal], Any] = lambda literal: literal,
) -> list[T]:
    """The results of a program whose equations have the results ``run(equation, operands)``.

    ``args`` begin with the program's constants.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def read(atom: core.Var | core.Literal) -> T:
        return literal(atom) if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        results = run(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def evaluate[T](
    jaxpr: core.Jaxpr, args: Sequence[T], run: Callable[[core.JaxprEqn, list[T]], Sequence[T]]
) -> list[T]:
    """Evaluate a program on arrays, or on objects in their place, in the name scopes of its equations."""

    def named(equation: core.JaxprEqn, given: list[T]) -> Sequence[T]:
        info = equation.source_info
        stack = source_info_util.current_name_stack() + info.name_stack
        with source_info_util.user_context(info.traceback, name_stack=stack):
            return run(equation, given)

    return interpret(jaxpr, [*jaxpr.consts, *args], named, _with_dtype)


def _with_dtype(literal: core.Literal) -> Any:
    """The value of a literal. Jaxprs have Python's bools, which have no dtype."""
    return np.bool_(literal.val) if isinstance(literal.val, bool) else literal.val


def as_it_is(equation: core.JaxprEqn, given: Sequence[Array]) -> Sequence[Array]:
    """Evaluate one equation unchanged."""
    primitive = equation.primitive
    with equation.ctx.manager:
        results = primitive.bind(*given, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]


def rewritten[*Args, T](
    function: Callable[[*Args], T], rewrite: Callable[[core.Jaxpr], core.Jaxpr]
) -> Callable[[*Args], T]:
    """The function with another program: ``rewrite`` is given the one that it traces to.

    JAX copies the new program's equations into the trace. Evaluating them would take as long as tracing.
    """

    def run(*args: *Args) -> T:
        outer, shapes = jax.make_jaxpr(jax.jit(function), return_shape=True)(*args)

        def call(equation: core.JaxprEqn, given: list[Array]) -> Sequence[Array]:
            params = equation.params
            params = params | {"jaxpr": rewrite(params["jaxpr"]), "inline": jax.Inline.JAX_EARLY}
            return as_it_is(equation.replace(params=params), given)

        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(outer, jax.tree.leaves(args), call))

    return run
