"""Where the results of a traced program come from."""

from collections.abc import Iterable, Sequence

from jax.extend import core

from zerojax.dataflow.analysis import Analysis

_WHOLE = ("broadcast_in_dim", "copy", "optimization_barrier", "reshape", "rev", "squeeze", "transpose")
MOVES = frozenset((*_WHOLE, "dynamic_slice", "gather", "slice"))
"""Primitives that only move data: vmapped, scanned and rematerialised modules apply them to their weights."""


class _Origins(Analysis[int, None]):
    """For each value the number of the argument that it is, moved or passed on; -1 if it was computed."""

    def __init__(self) -> None:
        super().__init__(nothing=-1, state=None)

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
    sources = _Origins().follow(jaxpr, range(len(jaxpr.invars)))[len(jaxpr.outvars) - len(left) :]
    names = dict(enumerate(entered))
    return [name for name, source in zip(left, sources, strict=True) if names.get(source) != name]
