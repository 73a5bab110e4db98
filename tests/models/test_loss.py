import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from grids import grid

from zerojax.dataflow import equations_within
from zerojax.errors import ZeroError
from zerojax.models import GPT, GPTConfig, cross_entropy, label_log_probs, lm_loss

TOKENS, WIDTH, VOCAB = 50, 8, 23


def case(dtype=jnp.float32):
    rows, weight, labels = (jax.random.key(i) for i in range(3))
    return (
        jax.random.normal(rows, (TOKENS, WIDTH), dtype),
        jax.random.normal(weight, (VOCAB, WIDTH), dtype),
        jax.random.randint(labels, (TOKENS,), 0, VOCAB).at[jnp.array([0, 17, 49])].set(-1),
    )


def plain(hidden, unembedding, labels, softcap=None):
    logits = hidden.astype(jnp.float32) @ unembedding.astype(jnp.float32).T
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.sum(losses * (labels >= 0)) / jnp.sum(labels >= 0)


@pytest.mark.parametrize(
    ("chunk", "softcap"),
    grid(
        [(1, None), (7, None), (16, None), (25, None), (50, None), (64, None), (16, 2.0)],
        *((1, None), (25, None), (64, None), (16, 2.0)),
    ),
)
def test_value_and_gradients_are_the_plain_ones(chunk, softcap):
    hidden, unembedding, labels = case()
    run = functools.partial(cross_entropy, chunk=chunk, softcap=softcap)
    (loss, count), gradients = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(
        hidden, unembedding, labels
    )
    expected, expected_gradients = jax.jit(
        jax.value_and_grad(functools.partial(plain, softcap=softcap), argnums=(0, 1))
    )(hidden, unembedding, labels)
    assert float(count) == 47
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)) < 1e-6
    # Without a gradient another path computes the value.
    np.testing.assert_allclose(jax.jit(run)(hidden, unembedding, labels)[0], expected, rtol=1e-6)


def test_bf16_operands_keep_their_dtype_and_accumulate_in_fp32():
    hidden, unembedding, labels = case(jnp.bfloat16)
    run = functools.partial(cross_entropy, chunk=16)
    (loss, _), gradients = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(
        hidden, unembedding, labels
    )
    exact, exact_gradients = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(
        hidden.astype(jnp.float32), unembedding.astype(jnp.float32), labels
    )
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(float(exact), rel=1e-5)
    for ours, theirs in zip(gradients, exact_gradients, strict=True):
        assert ours.dtype == jnp.bfloat16
        assert float(jnp.linalg.norm(ours.astype(jnp.float32) - theirs) / jnp.linalg.norm(theirs)) < 1e-2


def test_huge_logits_do_not_overflow():
    hidden, unembedding, labels = case()
    loss, _ = cross_entropy(1000 * hidden, unembedding, labels)
    np.testing.assert_allclose(loss, plain(1000 * hidden, unembedding, labels), rtol=1e-6)


def test_no_counted_token_is_a_loss_of_zero():
    hidden, unembedding, labels = case()
    (loss, count), gradient = jax.jit(jax.value_and_grad(cross_entropy, has_aux=True))(
        hidden, unembedding, jnp.full_like(labels, -1)
    )
    assert (float(loss), float(count)) == (0, 0)
    assert not np.any(gradient)


def test_a_label_outside_the_vocabulary_is_nan():
    hidden, unembedding, labels = case()
    assert np.isnan(cross_entropy(hidden, unembedding, labels.at[3].set(VOCAB))[0])


def test_any_negative_label_does_not_count():
    hidden, unembedding, labels = case()
    run = jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1), has_aux=True))
    ours = run(hidden, unembedding, jnp.where(labels < 0, -100, labels))
    jax.tree.map(np.testing.assert_array_equal, ours, run(hidden, unembedding, labels))
    assert not np.any(label_log_probs(hidden, unembedding, jnp.full_like(labels, -100)))


