"""An interpreter of traced programs (jaxprs) on any values, for analysis, evaluation and rewriting."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core, source_info_util
from jax.extend.core import primitives
from jaxtyping import Array

_WHOLE = ("broadcast_in_dim", "copy", "optimization_barrier", "reshape", "rev", "squeeze", "transpose")
MOVES = frozenset((*_WHOLE, "dynamic_slice", "gather", "slice"))
"""Primitives that only move data: vmapped, scanned and rematerialised modules apply them to their weights."""
_CALLS = frozenset({primitives.closed_call_p.name, "jit"})
_WITH_RULE = frozenset({"custom_jvp_call", "custom_vjp_call"})


class Inner(NamedTuple):
    """The programs in an equation. One of them runs, once or repeatedly, and returns the results.

    Attributes:
        programs: the branches of a conditional; one program otherwise.
        first: the number of the first operand that they are given. Those before it decide which one runs.
        carried: the arguments that a loop replaces by the program's first results.
        test: the program that ends a while loop, given the operands before ``first`` and what is carried.
    """

    programs: Sequence[core.Jaxpr]
    first: int = 0
    carried: slice = slice(0)
    test: core.Jaxpr | None = None


def inner_of(equation: core.JaxprEqn) -> Inner | None:
    """The programs of a branch, a loop or a call. None for other equations, also if they hold programs."""
    params = equation.params
    match equation.primitive.name:
        case "cond":
            return Inner(params["branches"], first=1)
        case "while":
            carried = slice(params["body_nconsts"], None)
            return Inner([params["body_jaxpr"]], params["cond_nconsts"], carried, params["cond_jaxpr"])
        case "scan":
            constants, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
            return Inner([params["jaxpr"]], carried=slice(constants, constants + carry))
    if len(programs := list(core.jaxprs_in_params(params))) != 1:
        return None
    # A call's program has the arguments and results of its equation. Not so in a reduction or kernel.
    own, theirs = [[*one.invars, *one.outvars] for one in (equation, programs[0])]
    shapes = [[getattr(atom.aval, "shape", None) for atom in atoms] for atoms in (own, theirs)]
    same = len(equation.invars) == len(programs[0].invars) and shapes[0] == shapes[1]
    return Inner(programs) if same else None


def called(equation: core.JaxprEqn, *, with_rule: bool = False) -> core.Jaxpr | None:
    """The program that an equation only calls, or None.

    With ``with_rule``, also of a call that has a derivative rule, which inlining the program would lose.
    """
    names = _CALLS | _WITH_RULE if with_rule else _CALLS
    return next(core.jaxprs_in_params(equation.params)) if equation.primitive.name in names else None


def equations_within(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of a program, and of all programs in them."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations_within(inner)


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

    return interpret(jaxpr, [*jaxpr.consts, *args], named, with_dtype)


def with_dtype(literal: core.Literal) -> Any:
    """The value of a literal. Jaxprs have Python's bools, which have no dtype."""
    return np.bool_(literal.val) if isinstance(literal.val, bool) else literal.val


def as_it_is(equation: core.JaxprEqn, given: Sequence[Array]) -> Sequence[Array]:
    """Evaluate one equation unchanged."""
    primitive = equation.primitive
    with equation.ctx.manager:
        results = primitive.bind(*given, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]


class Analysis[T, S]:
    """A forward analysis. A subclass says what single equations do; this class follows the programs in them.

    A loop is followed until its carried values do not change, so the abstract values are a finite lattice.

    Attributes:
        nothing: the abstract value of constants, and of literals unless ``literal`` says otherwise.
        state: what the equations so far have added up to.
    """

    nothing: T

    def __init__(self, state: S) -> None:
        self.state = state

    def join(self, values: Iterable[T]) -> T:
        """The abstract value of something that may be any of these."""
        raise NotImplementedError

    def literal(self, literal: core.Literal) -> T:
        """The abstract value of a literal."""
        del literal
        return self.nothing

    def step(self, equation: core.JaxprEqn, given: list[T]) -> Sequence[T]:
        """The abstract results of an equation for which ``inner_of`` finds no programs."""
        raise NotImplementedError

    def decided(self, equation: core.JaxprEqn, condition: T, results: list[T]) -> list[T]:
        """The results of a conditional or a while loop, whose condition has this abstract value."""
        del equation, condition
        return results

    def merged(self, states: Sequence[S]) -> S:
        """The state after one of several branches."""
        return states[0]

    def repeated(self, equation: core.JaxprEqn, before: S) -> S:
        """The state after an equation: ``before`` is the state before it, ``self.state`` after one run of its
        programs.
        """
        del equation, before
        return self.state

    def follow(self, jaxpr: core.Jaxpr, given: Sequence[T]) -> list[T]:
        """The abstract values of a program's results."""
        constants = [self.nothing] * len(jaxpr.constvars)
        return interpret(jaxpr, [*constants, *given], self._results, self.literal)

    def _results(self, equation: core.JaxprEqn, given: list[T]) -> Sequence[T]:
        inner = inner_of(equation)
        if inner is None:
            return self.step(equation, given)
        condition, args, before = given[: inner.first], given[inner.first :], self.state
        while True:
            self.state, entering = before, args[inner.carried]
            test = [] if inner.test is None else self.follow(inner.test, [*condition, *entering])
            results = self._one_of(inner.programs, args)
            for value in test or condition[:1]:
                results = self.decided(equation, value, results)
            args[inner.carried] = map(self.join, zip(entering, results, strict=False))
            if args[inner.carried] == entering:
                self.state = self.repeated(equation, before)
                return [*entering, *results[len(entering) :]]

    def _one_of(self, programs: Sequence[core.Jaxpr], args: list[T]) -> list[T]:
        """The results of whichever program runs."""
        if len(programs) == 1:
            return self.follow(programs[0], args)
        results, states, before = [], [], self.state
        for program in programs:
            self.state = before
            results.append(self.follow(program, args))
            states.append(self.state)
        self.state = self.merged(states)
        return [self.join(each) for each in zip(*results, strict=True)]


class _Origins(Analysis[int, None]):
    """For each value the number of the argument that it is, moved or passed on; -1 if it was computed."""

    nothing = -1

    def join(self, values: Iterable[int]) -> int:
        first, *others = set(values)
        return -1 if others else first

    def step(self, equation: core.JaxprEqn, given: list[int]) -> list[int]:
        count = len(equation.outvars)
        return given[:count] if equation.primitive.name in MOVES else [-1] * count


def changed[T](jaxpr: core.Jaxpr, entered: Sequence[T], left: Sequence[T]) -> list[T]:
    """The names of results that are not just the argument of the same name, moved or passed on.

    ``entered`` names the first arguments, ``left`` the last results.
    """
    sources = _Origins(None).follow(jaxpr, range(len(jaxpr.invars)))[len(jaxpr.outvars) - len(left) :]
    names = dict(enumerate(entered))
    return [name for name, source in zip(left, sources, strict=True) if names.get(source) != name]
