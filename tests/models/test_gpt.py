import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from grids import grid
from model_shapes import GEMMA, LLAMA, MIXED, OLMO, PARALLEL

from zerojax.errors import ZeroError
from zerojax.models import GPT, GPTConfig, lm_loss

SMALL: dict[str, Any] = {
    "vocab_size": 37, "layers": 3, "d_model": 16, "heads": 4, "max_seq_len": 12, "init_std": 0.2
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {"mlp": "relu"},
    "llama": LLAMA,
    "gemma": GEMMA,
    "olmo": OLMO,
    "mixed": MIXED,
    "parallel": PARALLEL,
}
EACH = pytest.mark.parametrize("family", FAMILIES)


def make(**settings: Any) -> Any:
    return GPT(GPTConfig(**(SMALL | settings)), rngs=nnx.Rngs(0))


def draw_tokens(batch=2, time=12):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, SMALL["vocab_size"])


@nnx.jit
def logits_of(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


@functools.cache
def computed(family: str) -> tuple[Any, jax.Array]:
    """A model of a family, not to be changed, and its logits."""
    model = make(**FAMILIES[family])
    return model, logits_of(model, draw_tokens())


@EACH
def test_logits_are_fp32_of_the_expected_shape(family):
    _, logits = computed(family)
    assert logits.shape == (2, 12, 37)
    assert logits.dtype == jnp.float32
    assert bool(jnp.all(jnp.isfinite(logits)))


@EACH
def test_future_tokens_do_not_change_past_logits(family):
    (model, before), tokens = computed(family), draw_tokens()
    after = logits_of(model, tokens.at[:, 7].set((tokens[:, 7] + 1) % 37))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("family", grid(FAMILIES, "gpt2", "mixed"))
def test_a_scanned_stack_computes_what_a_list_of_blocks_computes(family):
    (scanned, logits), listed = computed(family), make(**FAMILIES[family], scan=False)
    stacked = nnx.state(scanned.blocks.block, nnx.Param)
    for i, block in enumerate(listed.blocks):
        nnx.update(block, jax.tree.map(lambda x, i=i: x[i], stacked))
    for name in {"embed", "position", "norm", "head"} & set(vars(scanned)):
        nnx.update(getattr(listed, name), nnx.state(getattr(scanned, name)))
    np.testing.assert_allclose(logits_of(listed, draw_tokens()), logits, atol=2e-5)


@pytest.mark.parametrize("family", grid(FAMILIES, "gpt2", "gemma"))
def test_half_precision_weights_compute_in_half_precision(family):
    (model, exact), tokens = computed(family), draw_tokens()
    graph, params = nnx.split(model)
    half = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    assert nnx.eval_shape(lambda model: model.hidden(tokens), half).dtype == jnp.bfloat16
    logits = logits_of(half, tokens)
    assert logits.dtype == jnp.float32
    assert float(jnp.max(jnp.abs(logits - exact))) < 0.05 * float(jnp.max(jnp.abs(exact)))


@pytest.mark.slow
def test_a_tied_embedding_gets_both_gradients():
    tied, untied = make(), make(tied=False)
    # The same numbers, once in one matrix and once in two.
    for name in ("embed", "position", "blocks", "norm"):
        nnx.update(getattr(untied, name), nnx.state(getattr(tied, name)))
    nnx.update(untied.head, nnx.state(tied.embed))
    batch = {"tokens": draw_tokens(time=13)}

    def gradients(model):
        return nnx.grad(lambda m: lm_loss(m, batch)[0])(model)

    one, two = gradients(tied), gradients(untied)
    total = two["embed"]["embedding"][...] + two["head"]["embedding"][...]
    np.testing.assert_allclose(one["embed"]["embedding"][...], total, atol=1e-6)
    assert float(jnp.linalg.norm(two["embed"]["embedding"][...])) > 1e-3
    assert float(jnp.linalg.norm(two["head"]["embedding"][...])) > 1e-3


def test_embedding_gradients_of_bf16_weights_are_summed_in_fp32():
    # 1000 equal tokens: a bf16 sum of ones stops growing at 256.
    model = make(positions="rope", max_seq_len=1000)
    graph, params = nnx.split(model)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def total(params):
        x, _ = nnx.merge(graph, params).embed_tokens(jnp.full((1, 1000), 5), jnp.arange(1000), 1000)
        return jnp.sum(x)

    gradient = jax.grad(total)(params)["embed"]["embedding"][...]
    np.testing.assert_array_equal(np.asarray(gradient[5], np.float32), 1000.0)
    assert float(jnp.sum(jnp.abs(gradient[6]))) == 0


def test_dropout_is_off_without_rngs_and_differs_between_layers_and_steps():
    model, tokens = make(dropout=0.5), draw_tokens()
    np.testing.assert_array_equal(model(tokens), model(tokens))
    first, again, other = (model(tokens, rngs=nnx.Rngs(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    model.eval()
    np.testing.assert_array_equal(model(tokens, rngs=nnx.Rngs(1)), model(tokens))
    # With all weights of the blocks but the output biases gone, each branch adds exactly 1 or 0 / keep.
    probe = make(dropout=0.5, layers=2)
    nnx.update(probe.blocks, jax.tree.map(jnp.zeros_like, nnx.state(probe.blocks, nnx.Param)))
    probe.blocks.block.attention.out.bias[...] = jnp.ones((2, 16))
    x = probe.blocks(jnp.zeros((64, 12, 16)), None, jax.random.key(0), by_layer={"layer": jnp.arange(2)})
    # Both layers of a half of the elements, one of a quarter each: masks of different layers are independent.
    shares = [float(jnp.mean(x == 2.0 * count)) for count in range(3)]
    np.testing.assert_allclose(shares, (0.25, 0.5, 0.25), atol=0.02)


def test_the_loss_and_its_gradient_have_the_heads_bias():
    """Which the divisor of the logits divides, too."""
    model, tokens = make(**PARALLEL, layers=1, logit_divisor=2.0), draw_tokens()
    model.head.bias[...] = jax.random.normal(jax.random.key(5), (37,))
    graph, params = nnx.split(model)

    def by_logits(params):
        scores = jax.nn.log_softmax(nnx.merge(graph, params)(tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    def by_chunks(params):
        return lm_loss(nnx.merge(graph, params), {"tokens": tokens})[0]

    plain = model.head.bias[...]
    run = nnx.jit(lambda model: model(tokens))
    scores = run(model)
    model.head.bias[...] = jnp.zeros(37)
    np.testing.assert_allclose(scores - run(model), jnp.broadcast_to(plain / 2, scores.shape), atol=1e-5)
    expected, found = (jax.jit(jax.value_and_grad(loss))(params) for loss in (by_logits, by_chunks))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    assert float(jnp.max(jnp.abs(found[1]["head"]["bias"][...]))) > 1e-3


def test_a_sequence_longer_than_the_model_is_refused():
    with pytest.raises(ZeroError, match="13 tokens, but max_seq_len = 12"):
        make()(draw_tokens(time=13))


def test_the_initial_loss_is_the_loss_of_a_uniform_guess():
    model = make(init_std=0.02)
    loss, aux = lm_loss(model, {"tokens": draw_tokens(time=13)})
    assert float(loss) == pytest.approx(np.log(37), abs=0.05)
    assert float(aux["tokens"]) == 24
