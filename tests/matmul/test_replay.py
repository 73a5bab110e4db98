"""Matmuls are found wherever a module's weight meets one, and all other uses of the weight refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import zerojax
from zerojax.matmul import fp8
from zerojax.matmul.operand import Codes, Fp8Operand
from zerojax.matmul.replay import at_matmuls

NARROW = jnp.float8_e4m3fn
CUBE = (4, 2, 16)
"""Batch, time, width: of the activations."""


def exact(seed: int, *shape: int) -> jax.Array:
    """Numbers whose products and sums are exact in fp8 matmuls: small integers."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def operand(weight: jax.Array, name: str = "block/w") -> Fp8Operand:
    scale = fp8.scale_for(jnp.max(jnp.abs(weight)), fp8.E4M3)
    return Fp8Operand(*Codes.of(fp8.encode(weight, scale), weight.dtype), scale, name)


class Dense(nnx.Module):
    """As Flax calls its matmul, with a cast and a bias."""

    def __init__(self):
        self.linear = nnx.Linear(16, 32, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)


def through_nnx(w, x):
    graph, _, rest = nnx.split(Dense(), nnx.Param, ...)
    params = nnx.State({"linear": {"kernel": nnx.Param(w), "bias": nnx.Param(jnp.ones(32))}})
    return nnx.merge(graph, params, rest).linear(x)


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))


def loop(w, x):
    """Around its matmuls a module may do anything."""
    x = lax.scan(lambda c, i: (c + i, None), x @ w, jnp.arange(3.0))[0]
    x = lax.while_loop(lambda c: jnp.sum(c) < 0, jnp.abs, x)
    x = lax.cond(jnp.sum(x) > 0, lambda x: x, lambda x: -x, x)
    return twice(jax.nn.relu(x)) + jax.random.uniform(jax.random.key(3), x.shape)


MATMULS = {
    "dot": lambda w, x: jnp.dot(x, w),
    "matmul": lambda w, x: x @ w,
    "transposed": lambda w, x: jnp.swapaxes(w.T @ jnp.swapaxes(x, 1, 2), 1, 2),
    "flipped": lambda w, x: jnp.einsum("kn,btk->btn", w, x),
    "tensordot": lambda w, x: jnp.tensordot(w, x, axes=((0,), (2,))),
    "weight of two free axes": lambda w, x: jnp.einsum("btk,khd->bthd", x, w.reshape(16, 4, 8)),
    "weight of two free axes, first": lambda w, x: jnp.einsum("khd,btk->hbdt", w.reshape(16, 4, 8), x),
    "two contracted axes": lambda w, x: jnp.einsum(
        "bthd,hdn->btn", x.reshape(4, 2, 4, 4), w.reshape(4, 4, 32)
    ),
    "contracted out of order": lambda w, x: lax.dot_general(
        x.reshape(4, 2, 4, 4), w.reshape(4, 4, 32).transpose(1, 0, 2), (((3, 2), (0, 1)), ((), ()))
    ),
    "one row": lambda w, x: x[0, 0] @ w,
    "split": lambda w, x: [x @ part for part in jnp.split(w, [16, 24], axis=1)],
    "qkv": lambda w, x: [x @ w.reshape(16, 2, 16)[:, i] for i in range(2)],
    "sliced": lambda w, x: x[..., :8] @ w[4:12, ::2],
    "reversed": lambda w, x: x @ lax.rev(w, (0,)),
    "cast": lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
    "wider sum": lambda w, x: jnp.dot(
        x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    ),
    "used twice": lambda w, x: jnp.tanh(x @ w) @ w.T,
    "nested jit": lambda w, x: jax.jit(lambda w, x: jax.jit(jnp.dot)(x, w))(w.T.T, x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x),
    "vmap": lambda w, x: jax.vmap(jax.vmap(lambda row: row @ w))(x),
    "vmap over columns": lambda w, x: jax.vmap(lambda column: x @ column, in_axes=1)(w),
    "nnx.Linear": through_nnx,
    "among loops and random numbers": loop,
}


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

    wanted = jax.grad(lambda w, x: loss(run, (w,), x), (0, 1))(w, x)
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

    w = np.ones((2, 2))
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
