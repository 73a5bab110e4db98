"""The programs (jaxprs) in equations: what each is given, and what becomes of its results."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core
from jax.extend.core import primitives

_CALLS = frozenset({primitives.closed_call_p.name, "jit"})
_WITH_RULE = frozenset({"custom_jvp_call", "custom_vjp_call"})


class Inner(NamedTuple):
    """The programs in an equation. One of them runs, once or repeatedly, and its results are the equation's.

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
    """The programs in an equation. None if there are none, or if it may not simply call the one it has."""
    params = equation.params
    match equation.primitive.name:
        case "cond":
            return Inner(params["branches"], first=1)
        case "while":
            carried = slice(params["body_nconsts"], None)
            return Inner([params["body_jaxpr"]], params["cond_nconsts"], carried, params["cond_jaxpr"])
        case "scan":
            return Inner([params["jaxpr"]], carried=_carried(params))
    programs = list(core.jaxprs_in_params(params))
    return Inner(programs) if len(programs) == 1 and _is_call(equation, programs[0]) else None


def _carried(scan: Mapping[str, Any]) -> slice:
    if "num_carry" in scan:  # JAX 0.11.0
        return slice(scan["num_consts"], scan["num_consts"] + scan["num_carry"])
    constants, carry, _ = (len(list(part)) for part in scan["ft_in"].unpack())
    return slice(constants, constants + carry)


def _is_call(equation: core.JaxprEqn, jaxpr: core.Jaxpr) -> bool:
    """Whether a program has the arguments and results of its equation, unlike a reduction's or a kernel's."""

    def shapes(atoms: Sequence[core.Var | core.Literal]) -> list[object]:
        return [getattr(atom.aval, "shape", None) for atom in atoms]

    pairs = ((equation.invars, jaxpr.invars), (equation.outvars, jaxpr.outvars))
    return all(shapes(own) == shapes(theirs) for own, theirs in pairs)


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
