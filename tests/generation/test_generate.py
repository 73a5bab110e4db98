"""Generation on the mesh has the texts of the unsharded model, whatever the mesh, the slots and the copy."""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from generation_models import (
    CONTEXT,
    LISTED,
    SMALL,
    VOCAB,
    Averages,
    LinenAverages,
    LinenResidual,
    assert_same,
    create,
    greedy,
    next_token_loss,
    prompts,
)
from grids import grid

import zerojax
from zerojax import LoRA, ZeroError
from zerojax.generation import Sampling
from zerojax.generation.generate import generate_rows

LATENT = dataclasses.replace(
    SMALL, kv_heads=None, head_width=12, latent_rank=10, latent_query_rank=7, latent_rope_width=4
)
RECURRENT = dataclasses.replace(
    SMALL,
    layers=3,
    biases=False,
    recurrent_layers=(0, 2),
    recurrent_heads=4,
    recurrent_key_heads=2,
    recurrent_width=6,
    recurrent_key_width=4,
    attention_gate=True,
)
SHORT = dataclasses.replace(RECURRENT, recurrent="short_conv", conv_width=3)
ONE_BRANCH = dataclasses.replace(
    RECURRENT,
    layers=4,
    recurrent="mamba2",
    recurrent_layers=(0,),
    mlp_layers=(1, 3),
    mlp="relu2",
    no_rope_layers=(0, 1, 2, 3),
)
KIMI = dataclasses.replace(
    LATENT,
    biases=False,
    recurrent="kimi_delta",
    recurrent_layers=(0,),
    recurrent_heads=4,
    recurrent_width=6,
    recurrent_key_width=4,
)
MODELS = {
    **{"stack": SMALL, "list": LISTED, "user": Averages},
    **{"recurrent": RECURRENT, "short": SHORT, "one branch": ONE_BRANCH, "kimi": KIMI},
}
CASES = [
    (name, mesh, form)
    for name in MODELS
    for mesh in [(1, 1), (2, 4), (3, 2)]
    for form in ("compute", "gathered")
]
ALONE = (1, 1), "compute"


@functools.cache
def begun(name: str, mesh: tuple[int, int] = (1, 1)) -> zerojax.TrainState:
    """The state of a model on a mesh; generation leaves it as it is."""
    return create(MODELS[name], *mesh)


@functools.cache
def wanted(name: str, count: int = 7):
    """A model's greedy answers, and a stop token that ends some of them early."""
    free = greedy(zerojax.gather_model(begun(name)), prompts(), count)
    tokens = [token for answer, _ in free for token in answer]
    stop = max(set(tokens), key=lambda token: sum(token in answer[1:-1] for answer, _ in free))
    ends = [answer.index(stop) + 1 if stop in answer else count for answer, _ in free]
    assert len({*ends}) > 2
    return stop, [(answer[:end], scores[:end]) for (answer, scores), end in zip(free, ends, strict=True)]


@pytest.mark.parametrize(("name", "mesh", "form"), grid(CASES, ("stack", *ALONE), ("recurrent", *ALONE)))
def test_greedy_responses_equal_the_model_without_a_cache(name, mesh, form):
    stop, expected = wanted(name)
    state = begun(name, mesh)
    got = zerojax.generate(
        state, prompts(), 7, temperature=0, stop=stop, weights=form, slots=1 + (mesh == (1, 1))
    )
    assert_same(got, expected)


@pytest.mark.parametrize(
    ("name", "mesh", "form"),
    grid(CASES, ("stack", (2, 4), "gathered"), ("one branch", *ALONE), ("kimi", *ALONE)),
)
def test_prompts_that_are_prefilled_in_pieces_have_the_same_responses(name, mesh, form, monkeypatch):
    monkeypatch.setattr("zerojax.generation.engine._PREFILL_TOKENS", 5)
    monkeypatch.setattr("zerojax.models.kv_cache._BLOCK", 6)
    stop, expected = wanted(name)
    got = zerojax.generate(
        begun(name, mesh),
        *(prompts(), 7),
        temperature=0,
        stop=stop,
        weights=form,
        slots=1 + (form == "gathered"),
    )
    assert_same(got, expected)


