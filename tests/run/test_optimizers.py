"""Optimizers and schedules against formulas in numpy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

import zerojax
from zerojax.run.config import OptimizerSection, RunConfig, TrainSection
from zerojax.run.optimizers import decay_mask, make_optimizer, make_schedule, rate_changes


def curve(steps: int, **settings: Any) -> np.ndarray:
    schedule = make_schedule(OptimizerSection(learning_rate=2.0, **settings), steps)
    return np.asarray(jax.vmap(schedule)(jnp.arange(steps)))


def test_the_rate_follows_warmup_and_cosine() -> None:
    got = curve(100, schedule="warmup-cosine", warmup_steps=10, final_fraction=0.1)
    for i in range(100):
        if i < 10:
            want = 0.2 + 1.8 * i / 10
        else:
            want = 2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (i - 10) / 90)))
        assert got[i] == pytest.approx(want, rel=1e-5)


def test_wsd_holds_the_peak_and_decays_at_the_end() -> None:
    got = curve(100, schedule="wsd", warmup_steps=10, final_fraction=0.0, decay_fraction=0.2)
    np.testing.assert_allclose(got[10:81], 2.0)
    np.testing.assert_allclose(got[80:], 2.0 * (1 - np.arange(20) / 20), rtol=1e-5)


def test_linear_decays_throughout() -> None:
    got = curve(100, schedule="linear", warmup_steps=0, final_fraction=0.5)
    np.testing.assert_allclose(got, 2.0 - np.arange(100) / 100, rtol=1e-5)


def test_a_short_run_warms_up_for_half_of_its_steps() -> None:
    got = curve(4, schedule="constant", warmup_steps=100)
    np.testing.assert_allclose(got, [1.0, 1.5, 2.0, 2.0])


def settings(steps: int, **optimizer: Any) -> RunConfig:
    optimizer = {
        "learning_rate": 2.0,
        "schedule": "linear",
        "warmup_steps": 0,
        "final_fraction": 0.0,
        **optimizer,
    }
    return RunConfig(train=TrainSection(steps=steps), optimizer=OptimizerSection(**optimizer))


@pytest.mark.parametrize(
    ("before", "now", "updates", "said"),
    [
        (
            settings(100, final_fraction=0.25),
            settings(200, final_fraction=0.25),
            100,
            "200 steps: 1.25 for the next, instead of 0.5",
        ),
        (settings(100), settings(200), 50, "200 steps: 1.5 for the next, instead of 1"),
        (settings(100), settings(100, learning_rate=4.0), 50, "100 steps: 2 for the next, instead of 1"),
        (
            settings(100, schedule="wsd"),
            settings(200, schedule="wsd"),
            50,
            "200 steps: 2 for the next, as before",
        ),
        (settings(100, schedule="constant"), settings(200, schedule="constant"), 50, None),
        (settings(100), settings(100), 50, None),
        (settings(100), settings(100), 100, None),
    ],
)
def test_changes_of_the_learning_rate_on_resuming(before, now, updates, said) -> None:
    wanted = [] if said is None else [f"the learning rate follows the schedule of {said}"]
    assert rate_changes(before, now, updates) == wanted


PARAMS = {
    "embed": {"embedding": jnp.full((3, 2), 2.0)},
    "blocks": {
        "norm": {"scale": jnp.full((4, 2), 3.0)},
        "linear": {"kernel": jnp.full((4, 2, 2), -1.5), "bias": jnp.full((4, 2), 5.0)},
    },
}


def test_names_decide_which_leaves_decay() -> None:
    assert decay_mask(PARAMS) == {
        "embed": {"embedding": True},
        "blocks": {"norm": {"scale": False}, "linear": {"kernel": True, "bias": False}},
    }


def test_matrices_of_experts_and_of_adapters_decay() -> None:
    experts = zerojax.Experts(4, 6, experts=2, per_token=1, biases=True, rngs=nnx.Rngs(0))
    names = set(nnx.to_pure_dict(nnx.state(experts, nnx.Param)))
    matrices = {"router", "gate", "up", "down"}
    assert names > matrices
    mask = decay_mask(dict.fromkeys(names, 0) | {"kernel": {"lora_a": 0}, "scale": {"lora_b": 0}})
    assert {name for name in names if mask[name]} == matrices
    assert mask["kernel"] == {"lora_a": True}
    assert mask["scale"] == {"lora_b": False}


@pytest.mark.parametrize("name", ["adamw", "nadamw", "adopt", "lion", "sgd"])
def test_updates_equal_optax(name: Any) -> None:
    settings = OptimizerSection(
        name=name,
        learning_rate=0.01,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.1,
    )
    rule = {
        "adamw": optax.adamw(0.01, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decay_mask),
        "nadamw": optax.nadamw(0.01, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decay_mask),
        "adopt": optax.chain(
            contrib.scale_by_adopt(0.9, 0.95, 1e-8),
            optax.add_decayed_weights(0.1, decay_mask),
            optax.scale(-0.01),
        ),
        "lion": optax.lion(0.01, 0.9, 0.95, weight_decay=0.1, mask=decay_mask),
        "sgd": optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1, decay_mask), optax.scale(-0.01)),
    }[name]
    reference = optax.chain(optax.clip_by_global_norm(1.0), rule)
    ours, theirs = PARAMS, PARAMS
    tx = make_optimizer(settings, 10)
    assert isinstance(tx, optax.GradientTransformation)
    our_state, their_state = tx.init(ours), reference.init(theirs)
    for step in range(5):
        grads = jax.tree.map(lambda p, s=step: jnp.sin(p + s), PARAMS)
        updates, our_state = tx.update(grads, our_state, ours)
        ours = optax.apply_updates(ours, updates)
        updates, their_state = reference.update(grads, their_state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def test_without_clip_and_decay_updates_are_the_gradients() -> None:
    settings = OptimizerSection(
        name="sgd",
        learning_rate=1.0,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        clip_norm=0.0,
        beta1=0.0,
    )
    tx = make_optimizer(settings, 10)
    assert isinstance(tx, optax.GradientTransformation)
    grads = jax.tree.map(lambda p: p * 100, PARAMS)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -g), updates, grads)
