from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_shapes import GEMMA, LLAMA, MIXED, OLMO, PARALLEL

from zerojax.errors import ZeroError
from zerojax.generation import Sampling, stream
from zerojax.generation.sampling import sample
from zerojax.models import GPT, GPTConfig

SMALL: dict[str, Any] = {
    "vocab_size": 31, "layers": 2, "d_model": 16, "heads": 4, "max_seq_len": 24, "init_std": 0.3
}  # fmt: skip
LATENT = LLAMA | {
    "kv_heads": None, "head_width": 12, "latent_rank": 10, "latent_query_rank": 7, "latent_rope_width": 4,
    "latent_value_width": 6, "sliding_window": 6, "sliding_window_pattern": 2, "query_scalar": 5.0,
}  # fmt: skip
GREEDY = Sampling(temperature=0)
KEY = jax.random.key(0)


def make(**settings: Any) -> GPT:
    return GPT(GPTConfig(**(SMALL | settings)), rngs=nnx.Rngs(3))


def draw_prompt(length, batch=2):
    return jax.random.randint(jax.random.key(7), (batch, length), 0, SMALL["vocab_size"])


def generate(model, prompt, count, *, key=KEY, how=None, stop=None):
    return list(stream(model, np.asarray(prompt), count, key=key, how=how, stop=stop))


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        # One length of each family, two of a window.
        pytest.param(
            settings, length, id=f"{name}-{length}", marks=() if length in quick else pytest.mark.slow
        )
        for name, quick, settings in (
            ("gpt2", (17,), {}),
            ("llama", (), LLAMA | {"heads": 8, "kv_heads": 1, "head_width": 6}),
            ("list", (6,), {"scan": False, "position_offset": 2, "sliding_window": 5}),
            ("gemma", (17,), GEMMA),
            ("olmo", (), OLMO),
            ("latent", (6,), LATENT),
            ("parallel", (6,), PARALLEL),
            ("parallel-norms", (), PARALLEL | {"branches": "parallel", "scan": False}),
            (
                "mixed-list",
                (17,),
                MIXED | {"scan": False, "sliding_window": 5, "sliding_window_layers": (1,)},
            ),
        )
        for length in (1, 6, 17)
    ],
)
def test_greedy_text_with_a_cache_equals_the_full_forward_pass(settings, length):
    model, prompt = make(**settings), draw_prompt(length)[0]
    new = generate(model, prompt, 8, how=GREEDY)
    # If every token is the likeliest after those before it, the whole text is the greedy one. What stands
    # behind it, so that all lengths share a program, changes nothing before.
    text = np.concatenate([prompt, new[:-1]])
    scores = nnx.jit(GPT.__call__)(model, jnp.asarray(np.pad(text, (0, 24 - len(text))))[None])
    np.testing.assert_array_equal(new, jnp.argmax(scores[0, length - 1 : length + 7], axis=-1))


def test_text_goes_on_when_the_context_is_full():
    model, prompt = make(), draw_prompt(20)[0]
    text = generate(model, prompt, 40, how=GREEDY)
    assert len(text) == 40
    # 5 tokens fill the context of 24 (the last is not fed back); the next sees the last 12.
    window = np.concatenate([prompt, text[:5]])[-12:]
    assert text[5] == jnp.argmax(model(jnp.asarray(window)[None])[0, -1])


@pytest.mark.slow
def test_dynamic_rotary_scaling_takes_the_length_of_each_prompt():
    dynamic = {"rope_scaling": "dynamic", "rope_factor": 8.0, "rope_original_len": 4, "rope_theta": 10.0}
    model, prompt = make(**LLAMA, **dynamic), draw_prompt(9)
    padded = jnp.pad(prompt, ((0, 0), (0, 7)))
    expected = model.hidden(prompt)
    for end, same in ((9, True), (16, False)):
        cache = model.init_cache(2, 16, jnp.float32)
        hidden, _ = model.decode(padded, jnp.zeros(2, jnp.int32), jnp.array([9, end]), cache)
        assert np.allclose(hidden[0, :9], expected[0], atol=1e-5)
        assert np.allclose(hidden[1, :9], expected[1], atol=1e-5) == same