def test_several_tokens_end_a_row_in_their_order():
    state = begun("stack")
    free = zerojax.generate(state, prompts(), 7, temperature=0).tokens.tolist()
    stop: tuple[tuple[int, ...], int] = tuple(free[0][1:4]), free[1][2]
    given: Any = [np.asarray(stop[0]), np.int64(stop[1])]  # as tokens come
    got = zerojax.generate(state, prompts(), 7, temperature=0, stop=given)
    for row, (tokens, length) in zip(free, zip(got.tokens.tolist(), got.lengths, strict=True), strict=True):
        places = [n for n in range(1, 8) if row[n - 1] == stop[1] or tuple(row[max(0, n - 3) : n]) == stop[0]]
        end = min([*places, 7])
        assert (tokens[:end], length) == (row[:end], end)
    assert got.lengths[0] <= 4
    assert got.lengths[1] <= 3
    assert got.lengths.max() == 7


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}], ids=["all", "few"])
def test_random_tokens_are_the_same_on_every_mesh_with_any_slots(options):
    draw = functools.partial(zerojax.generate, prompts=prompts(), max_new_tokens=6, **options)
    one, many = create(SMALL, 1, 1), create(SMALL, 2, 4)
    first = draw(one, seed=1)
    same = draw(many, seed=1, slots=1)
    np.testing.assert_array_equal(same.tokens, first.tokens)
    np.testing.assert_allclose(same.log_probs, first.log_probs, atol=1e-5)
    other = draw(one, seed=2)
    assert np.mean(other.tokens != first.tokens) > 0.3
    assert np.mean(first.tokens[:, 1:] != first.tokens[:, :-1]) > 0.3  # each has bits of its own
    assert len({tuple(row) for row in draw(one, prompts=[prompts()[1]] * 11, seed=1).tokens}) > 8
    # The log-probabilities are those of the whole distribution, whatever was left out of it.
    heat = options.get("temperature", 1.0)
    model = zerojax.gather_model(one)
    for prompt, row, log_probs in list(zip(prompts(), first.tokens, first.log_probs, strict=True))[:2]:
        text = np.concatenate([prompt, row])
        scores = jax.nn.log_softmax(model(text[None])[0] / heat)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(log_probs, np.asarray(scores)[np.arange(6), row], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gathered", "compute"])
def test_a_linen_model_generates(form):
    state = zerojax.TrainState.create(
        LinenAverages(),
        optax.adam(1e-2),
        next_token_loss,
        mesh=zerojax.make_mesh(2, 2),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=(LinenResidual,)),
        sample_batch={"tokens": np.zeros((1, 8), np.int32)},
    )
    got = zerojax.generate(state, prompts(), 6, temperature=0, weights=form, slots=2)
    assert_same(got, greedy(zerojax.gather_model(state), prompts(), 6))


def agreement(model, batch):
    """How far log-probabilities are from the training path's own, at most, and on the texts' new tokens."""
    scores = jax.nn.log_softmax(model(batch["texts"]))[:, :-1]
    own = jnp.take_along_axis(scores, batch["texts"][:, 1:, None], axis=-1)[..., 0]
    apart = jnp.abs(own - batch["log_probs"]) * batch["new"]
    return jnp.sum(apart), {"apart": jnp.sum(apart), "new": jnp.sum(batch["new"])}


