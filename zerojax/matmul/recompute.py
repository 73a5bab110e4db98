"""Computes activations once more, where sharing them would cost more memory traffic.

An fp8 product reads its activations twice: for their largest magnitude, and to encode them. Its backward pass
encodes them again, beside the derivative of the function that they come from. XLA computes an expensive
function, such as the tanh of GELU, once for all of these readers, and writes it to memory for them: twice the
bytes of its own input, which they could read instead.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array

_ELEMENTWISE = frozenset(
    ("abs", "add", "and", "clamp", "convert_element_type", "cos", "div", "eq", "erf", "erf_inv", "erfc",
     "exp", "exp2", "expm1", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt",
     "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reshape", "rsqrt", "select_n", "sign", "sin",
     "sqrt", "square", "sub", "tanh", "xor")
)  # fmt: skip
_CALLS = frozenset(("closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"))


def bind(equation: core.JaxprEqn, given: Sequence[Any]) -> Sequence[Any]:
    """Evaluate one equation."""
    primitive = equation.primitive
    with equation.ctx.manager:
        results = primitive.bind(*given, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]


def recomputed(
    jaxpr: core.Jaxpr, reader: core.JaxprEqn, var: core.Var, read: Callable[[Any], Any], count: int
) -> list[Array]:
    """A variable's value, computed anew ``count`` times from what the elementwise functions before it read.

    Only functions whose results nothing else reads are computed anew.

    Args:
        jaxpr: the program.
        reader: its equation that reads the variable.
        var: the variable.
        read: gives the value of any variable or literal before ``reader``.
        count: how many results.

    Returns:
        Equal arrays without gradients, each of which XLA computes for itself.
    """
    chain = _chain(jaxpr, reader, var)
    if not chain:
        return [lax.stop_gradient(read(var))] * count
    made = {out for equation in chain for out in equation.outvars}
    given = {atom: lax.stop_gradient(read(atom)) for one in chain for atom in _variables(one.invars) - made}
    results, one = [], jnp.float32(1)
    for _ in range(count):
        # XLA does not know that this is 1, so it cannot merge what is computed from it.
        one = lax.optimization_barrier(one)
        values = {atom: _times(x, one) for atom, x in given.items()}
        for equation in chain:
            ins = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in equation.invars]
            values |= dict(zip(equation.outvars, bind(equation, ins), strict=True))
        results.append(values[var])
    return results


def _times(x: Array, one: Array) -> Array:
    return x * one.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _chain(jaxpr: core.Jaxpr, reader: core.JaxprEqn, var: core.Var) -> list[core.JaxprEqn]:
    """The elementwise equations before a variable that only each other and ``reader`` read."""
    readers: dict[Any, set[int]] = defaultdict(set)
    for equation in jaxpr.eqns:
        for read in _variables(equation.invars):
            readers[read].add(id(equation))
    for returned in _variables(jaxpr.outvars):
        readers[returned].add(id(jaxpr))
    chain: list[core.JaxprEqn] = []
    inside, wanted = {id(reader)}, {var}
    for equation in reversed(jaxpr.eqns):
        outs = set(equation.outvars)
        if wanted & outs and all(readers[out] <= inside for out in outs) and _is_elementwise(equation):
            chain.insert(0, equation)
            inside.add(id(equation))
            wanted |= _variables(equation.invars)
    return chain


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, core.Literal)}


def _is_elementwise(equation: core.JaxprEqn) -> bool:
    match equation.primitive.name:
        case name if name in _CALLS:
            inner = core.jaxprs_in_params(equation.params)
            return all(_is_elementwise(own) for jaxpr in inner for own in jaxpr.eqns)
        case "broadcast_in_dim":
            return equation.invars[0].aval.shape == ()
        case name:
            return name in _ELEMENTWISE
