"""Where the values of a traced program come from."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from zerojax.matmul.replay import scan_counts

# Primitives that only move data: vmapped, scanned and rematerialised modules apply them to their weights.
MOVES = frozenset(
    (
        "broadcast_in_dim",
        "copy",
        "dynamic_slice",
        "gather",
        "optimization_barrier",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    )
)


def origin(jaxpr: core.Jaxpr, var: Any) -> int | None:
    """The number of the argument that a value is, moved or passed on; None if it was computed."""
    made = {out: (equation, place) for equation in jaxpr.eqns for place, out in enumerate(equation.outvars)}
    while not isinstance(var, core.Literal) and var in made:
        equation, place = made[var]
        source = _source(equation, place)
        if source is None:
            return None
        var = equation.invars[source]
    return jaxpr.invars.index(var) if var in jaxpr.invars else None


def changed[T](jaxpr: core.Jaxpr, entered: list[T], left: Sequence[T]) -> list[T]:
    """The names of results that are not just the argument of the same name, moved or passed on."""
    results = jaxpr.outvars[len(jaxpr.outvars) - len(left) :]
    found = []
    for name, var in zip(left, results, strict=True):
        number = origin(jaxpr, var)
        if number is None or entered[number : number + 1] != [name]:
            found.append(name)
    return found


def _source(equation: core.JaxprEqn, place: int) -> int | None:
    """The number of the operand that the result at ``place`` is, moved or passed on, if it is one."""
    params, name = equation.params, equation.primitive.name
    if name in MOVES:
        return place
    inside = list(core.jaxprs_in_params(params))
    if name == "while":
        inside, first = [params["body_jaxpr"].jaxpr], params["cond_nconsts"]
        carried = {place: params["body_nconsts"] + place}
    else:
        first = 1 if name == "cond" else 0
        constants, count = scan_counts(equation) if name == "scan" else (0, 0)
        carried = {place: constants + place} if place < count else {}
    if not inside or any(len(one.invars) + first != len(equation.invars) for one in inside):
        return None
    first_of, *others = {origin(one, one.outvars[place]) for one in inside}
    if others or first_of is None or carried.get(place, first_of) != first_of:
        return None
    return first + first_of