@pytest.mark.parametrize(
    ("preset", "mesh", "form"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("delta", (2, 2), "gathered"),
            ("delta", (3, 2), "compute"),
            ("zero++", (2, 2), "gathered"),
            ("zero++", (3, 2), "compute"),
            ("stage 0", (2, 2), "gathered"),
            ("stage 1", (2, 2), "gathered"),
            ("stage 2", (2, 2), "compute"),
        ]
    ],
)
def test_the_copy_has_exactly_the_weights_of_trainings_forward_pass(preset, mesh, form):
    """A node's weights are rounded, or differ from the masters by an update: both paths read the same."""
    options: dict[str, Any] = {"stage": int(preset[-1])} if "stage" in preset else {"preset": preset}
    state = create(SMALL, *mesh, **options)
    state = state.with_params(jax.tree.map(lambda x: 0.9 * x + 0.01, state.params))
    given = prompts(12)
    got = zerojax.generate(state, given, 7, weights=form)
    texts, log_probs = np.zeros((12, CONTEXT), np.int32), np.zeros((12, CONTEXT - 1), np.float32)
    for text, scores, prompt, row, own in zip(
        texts, log_probs, given, got.tokens, got.log_probs, strict=True
    ):
        text[: len(prompt) + 7] = [*prompt, *row]
        scores[len(prompt) - 1 : len(prompt) + 6] = own
    new = (log_probs != 0).astype(np.float32)
    batch = {"texts": texts, "log_probs": log_probs, "new": new}
    found = zerojax.eval_step(state, batch, agreement)
    assert float(found["new"]) * np.prod(mesh) == 12 * 7
    assert float(found["apart"]) * np.prod(mesh) / (12 * 7) < 1e-5


