"""Matmuls are found wherever a module's weight meets one, and all other uses of the weight refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matmuls import CUBE, MATMULS, exact, operand, twice

import zerojax
from zerojax.matmul.operand import Fp8Operand, LayerOperand
from zerojax.matmul.replay import at_matmuls

NARROW = jnp.float8_e4m3fn


@pytest.mark.parametrize("name", MATMULS)
def test_a_matmul_is_found(name):
    """Of integers that fp8 holds: the result is that of the module itself, bit by bit."""
    body = MATMULS[name]
    w, x = exact(1, 16, 32), exact(2, *CUBE)

    def run(weights, x):
        return body(weights[0], x)

    wanted = run((w,), x)
    traced = jax.make_jaxpr(lambda code, x: at_matmuls(run)((code,), x))(operand(w), x)
    found = jax.jit(lambda code, x: at_matmuls(run)((code,), x))(operand(w), x)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        within = {"used twice": 0.08, "cast": 2**-8, "nnx.Linear": 2**-8}.get(name, 1e-6)
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (mine, theirs)), rtol=within, atol=within * 40
        )
    assert "f8_e4m3" in str(traced)


@pytest.mark.parametrize("name", [name for name in MATMULS if name != "read whole"])
def test_nothing_is_fused_into_the_product_of_a_layer_in_its_stack(name):
    body, w, x = MATMULS[name], exact(1, 16, 32), exact(2, *CUBE)

    def run(weights, x):
        return body(weights[0], x)

    found, traced = (f(at_matmuls(run))((LayerOperand(w),), x) for f in (jax.jit, jax.make_jaxpr))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(run((w,), x)), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (mine, theirs)), rtol=1e-5)
    assert str(traced).count("optimization_barrier") == str(traced).count("dot_general[") > 0


def test_a_layer_in_its_stack_is_an_array_to_all_but_products():
    w, x = exact(1, 16, 16), exact(2, *CUBE)[..., :16]

    def run(weights, x):
        (w,) = weights
        return (x + w[0]) @ w, jnp.take(w, jnp.asarray([3, 1]), axis=0), w

    found = jax.jit(at_matmuls(run))((LayerOperand(w),), x)
    for mine, theirs in zip(found, run((w,), x), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "name",
    ["transposed", "flipped", "two contracted axes", "contracted out of order", "split", "qkv", "sliced"],
)
def test_the_gradient_of_what_was_moved_is_moved_back(name):
    body, w, x = MATMULS[name], exact(1, 16, 32), exact(2, *CUBE)

    def loss(run, weights, x):
        """Linear, with small integers as cotangents."""
        outs = jax.tree.leaves(run(weights, x))
        return sum(jnp.sum(out * exact(i, *out.shape)) for i, out in enumerate(outs))

    def run(weights, x):
        return body(weights[0], x)

    def in_fp8(gradient, x):
        code = operand(w)
        return loss(at_matmuls(run), (Fp8Operand(code.codes, gradient, code.scale, code.name),), x)

    wanted = jax.jit(jax.grad(lambda w, x: loss(run, (w,), x), (0, 1)))(w, x)
    found = jax.jit(jax.grad(in_fp8, (0, 1)))(jnp.zeros_like(w), x)
    # Cotangents of 2 or 3 rows are sums; e5m2 holds integers up to 8.
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def double(w):
    return w * 2


REFUSED = {
    "mul": lambda w, x: x @ double(w),
    "scan": lambda w, x: lax.scan(lambda c, row: (c + row, None), x[0, 0, 0] * jnp.ones(32), w)[0],
    "dot_general": lambda w, x: jnp.einsum("btk,kn->kbn", x, w),
    "reduce_sum": lambda w, x: x @ jax.jit(lambda w: w - jnp.mean(w))(w),
    "convert_element_type": lambda w, x: x @ w.astype(jnp.int32),
    "dynamic_slice": lambda w, x: x[..., :4] @ lax.dynamic_slice_in_dim(w, x[0, 0, 0].astype(int), 4),
    "concatenate": lambda w, x: x @ jnp.concatenate([w, w], axis=1),
    "cond": lambda w, x: lax.cond(x[0, 0, 0] > 0, lambda: x @ w, lambda: x @ -w),
    "is returned by its unit": lambda w, x: (x @ w, w.T),
    "custom_vjp_call": lambda w, x: x @ twice(w),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_weight_that_is_read_elsewhere_is_refused(how):
    """By its name, the line that reads it, and the pattern that leaves it out."""
    body, (w, other, x) = REFUSED[how], (exact(1, 16, 32), exact(3, 32, 16), exact(2, *CUBE))

    def run(weights, x):
        return body(weights[0], x @ weights[1] @ weights[1].T)

    given = (operand(w, "stack/mlp/up/kernel"), other.T)
    with pytest.raises(zerojax.ZeroError) as refused:
        jax.eval_shape(at_matmuls(run), given, x)
    message = str(refused.value)
    assert how in message
    assert "'stack/mlp/up/kernel'" in message
    assert "ZeroConfig(fp8=(..., '!stack/mlp/up/kernel'))" in message
    assert "returned" in how or "test_replay.py" in message
    if how == "mul":
        assert f"test_replay.py:{double.__code__.co_firstlineno + 1}" in message


def test_two_weights_are_no_matmul_of_one():
    run = at_matmuls(lambda weights, x: x @ (weights[0] @ weights[1]))
    with pytest.raises(zerojax.ZeroError, match=r"'a' .* read by dot_general"):
        jax.eval_shape(run, (operand(exact(1, 16, 8), "a"), operand(exact(2, 8, 16), "b")), exact(3, *CUBE))


def test_without_operands_the_body_is_called_as_it_is():
    calls: list[Any] = []

    def body(weights, *args):
        calls.append((weights, args))
        return "anything"

    w = jnp.ones((2, 2))
    assert at_matmuls(body)((w,), 1, "text") == "anything"
    ((weights, args),) = calls
    assert weights[0] is w
    assert args == (1, "text")


def test_what_a_module_names_and_prints_stays():
    """Profiles show the module's scopes; callbacks run; results may be None."""
    seen: list[float] = []

    def body(weights, x, nothing):
        with jax.named_scope("mlp"):
            out = x @ weights[0]
        jax.debug.callback(lambda x: seen.append(float(x)), out.sum())
        return {"out": out, "none": nothing, "constant": 3}

    run = functools.partial(at_matmuls(body), (operand(jnp.eye(16)),), jnp.ones(CUBE), None)
    lowered = jax.jit(run).lower()
    assert "mlp" in lowered.as_text(debug_info=True)
    found = lowered.compile()()
    jax.effects_barrier()
    assert (found["none"], found["constant"]) == (None, 3)
    assert seen == [found["out"].sum()]


def test_a_unit_s_own_rematerialisation_stays():
    policy = jax.checkpoint_policies.nothing_saveable

    def body(weights, x):
        return jax.checkpoint(lambda w, x: jnp.sin(x @ w), policy=policy, prevent_cse=False)(weights[0], x)

    weight = operand(exact(1, 16, 8))
    traced = jax.make_jaxpr(lambda x: at_matmuls(body)((weight,), x))(exact(3, *CUBE))
    (found,) = (equation.params for equation in traced.jaxpr.eqns if "policy" in equation.params)
    assert (found["policy"], found["prevent_cse"]) == (policy, False)