def widest_fp32(function, *args):
    """The most elements of any fp32 value in the program."""
    equations = equations_within(jax.make_jaxpr(function)(*args).jaxpr)
    values: list[Any] = [v.aval for one in equations for v in one.outvars]
    return max(value.size for value in values if value.dtype == jnp.float32)


def test_logits_exist_for_one_chunk_only():
    tokens, width, vocab, chunk = 512, 4, 64, 32
    args = jnp.zeros((tokens, width)), jnp.zeros((vocab, width)), jnp.zeros(tokens, jnp.int32)

    def loss(hidden, unembedding, labels):
        return cross_entropy(hidden, unembedding, labels, chunk=chunk)[0]

    assert widest_fp32(jax.grad(loss, argnums=(0, 1)), *args) == chunk * vocab
    assert widest_fp32(jax.grad(plain, argnums=(0, 1)), *args) == tokens * vocab


def test_wrong_shapes_are_refused():
    hidden, unembedding, labels = case()
    with pytest.raises(ZeroError, match="chunk = 0"):
        cross_entropy(hidden, unembedding, labels, chunk=0)
    with pytest.raises(ZeroError, match="expected"):
        cross_entropy(hidden, unembedding, labels[:-1])
    with pytest.raises(ZeroError, match="expected"):
        cross_entropy(hidden[:, :-1], unembedding, labels)


def test_lm_loss_equals_the_loss_of_the_models_logits():
    config = GPTConfig(vocab_size=VOCAB, layers=1, d_model=8, heads=2, max_seq_len=6, loss_chunk=5)
    model = GPT(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (3, 7), 0, VOCAB).at[1, 4:].set(-1)
    loss, aux = nnx.jit(lm_loss)(model, {"tokens": tokens})
    plain_scores = nnx.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))
    scores, tokens = map(np.asarray, (plain_scores(model, jnp.maximum(tokens[:, :-1], 0)), tokens))
    picked = [scores[b, t, tokens[b, t + 1]] for b in range(3) for t in range(6) if tokens[b, t + 1] >= 0]
    assert float(aux["tokens"]) == len(picked) == 15
    assert float(loss) == pytest.approx(-float(np.mean(picked)), rel=1e-5)


@pytest.mark.parametrize("batch", [{}, {"tokens": jnp.zeros((2, 1), int)}, {"tokens": jnp.zeros(5, int)}])
def test_a_batch_without_token_rows_is_refused(batch):
    model = GPT(GPTConfig(vocab_size=4, layers=1, d_model=4, heads=1), rngs=nnx.Rngs(0))
    with pytest.raises(ZeroError, match="tokens"):
        lm_loss(model, batch)


@pytest.mark.parametrize(
    ("chunk", "softcap", "temperature"), [(7, None, 1.0), (64, None, 0.7), (16, 2.0, 1.5)]
)
def test_log_probs_of_labels_and_their_gradients(chunk, softcap, temperature):
    hidden, unembedding, labels = case()
    factors = jax.random.normal(jax.random.key(9), labels.shape)

    def ours(hidden, unembedding):
        found = label_log_probs(
            hidden, unembedding, labels, chunk=chunk, softcap=softcap, temperature=temperature
        )
        return jnp.sum(factors * found), found

    def theirs(hidden, unembedding):
        scores = hidden @ unembedding.T
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        every = jax.nn.log_softmax(scores / temperature)
        found = jnp.where(labels >= 0, every[jnp.arange(TOKENS), labels], 0)
        return jnp.sum(factors * found), found

    both = [jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(hidden, unembedding) for f in (ours, theirs)]
    for found, expected in zip(*map(jax.tree.leaves, both), strict=True):
        assert float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)) < 2e-6


def test_log_probs_need_a_temperature_above_zero():
    with pytest.raises(ZeroError, match="temperature = 0"):
        label_log_probs(*case(), temperature=0)