@pytest.mark.parametrize(
    ("model", "mesh", "form", "frozen"),
    [
        pytest.param(Averages, (2, 2), "int8", "int8", marks=pytest.mark.slow),
        pytest.param(LISTED, (2, 2), "int8", "int8", marks=pytest.mark.slow),
        pytest.param(SMALL, (2, 4), "gathered", "nf4", marks=pytest.mark.slow),
        pytest.param(LISTED, (3, 2), "compute", "int8", marks=pytest.mark.slow),
        pytest.param(LATENT, (2, 2), "gathered", "nf4", marks=pytest.mark.slow),
    ],
)
def test_adapters_take_part_unless_they_are_turned_off(model, mesh, form, frozen):
    options = {"frozen": ("*",), "frozen_weights": frozen, "lora": LoRA(rank=2, dropout=0.2)}
    base = create(model, *mesh, **options)
    # B begins at zero, where the adapters add nothing.
    noise = np.random.default_rng(2).standard_normal
    tuned = base.with_params(jax.tree.map(lambda x: x + 0.1 * noise(x.shape), base.params))
    answers = []
    for adapters in (True, False):
        got = zerojax.generate(tuned, prompts(), 5, temperature=0, weights=form, adapters=adapters)
        assert_same(got, greedy(zerojax.gather_model(tuned if adapters else base), prompts(), 5))
        answers.append(got.tokens.tolist())
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("too long", r"prompt 1 has 20 tokens, and 5 more would exceed the model's context of 24"),
        ("empty", r"prompt 2 has shape \(0,\)"),
        ("scalar", r"prompt 0 has shape \(\)"),
        ("ragged", r"prompt 0 has shape \(\) and dtype object"),
        ("negative", "prompt 1 has the token id -1: ids are from 0 to 28"),
        ("unknown", "prompt 2 has the token id 29: ids are from 0 to 28"),
        ("wide", "prompt 2 has the token id 4294967299: ids are from 0 to 28"),
        ("stop", r"stop=3.0: give a token, or a list"),
        ("ends", r"stop=\['a'\]: give a token, or a list"),
        ("seed", "seed=-1 must be a whole number from 0 to 4,294,967,295"),
        ("top_k", "top_k = 5.0 must be a whole number from 1"),
        ("adapters", "adapters=False: the state has no adapters"),
        ("none", "there is no prompt"),
        ("no new", "max_new_tokens=0 must be at least 1"),
        ("slots", "slots=0 must be at least 1"),
        ("weights", "weights='bf16' is not one of auto, compute, fp8, int8, gathered"),
        ("temperature", "temperature = -1 must be 0 .greedy. or at least 1e-06"),
        ("overflow", "temperature = 1e-40 must be 0 .greedy. or at least 1e-06"),
        ("abstract", "the state is abstract"),
        ("donated", "was passed to train_step before"),
        ("protocol", "the model has no init_cache and no decode and no logits: to generate"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(kind, message):
    given: list[Any] = [np.arange(4)] * 3
    state, count, options = begun("stack"), 5, {}
    match kind:
        case "too long":
            given[1] = np.zeros(20, np.int32)
        case "empty":
            given[2] = np.zeros(0, np.int32)
        case "scalar":
            given[0] = np.int32(3)
        case "ragged":
            given[0] = [[1, 2], [3]]
        case "negative":
            given[1] = np.array([3, -1])
        case "unknown":
            given[2] = np.array([VOCAB])
        case "wide":
            given[2] = np.array([3 + 2**32])  # 3 in 32 bits
        case "none":
            given = []
        case "no new":
            count = 0
        case "abstract":
            state = create(SMALL, 1, 1, abstract=True)
        case "donated":
            state = state.replace(step=deleted())
        case "protocol":
            state = create(Mute, 1, 1, abstract=True).replace(step=state.step, params=state.params)
        case name:
            options = REFUSED.get(name, {name: -1})
    with pytest.raises(ZeroError, match=message):
        zerojax.generate(state, given, count, **options)


REFUSED: dict[str, dict[str, Any]] = {
    "slots": {"slots": 0},
    "weights": {"weights": "bf16"},
    "stop": {"stop": 3.0},
    "ends": {"stop": ["a"]},
    "top_k": {"top_k": 5.0},
    "adapters": {"adapters": False},
    "overflow": {"temperature": 1e-40},
}


def deleted() -> jax.Array:
    x = jnp.int32(0)
    x.delete()
    return x


class Mute(Averages):
    """The user's model without what generation needs."""

    def __getattribute__(self, name):
        if name in ("init_cache", "decode", "logits"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_a_prompt_may_fill_the_context_up_to_the_last_new_token(caplog):
    given = [np.arange(20, dtype=np.int32)]
    with caplog.at_level(logging.INFO, "zerojax"):
        got, _ = (zerojax.generate(begun("stack"), given, CONTEXT - 20, temperature=0) for _ in range(2))
    lines = [one.message for one in caplog.records if "generating with" in one.message]
    assert len(lines) == 1  # not for every call
    assert "weights=compute: on each device 8.16 KB of weights" in lines[0]
    assert "1.54 KB of key-value cache for 1 slots of 24 tokens" in lines[0]
    assert_same(got, greedy(zerojax.gather_model(begun("stack")), given, CONTEXT - 20))


@pytest.mark.slow
def test_rows_of_limit_0_are_skipped_and_calls_share_a_program(caplog):
    caplog.set_level(logging.INFO, "zerojax")
    state, given, how = create(SMALL, 2, 1), prompts(7), Sampling()
    options = {"how": how, "seed": 5, "width": 6}
    every = generate_rows(state, given, [6] * 7, **options)
    limits = [0, 3, 0, 6, 1, 0, 0]
    # What is left out may be of any length.
    longer = [np.ones(20, np.int32) if limit == 0 else row for row, limit in zip(given, limits, strict=True)]
    some = generate_rows(state, longer, limits, **options)
    assert some.lengths.tolist() == limits
    none = generate_rows(state, given, [0] * 7, **options)
    assert not any(x.any() for x in none)
    for got, whole in ((some.tokens, every.tokens), (some.log_probs, every.log_probs)):
        for row, limit in enumerate(limits):
            np.testing.assert_allclose(got[row, :limit], whole[row, :limit], atol=1e-5)
            assert not got[row, limit:].any()
    assert sum("generating with" in one.message for one in caplog.records) == 1