@pytest.mark.slow
def test_longrope_takes_the_length_of_the_cache():
    longrope = {"rope_scaling": "longrope", "rope_original_len": 8, "rope_short_factors": (1.0, 1.5)}
    model = make(**LLAMA, **longrope, rope_long_factors=(2.0, 9.0), rope_factor=3.0, layers=1)
    prompt, ends = draw_prompt(6), [jnp.full(2, end) for end in (0, 5, 6)]
    for length in (8, 9):  # all keys are rotated by short factors, or all by long ones
        cache = model.init_cache(2, length, jnp.float32)
        first, cache = model.decode(prompt[:, :5], ends[0], ends[1], cache)
        last, _ = model.decode(prompt[:, 5:], ends[1], ends[2], cache)
        expected = model.hidden(jnp.pad(prompt, ((0, 0), (0, length - 6))))[:, :6]
        np.testing.assert_allclose(jnp.concatenate([first, last], axis=1), expected, atol=1e-5)


WINDOWED = {"sliding_window": 4, "sliding_window_pattern": 2, "layers": 2}


@pytest.mark.parametrize(
    ("settings", "flash"),
    [
        pytest.param(GEMMA, None, marks=pytest.mark.slow),
        pytest.param(LLAMA | {"attention_sinks": True}, None, marks=pytest.mark.slow),
        pytest.param(LATENT, None, marks=pytest.mark.slow),
        pytest.param(LATENT, "xla", marks=pytest.mark.slow),
        pytest.param(LLAMA | {"attention_sinks": True}, "xla", marks=pytest.mark.slow),
        (LLAMA | WINDOWED, "xla"),
    ],
)
def test_pieces_of_a_text_see_all_that_is_before_them(settings, flash, monkeypatch):
    """Blocks of the cache that divide neither it nor the pieces."""
    monkeypatch.setattr("zerojax.models.kv_cache._BLOCK", 4)
    monkeypatch.setattr("zerojax.models.kv_cache._FLASH_BLOCK", 4)
    monkeypatch.setattr("zerojax.models.kv_cache._flash_kernel", lambda *_: flash)
    model, text, found = make(**settings), draw_prompt(11), []
    cache, decode = model.init_cache(2, 11, jnp.float32), nnx.jit(lambda model, *args: model.decode(*args))
    for first, last in ((0, 5), (5, 8), (8, 11)):
        ends = jnp.full(2, first), jnp.full(2, last)
        hidden, cache = decode(model, text[:, first:last], *ends, cache)
        found.append(hidden)
    whole = nnx.jit(lambda model: model.hidden(text))(model)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, atol=1e-5)


@pytest.mark.slow
def test_longrope_rotates_the_keys_of_prompt_and_response_alike():
    """The array of the prompt is within rope_original_len, the cache of a slot beyond it."""
    longrope = {"rope_scaling": "longrope", "rope_original_len": 16, "rope_short_factors": (1.0, 1.5)}
    model = make(**LLAMA, **longrope, rope_long_factors=(20.0, 90.0), rope_factor=3.0)
    prompt = draw_prompt(14)[0]
    wanted = []
    for _ in range(4):
        text = jnp.concatenate([prompt, jnp.array(wanted, jnp.int32)])
        scores = model(jnp.pad(text, (0, 20 - len(text)))[None])[0, len(text) - 1]
        wanted.append(int(scores.argmax()))
    assert generate(model, prompt, 4, how=GREEDY) == wanted


@pytest.mark.slow
def test_prompts_and_counts_of_similar_length_share_a_program(monkeypatch):
    model = make(d_model=8)  # a shape that no other test compiles
    traced, decode = [], GPT.decode

    def counting(*args):
        traced.append(args[1].shape)
        return decode(*args)

    monkeypatch.setattr(GPT, "decode", counting)
    for length, count in ((3, 2), (5, 7), (9, 3)):
        generate(model, draw_prompt(length)[0], count)
    assert sorted(set(traced)) == [(1, 1), (1, 16)]
    once = len(traced)
    generate(model, draw_prompt(2)[0], 11)
    assert len(traced) == once


