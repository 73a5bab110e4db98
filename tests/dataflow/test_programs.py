"""Programs are evaluated and rewritten under the names that they have."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from zerojax.comm.in_order import rewritten
from zerojax.dataflow import as_it_is, called, equations_within, evaluate

X = np.arange(1.0, 4.0, dtype=np.float32)


def program(x, flag=True):
    with jax.named_scope("outside"):
        y = jax.jit(jnp.sin)(x) + X
    return {"y": y, "same": x, "flag": jnp.logical_and(flag, True), "nothing": None}


def squared(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program with the square of each sine's argument in place of the sine."""

    def other(equation):
        if equation.primitive.name == "jit":
            return equation.replace(params=equation.params | {"jaxpr": squared(equation.params["jaxpr"])})
        if equation.primitive.name != "sin":
            return equation
        (x,) = equation.invars
        (square,) = jax.make_jaxpr(lambda x: x * x)(x.aval).jaxpr.eqns
        return square.replace(invars=[x, x], outvars=equation.outvars)

    return jaxpr.replace(eqns=list(map(other, jaxpr.eqns)))


def test_evaluation_has_the_values_and_names_of_the_program():
    traced, shapes = jax.make_jaxpr(program, return_shape=True)(X)

    def run(x):
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(traced, [x], as_it_is))

    jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(X), program(X))
    assert "outside" in jax.jit(run).lower(X).as_text(debug_info=True)


def test_a_rewritten_function_computes_what_the_new_program_does():
    found = jax.jit(rewritten(program, squared))(X)
    jax.tree.map(np.testing.assert_array_equal, found, program(X) | {"y": X * X + X})


def test_a_rewritten_function_is_no_call_of_another():
    def names(function):
        return [equation.primitive.name for equation in jax.make_jaxpr(function)(X).jaxpr.eqns]

    assert names(rewritten(program, lambda jaxpr: jaxpr)) == names(program)
    assert "outside" in jax.jit(rewritten(program, squared)).lower(X).as_text(debug_info=True)


def test_a_rewritten_function_may_close_over_values_of_the_trace_around_it():
    def outer(x):
        return rewritten(lambda y: jnp.sin(y) + x, squared)(2 * x)

    np.testing.assert_array_equal(jax.jit(outer)(X), 4 * X * X + X)


def test_calls_with_derivatives_of_their_own_are_told_apart():
    relu = jax.make_jaxpr(jax.nn.relu)(X).jaxpr  # jit of custom_jvp_call
    with_rule = [one for one in equations_within(relu) if one.primitive.name == "custom_jvp_call"]
    assert [called(one) for one in with_rule] == [None]
    assert called(with_rule[0], with_rule=True) is next(core.jaxprs_in_params(with_rule[0].params))
    assert all(called(one) is not None for one in relu.eqns if one.primitive.name == "jit")
