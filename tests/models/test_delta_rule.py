"""The gated delta rule: chunked against token by token, with documents, gradients and states."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_delta_rule
import pytest
from grids import grid

from pallas_kernels.delta_chunks_reference import CHUNK
from zerojax.models.delta_rule import gated_delta_rule, last_inputs, short_convolution

BATCH, KEY_HEADS, HEADS, DIM, WIDTH = 2, 2, 4, 8, 6


RULES = ("delta", "mamba2", "kimi")
TIMES = (1, 40, 2 * CHUNK, 2 * CHUNK + 37)
# Mamba 2 is the delta rule without its correction.
EACH = pytest.mark.parametrize("rule", grid(RULES, "delta", "kimi"))


def inputs(time: int, seed: int = 0, *, rule: str = "delta") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(2, BATCH, time, KEY_HEADS, DIM))
    decays = (BATCH, time, HEADS, *[DIM][: rule == "kimi"])
    return {
        "query": query / DIM,
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.normal(size=(BATCH, time, HEADS, WIDTH)),
        "log_decay": -rng.exponential(size=decays) / 4,
        "beta": None if rule == "mamba2" else rng.uniform(size=(BATCH, time, HEADS)),
    }


def documents_of(time: int) -> np.ndarray:
    """Documents of all lengths: of one token, across chunks, and one that ends with a chunk."""
    ends = np.array([[1, 2, 50, CHUNK, 100], [3, CHUNK - 1, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1]])
    return (np.arange(time)[None, None] >= ends[..., None]).sum(1).astype(np.int32)


def by_token(given: dict[str, Any], numbers: np.ndarray) -> np.ndarray:
    begins = np.diff(numbers, axis=1, prepend=-1) != 0
    heads = np.empty_like(given["value"])
    for row in range(BATCH):
        for head in range(HEADS):
            own = head * KEY_HEADS // HEADS
            q, k = given["query"][row, :, own], given["key"][row, :, own]
            value, log_decay = (given[name][row, :, head] for name in ("value", "log_decay"))
            beta = None if given["beta"] is None else given["beta"][row, :, head]
            heads[row, :, head] = plain_delta_rule.gated_delta_rule(q, k, value, log_decay, beta, begins[row])
    return heads


def fp32(given: dict[str, Any]) -> dict[str, Any]:
    return {name: None if x is None else x.astype(np.float32) for name, x in given.items()}


@pytest.mark.parametrize(
    ("rule", "time"),
    grid(
        itertools.product(RULES, TIMES),
        *(("delta", time) for time in TIMES),
        *((rule, TIMES[-1]) for rule in RULES),
    ),
)
def test_chunks_give_the_result_of_single_tokens(rule, time):
    given = inputs(time, rule=rule)
    for numbers in (np.zeros((BATCH, time), np.int32), documents_of(time))[: 1 if time == 1 else 2]:
        out, _ = jax.jit(gated_delta_rule)(**fp32(given), documents=jnp.asarray(numbers))
        np.testing.assert_allclose(out, by_token(given, numbers), atol=3e-6)
    low = fp32(given) | {name: jnp.asarray(given[name], jnp.bfloat16) for name in ("query", "key", "value")}
    rounded, _ = jax.jit(gated_delta_rule)(**low)
    wanted = by_token(given, np.zeros((BATCH, time), np.int32))
    assert np.linalg.norm(np.asarray(rounded, np.float32) - wanted) < 0.02 * np.linalg.norm(wanted)


def test_equal_keys_that_replace_each_other_stay_exact():
    """The system's matrix is then all ones below its diagonal, whose powers would overflow fp32."""
    given = inputs(CHUNK)
    given["key"][:] = given["key"][:, :1]
    given["beta"][:], given["log_decay"][:] = 1, 0
    out, _ = jax.jit(gated_delta_rule)(**fp32(given))
    np.testing.assert_allclose(out, by_token(given, np.zeros((BATCH, CHUNK), np.int32)), atol=1e-5)


