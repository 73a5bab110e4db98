"""Activations are computed anew, bit by bit, where nothing else reads what they are made of."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from zerojax.matmul.recompute import bind, recomputed

W = jnp.eye(8, 6)
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))

# What comes before the last product of a module, and which of its operations are computed anew.
FUNCTIONS = {
    "gelu": (lambda x: jax.nn.gelu(x @ jnp.eye(8)) @ W, {"tanh"}),
    "silu": (lambda x: (jax.nn.silu(x @ jnp.eye(8)) * jnp.sort(x)) @ W, {"logistic"}),
    "custom vjp": (lambda x: doubled(jnp.exp(x)) @ W, {"custom_vjp_call", "exp"}),
    "mask": (lambda x: jnp.where(x > 0, jnp.exp(x), 0.5) @ W, {"exp", "gt", "select_n"}),
    "bias": (lambda x: jnp.exp(x + jnp.arange(8.0)) @ W, {"add", "exp"}),
    "rows": (lambda x: jnp.sin(x).reshape(2, 2, 8) @ W, {"sin", "reshape"}),
    "normalised": (lambda x: (x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True))) @ W, {"rsqrt"}),
    "read elsewhere": (lambda x: ((y := jnp.exp(x)) @ W) + jnp.sum(y), set()),
    "returned": (lambda x: ((y := jnp.exp(x)) @ W, y), set()),
    "partly read elsewhere": (lambda x: (jnp.tanh(y := jnp.exp(x)) @ W) + jnp.sum(y), {"tanh"}),
    "argument": (lambda x: x @ W, set()),
    "not elementwise": (lambda x: jnp.sort(x) @ W, set()),
    "loop": (lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x) @ W, set()),
}


def replayed(function, x):
    """The first operand of the last product in a function of ``x``, and the same computed anew, twice."""
    traced = jax.make_jaxpr(function)(x)
    jaxpr = traced.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, x], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    last = [equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general"][-1]
    for equation in jaxpr.eqns[: jaxpr.eqns.index(last)]:
        values |= dict(zip(equation.outvars, bind(equation, [*map(read, equation.invars)]), strict=True))
    var = last.invars[0]
    return read(var), recomputed(jaxpr, last, var, read, 2)


def operations(jaxpr):
    """How often each stands in a program."""
    inside = (sub for equation in jaxpr.eqns for sub in core.jaxprs_in_params(equation.params))
    own = Counter(equation.primitive.name for equation in jaxpr.eqns)
    return sum(map(operations, inside), own)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operand_is_computed_anew_from_what_only_it_reads(name):
    function, anew = FUNCTIONS[name]
    given, again = replayed(function, X)
    assert len(again) == 2
    for one in again:
        np.testing.assert_array_equal(one, given, strict=True)
    found = operations(jax.make_jaxpr(lambda x: replayed(function, x))(X).jaxpr)
    assert {op for op in anew if found[op] % 3} == set()
    assert found["optimization_barrier"] == (2 if anew else 0)
    assert {found[op] for op in ("sort", "reduce_sum", "while", "scan")} <= {0, 1}


def test_no_gradient_flows_into_copies():
    def loss(x, which):
        given, again = replayed(FUNCTIONS["gelu"][0], x)
        return jnp.sum(again[0] * again[1] if which == "copies" else given)

    assert jnp.any(jax.grad(loss)(X, "operand"))
    assert not jnp.any(jax.grad(loss)(X, "copies"))
