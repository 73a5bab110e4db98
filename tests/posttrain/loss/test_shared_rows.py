"""Post-training with rows that devices share, against the same losses on one device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import Case
from plain_loop import Plain, distance, masters

import zerojax
from zerojax.models import GPT, Block, GPTConfig
from zerojax.posttrain.loss.objectives import (
    answer_log_probs,
    answer_scores,
    completion_scores,
    log_probs_of,
    policy_loss,
    preference_loss,
    value_loss,
    values_of,
)
from zerojax.run.config import PosttrainSection

SLOW = pytest.mark.slow
ROWS, TIME, VOCAB = 12, 16, 23
LLAMA: dict[str, Any] = {"vocab_size": VOCAB, "layers": 1, "d_model": 16, "heads": 4, "kv_heads": 2}
LLAMA |= {
    "max_seq_len": TIME + 4,
    "norm": "rms",
    "positions": "rope",
    "mlp": "swiglu",
    "biases": False,
    "init_std": 0.3,
}
SCORES: dict[str, Any] = {"outputs": 1, "tied": False}
SETTINGS = {
    "dpo": PosttrainSection(method="dpo"),
    "reward": PosttrainSection(method="reward"),
    "grpo": PosttrainSection(method="grpo", kl=0.3, temperature=0.7),
    "critic": PosttrainSection(method="ppo"),
}


def completions(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of prompts and completions of any lengths, and the mask of the completions."""
    tokens = rng.integers(0, VOCAB, (rows, TIME + 1)).astype(np.int32)
    first = rng.integers(0, TIME - 2, rows)
    last = first + rng.integers(1, TIME - first)
    places = np.arange(TIME)
    return tokens, ((places >= first[:, None]) & (places < last[:, None])).astype(np.float32)


def draw(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """All columns of all methods."""
    tokens, mask = completions(rng, rows)
    names = ("old_log_probs", "reference_log_probs", "advantages", "old_values", "returns")
    batch = {name: mask * rng.standard_normal((rows, TIME)).astype(np.float32) for name in names}
    for name in ("chosen", "rejected"):
        batch[name], batch[f"{name}_mask"] = completions(rng, rows)
        batch[f"reference_{name}"] = rng.standard_normal(rows).astype(np.float32)
    return batch | {"tokens": tokens, "mask": mask}


@cache
def plain_of(method: str) -> Plain:
    settings, of_scores = SETTINGS[method], method in ("reward", "critic")
    config = GPTConfig(**LLAMA, **(SCORES if of_scores else {}))
    loss = {"grpo": policy_loss, "critic": value_loss}.get(method, preference_loss)(settings)
    return Plain(Case(lambda rngs: GPT(config, rngs=rngs), loss, (Block,), draw))


@cache
def wanted(method: str) -> tuple[dict[str, np.ndarray], Any]:
    """Loss and metrics on one device, and the weights after a step."""
    plain = plain_of(method)
    batch = plain.case.batches(ROWS, 1)[0]

    def loss(weights: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, aux = plain.case.loss(plain.model(weights), batch)
        return value, {**aux, "loss": value}

    grads, metrics = jax.jit(jax.grad(loss, has_aux=True))(plain.weights)
    moved = jax.tree.map(lambda x, slope: np.asarray(x - slope), plain.weights, grads)
    return jax.tree.map(np.asarray, metrics), moved


def start(method: str, mesh: tuple[int, int], devices: int, **zero: Any) -> zerojax.TrainState:
    plain = plain_of(method)
    nodes, local = mesh
    return plain.case.start(
        optax.sgd(1.0), plain.weights, nodes=nodes, local=local, sequence_parallel=devices, **zero
    )


STEPS = [("dpo", (2, 4), 2, {})]
MORE = [
    ("grpo", (1, 8), 4, {"accumulate": 3}),
    *((method, (1, 8), devices, {}) for method in SETTINGS for devices in (2, 4)),
    *((method, (2, 4), 2, {}) for method in SETTINGS),
    *((method, (3, 2), 2, {"accumulate": 2}) for method in SETTINGS),
    ("dpo", (3, 2), 2, {"accumulate": 4, "accumulate_order": "breadth", "remat": "none"}),
    ("critic", (2, 4), 4, {"stage": 2}),
]


@pytest.mark.parametrize(
    ("method", "mesh", "devices", "options"),
    [*STEPS, *(pytest.param(*case, marks=SLOW) for case in MORE)],
    ids=str,
)
def test_steps_are_those_of_one_device(method, mesh, devices, options):
    metrics, weights = wanted(method)
    state = start(method, mesh, devices, **options)
    state, found = zerojax.train_step(state, plain_of(method).case.batches(ROWS, 1)[0])
    for name, x in metrics.items():
        np.testing.assert_allclose(found[name], x, rtol=2e-5, atol=1e-6, err_msg=name)
    assert distance(masters(state), weights) < 1e-5


def hidden(model: GPT, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Of whole rows and of their tokens, by the axis that is not the second."""
    found = zerojax.whole_rows(model.hidden(batch["tokens"][:, 1:]).transpose(0, 2, 1), axis=-1)
    return {"tokens": found, "rows": found.mean((1, 2))}


PREDICTIONS: list[tuple[str, Callable[..., Any]]] = [
    ("dpo", hidden),
    ("dpo", answer_log_probs),
    ("grpo", log_probs_of(SETTINGS["grpo"])),
    ("critic", values_of),
    ("critic", completion_scores),
    ("reward", answer_scores),
]
FEW = (hidden, completion_scores)


@pytest.mark.parametrize(
    ("method", "fn", "mesh", "devices"),
    [
        pytest.param(method, fn, mesh, devices, marks=() if fn in FEW and mesh == (2, 4) else SLOW)
        for method, fn in PREDICTIONS
        for mesh, devices in (((2, 4), 4), ((3, 2), 2), ((1, 8), 2))
    ],
)
def test_predictions_are_those_of_one_device(method, fn, mesh, devices):
    plain, state = plain_of(method), start(method, mesh, devices)
    batch = plain.case.batches(ROWS, 1)[0]
    found = zerojax.predict_step(state, batch, fn)
    once = jax.jit(lambda weights: fn(plain.model(weights), batch))(plain.weights)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), found, once)
    # Results go into the next batch as they are.
    if fn is hidden:

        def distance_to(model: GPT, batch: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((hidden(model, batch)["tokens"] - batch["found"]) ** 2)

        assert zerojax.eval_step(state, {**batch, "found": found["tokens"]}, distance_to)["loss"] == 0
