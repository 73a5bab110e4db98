"""Proves from an optimizer's program that it updates element by element and leaves padding zero.

An element of such an update depends on the gradients, weights and moments of that element, and on numbers
that all elements share: counters, schedules, norms of whole leaves. It is therefore the same in a flat,
padded leaf. The proof takes a hundredth of the time of compiling the update and comparing results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from jax.core import ShapedArray
from jax.extend import core

from zerojax.dataflow import Analysis

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{"abs": np.abs, "add": np.add, "and": np.bitwise_and, "cbrt": np.cbrt, "ceil": np.ceil},
    **{"convert_element_type": np.asarray, "cos": np.cos, "div": np.divide, "eq": np.equal, "exp": np.exp},
    **{"exp2": np.exp2, "expm1": np.expm1, "floor": np.floor, "ge": np.greater_equal, "gt": np.greater},
    **{"integer_pow": np.power, "is_finite": np.isfinite, "le": np.less_equal, "log": np.log},
    **{"log1p": np.log1p, "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply},
    **{"ne": np.not_equal, "neg": np.negative, "not": np.invert, "or": np.bitwise_or, "pow": np.power},
    **{"rem": np.fmod, "rsqrt": lambda x: 1 / np.sqrt(x), "sign": np.sign, "sin": np.sin, "sqrt": np.sqrt},
    **{"square": np.square, "sub": np.subtract, "tanh": np.tanh, "xor": np.bitwise_xor},
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: cases[int(which)],
}
"""The primitives that work element by element, and what each does to the element of a padding."""
ELEMENTWISE = frozenset(_FUNCTIONS)
_IN_ORDER = frozenset(("broadcast_in_dim", "copy", "reshape", "squeeze"))
"""Primitives whose result has the operand's elements in their order, if it has as many."""
_REDUCTIONS = {"reduce_and": True, "reduce_or": False, "reduce_sum": 0}
"""Primitives whose result over a whole leaf does not depend on padding of this value."""


class Kind(IntEnum):
    """How an array depends on the elements of leaves; later kinds include earlier ones."""

    UNIFORM = 0
    """All elements are equal, and the same for flat leaves."""
    ELEMENTS = 1
    """Each element depends on one element of leaves, and on uniform arrays."""
    OTHER = 2
    """Anything else. Nothing is known of its padding."""


class Value(NamedTuple):
    """The abstract value of an array.

    Attributes:
        kind: how its elements depend on the elements of leaves.
        padding: its element where leaves have padding, if that is known. A uniform array without it is a
            finite number that is known when the update runs.
    """

    kind: Kind
    padding: np.generic | None = None


OTHER = Value(Kind.OTHER)


class _ElementByElement(Analysis[Value, None]):
    """Follows arrays through the programs of an optimizer."""

    nothing = OTHER

    def literal(self, literal: core.Literal) -> Value:
        return _known(Kind.UNIFORM, literal.val, _shaped(literal).dtype)

    def join(self, values: Iterable[Value]) -> Value:
        kinds, paddings = zip(*values, strict=True)
        first, *others = paddings
        return Value(max(kinds), first if all(x is not None and x == first for x in others) else None)

    def decided(self, equation: core.JaxprEqn, condition: Value, results: list[Value]) -> list[Value]:
        return results if condition.kind == Kind.UNIFORM else [OTHER] * len(results)

    def step(self, equation: core.JaxprEqn, given: list[Value]) -> Sequence[Value]:
        name = equation.primitive.name
        if name in ELEMENTWISE and _keeps_elements(equation, given):
            return [_elementwise(equation, given)]
        in_order = name in _IN_ORDER and equation.params.get("dimensions") is None
        if in_order and _keeps_elements(equation, given):
            return given[:1]
        if name in _REDUCTIONS and _shaped(equation.outvars[0]).size == 1:
            return [Value(Kind.UNIFORM) if given[0].padding == _REDUCTIONS[name] else OTHER]
        return [OTHER] * len(equation.outvars)

    def _results(self, equation: core.JaxprEqn, given: list[Value]) -> Sequence[Value]:
        # A scan may carry elements of a leaf to other elements.
        if equation.primitive.name == "scan":
            return [OTHER] * len(equation.outvars)
        return super()._results(equation, given)


def _keeps_elements(equation: core.JaxprEqn, given: Sequence[Value]) -> bool:
    """Whether the result has as many elements as each operand that is not uniform: none is spread."""
    size = _shaped(equation.outvars[0]).size
    return all(
        value.kind == Kind.UNIFORM or _shaped(atom).size == size
        for value, atom in zip(given, equation.invars, strict=True)
    )


def _elementwise(equation: core.JaxprEqn, given: Sequence[Value]) -> Value:
    """The result of one of ``ELEMENTWISE``."""
    name, kind = equation.primitive.name, max(value.kind for value in given)
    paddings = [value.padding for value in given]
    exponents = [equation.params["y"]] if name == "integer_pow" else []
    if kind == Kind.OTHER:
        return OTHER
    if all(x is not None for x in paddings):
        with np.errstate(all="ignore"):
            result = _FUNCTIONS[name](*paddings, *exponents)
        return _known(kind, result, _shaped(equation.outvars[0]).dtype)
    if name in ("mul", "div"):
        zero, other = sorted(given, key=lambda value: value.padding is None) if name == "mul" else given
        if zero.padding == 0 and other == Value(Kind.UNIFORM):
            return zero._replace(kind=kind)
    if name == "select_n" and len(set(paddings[1:])) == 1:
        return Value(kind, paddings[1])
    return Value(kind)


def _known(kind: Kind, padding: Any, dtype: np.dtype) -> Value:
    """A value with a known element; of a literal that is an array, nothing is known."""
    return OTHER if np.ndim(padding) else Value(kind, np.asarray(padding).astype(dtype).reshape(1)[0])


def _shaped(atom: core.Var | core.Literal) -> ShapedArray:
    """The shape and dtype of an array."""
    assert isinstance(atom.aval, ShapedArray)
    return atom.aval


def updates_element_by_element(init: core.Jaxpr, update: core.Jaxpr, leaves: int) -> bool:
    """Whether an optimizer provably updates element by element, and leaves padding zero.

    Args:
        init: makes the state from the parameters.
        update: makes updates and the next state from the gradients, the state and the parameters.
        leaves: the number of parameters. Other arrays of the programs are the state's.
    """
    analysis = _ElementByElement(None)
    zeros = [Value(Kind.ELEMENTS, np.float32(0)[()])] * leaves
    state = analysis.follow(init, zeros)
    while True:
        results = analysis.follow(update, [*zeros, *state, *zeros])
        updates, after = results[:leaves], results[leaves:]
        joined = [analysis.join(pair) for pair in zip(state, after, strict=True)]
        if joined == state:
            return all(value.padding == 0 for value in updates)
        state = joined