@EACH
def test_gradients_equal_the_gradients_of_single_tokens(rule):
    time, numbers = CHUNK + 9, documents_of(CHUNK + 9)
    given, begins = fp32(inputs(time, rule=rule)), jnp.asarray(np.diff(numbers, axis=1, prepend=-1) != 0)
    seen = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, time, HEADS, WIDTH)), jnp.float32)

    def recurrent(given: dict[str, jax.Array]) -> jax.Array:
        def step(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
            begins, token = token
            state = jnp.where(begins[:, None, None, None], 0, state)
            single = jax.tree.map(lambda x: x[:, None], token)
            out, state = gated_delta_rule(**single, state=state)
            return state, out[:, 0]

        swapped = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (begins, given))
        _, out = jax.lax.scan(step, jnp.zeros((BATCH, HEADS, DIM, WIDTH)), swapped)
        return jnp.sum(jnp.swapaxes(out, 0, 1) * seen)

    def chunked(given: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(gated_delta_rule(**given, documents=jnp.asarray(numbers))[0] * seen)

    found, wanted = jax.jit(jax.grad(chunked))(given), jax.jit(jax.grad(recurrent))(given)
    for name, x in wanted.items():
        if x is not None:
            np.testing.assert_allclose(found[name], x, atol=2e-5, err_msg=name)


@EACH
def test_nothing_crosses_from_one_document_to_the_next(rule):
    """Exactly zero, in both directions, and even where the other document holds infinities."""
    time, numbers = 2 * CHUNK + 5, documents_of(2 * CHUNK + 5)
    given, kernel = fp32(inputs(time, rule=rule)), jax.random.normal(jax.random.key(0), (4, HEADS * WIDTH))
    chosen = jnp.asarray(numbers == 3)

    def out_of_document(value: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
        mixed = short_convolution(value.reshape(BATCH, time, -1), kernel, jnp.asarray(numbers))
        out, _ = gated_delta_rule(**given, value=mixed.reshape(value.shape), documents=jnp.asarray(numbers))
        return jnp.where(chosen[..., None, None], out, 0)

    @jax.jit
    def with_gradients(value: jax.Array, given: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        out, pull = jax.vjp(out_of_document, value, given)
        return out, pull(jnp.ones_like(out))

    value = given.pop("value")
    out, (of_value, of_given) = with_gradients(value, given)
    for gradient in jax.tree.leaves((of_value, of_given)):
        others = np.asarray(gradient)[~np.asarray(chosen)]
        assert np.all(others == 0)
        assert np.any(np.asarray(gradient) != 0)
    large, _ = with_gradients(jnp.where(chosen[..., None, None], value, 1e30), given)
    np.testing.assert_array_equal(large, out)


@EACH
def test_a_document_that_decays_fast_leaves_finite_gradients(rule):
    """Its sum of decays lies far below the next document's, and e to the difference is infinite."""
    given, numbers = fp32(inputs(CHUNK, rule=rule)), jnp.arange(CHUNK)[None].repeat(BATCH, 0) >= 40
    decays = given["log_decay"]
    given["log_decay"] = jnp.where(numbers.reshape(*numbers.shape, *(1,) * (decays.ndim - 2)), decays, -20.0)

    def total(given: dict[str, Any]) -> jax.Array:
        return jnp.sum(gated_delta_rule(**given, documents=numbers.astype(jnp.int32))[0] ** 2)

    for gradient in jax.tree.leaves(jax.jit(jax.grad(total))(given)):
        assert np.all(np.isfinite(gradient))


@EACH
def test_a_row_in_pieces_is_the_whole_row(rule):
    """The state and the last inputs of the convolution go from piece to piece, also after padding."""
    time, taps = CHUNK + 20, 4
    given, rule = fp32(inputs(time, rule=rule)), jax.jit(gated_delta_rule)
    whole, state = rule(**given)
    pieces: list[jax.Array] = []
    carried: Any = None
    for first, last in ((0, 30), (30, 31), (31, time)):
        own = jax.tree.map(lambda x, cut=slice(first, last): x[:, cut], given)
        out, carried = rule(**own, state=carried)
        pieces.append(out)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), whole, atol=1e-5)
    np.testing.assert_allclose(carried, state, atol=1e-5)

    x = given["value"].reshape(BATCH, time, -1)
    kernel = jax.random.normal(jax.random.key(0), (taps, x.shape[2]))
    padded, before = jnp.pad(x, ((0, 0), (0, 8), (0, 0))), jnp.zeros((BATCH, taps - 1, x.shape[2]))
    wanted, run = short_convolution(x, kernel), jax.jit(functools.partial(short_convolution, kernel=kernel))
    for first, count in ((0, 1), (1, 2), (3, time - 3)):
        piece = padded[:, first : first + count + 5]
        np.testing.assert_allclose(
            run(piece, before=before)[:, :count], wanted[:, first : first + count], rtol=1e-6, atol=1e-6
        )
        before = last_inputs(piece, before, jnp.full(BATCH, count))


def test_memory_grows_linearly_with_the_sequence():
    def temporaries(time: int) -> int:
        shapes = jax.eval_shape(lambda: fp32(inputs(time)))
        run = jax.jit(jax.grad(lambda given: jnp.sum(gated_delta_rule(**given)[0])))
        analysis = run.lower(shapes).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporaries(32 * CHUNK) < 2.2 * temporaries(16 * CHUNK)
