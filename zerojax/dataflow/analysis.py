"""Forward analysis of a jaxpr: from abstract values of its arguments to abstract values of its results."""

from collections.abc import Iterable, Sequence

from jax.extend import core

from zerojax.dataflow.programs import inner_of, interpret

_WHOLE = ("broadcast_in_dim", "copy", "optimization_barrier", "reshape", "rev", "squeeze", "transpose")
MOVES = frozenset((*_WHOLE, "dynamic_slice", "gather", "slice"))
"""Primitives that only move data: vmapped, scanned and rematerialised modules apply them to their weights."""


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