def test_the_same_key_gives_the_same_text():
    model, prompt = make(init_std=0.05), draw_prompt(4)[0]
    first, again = (generate(model, prompt, 12, key=jax.random.key(1)) for _ in range(2))
    assert first == again
    assert first != generate(model, prompt, 12, key=jax.random.key(2))


def test_a_text_ends_before_its_stop():
    model, prompt = make(init_std=0.05), draw_prompt(4)[0]
    whole = generate(model, prompt, 40)  # more than the context
    stop = whole[30]
    assert generate(model, prompt, 40, stop=stop) == whole[: whole.index(stop)]


def draws(scores, how, count=2000):
    rows = jnp.broadcast_to(jnp.asarray(scores, jnp.float32), (count, len(scores)))
    tokens, log_probs = sample(rows, jax.random.split(KEY, count), how)
    heat = how.temperature or 1.0
    wanted = jax.nn.log_softmax(rows / heat)[jnp.arange(count), tokens]
    np.testing.assert_allclose(log_probs, wanted, atol=1e-5)
    return np.bincount(np.asarray(tokens), minlength=len(scores)) / count


def test_sampling_follows_the_distribution():
    scores = np.log([0.5, 0.3, 0.15, 0.05])
    np.testing.assert_allclose(draws(scores, Sampling()), [0.5, 0.3, 0.15, 0.05], atol=0.04)
    squared = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(draws(scores, Sampling(temperature=0.5)), squared / squared.sum(), atol=0.04)
    np.testing.assert_allclose(draws(scores, Sampling(top_k=2)), [0.625, 0.375, 0, 0], atol=0.04)
    # 0.5 + 0.3 does not reach 0.85, so the third is needed and the fourth is not.
    np.testing.assert_allclose(draws(scores, Sampling(top_p=0.85)), [0.526, 0.316, 0.158, 0], atol=0.04)
    np.testing.assert_allclose(draws(scores, Sampling(top_p=0.01)), [1, 0, 0, 0])
    np.testing.assert_allclose(draws(scores, Sampling(top_k=9)), [0.5, 0.3, 0.15, 0.05], atol=0.04)
    np.testing.assert_allclose(draws(scores, GREEDY), [1, 0, 0, 0])


@pytest.mark.slow
def test_of_equally_likely_tokens_the_lower_id_comes_first():
    tied = [1.0, 2.0, 2.0, 2.0, 1.0]
    for how in (Sampling(top_k=1), Sampling(top_p=0.1), Sampling(top_k=3, top_p=0.3), GREEDY):
        np.testing.assert_array_equal(draws(tied, how, 50), [0, 1, 0, 0, 0])
    np.testing.assert_allclose(draws(tied, Sampling(top_k=2)), [0, 0.5, 0.5, 0, 0], atol=0.04)
    np.testing.assert_allclose(draws(tied, Sampling(top_k=4))[[0, 4]], [0.109, 0], atol=0.04)
    np.testing.assert_allclose(draws(tied, Sampling(top_p=0.5)), [0, 0.5, 0.5, 0, 0], atol=0.04)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_no_distribution_is_refused(settings, message):
    with pytest.raises(ZeroError, match=message):
        Sampling(**settings)


def test_wrong_prompts_are_refused():
    model, prompt = make(), draw_prompt(3)[0]
    with pytest.raises(ZeroError, match=r"prompt 0 has shape \(0,\)"):
        generate(model, np.zeros(0, int), 3)
    with pytest.raises(ZeroError, match=r"prompt 0 has shape \(\)"):
        generate(model, 4, 3)
    with pytest.raises(ZeroError, match="dtype float32"):
        generate(model, np.zeros(3, np.float32), 3)
    with pytest.raises(ZeroError, match=r"stop = \[3\] must be one token, or None"):
        generate(model, prompt, 3, stop=cast(Any, [3]))  # as zerojax.generate takes it
    with pytest.raises(ZeroError, match="prompt 0 has the token id"):
        generate(model, [10**6], 3)
    with pytest.raises(ZeroError, match="new_tokens = 0"):
        generate(model, prompt, 0)
    with pytest.raises(ZeroError, match="the model has no init_cache and no decode"):
        generate(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), prompt, 2)
