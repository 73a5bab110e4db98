"""Learning from preferences: the step equals a plain loop, and a run resumes bit by bit."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from micro_run import micro_config

import zerojax
from zerojax.posttrain.preferences import PreferenceTrainer, make_batches, read_pairs
from zerojax.run.config import RunConfig
from zerojax.run.metrics import read_metrics
from zerojax.run.run_dir import RunFolder

BETA, RATE = 0.5, 0.2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of pairs whose prompts and answers differ in length."""
    words = ["all", "work", "and", "no", "play"]
    rows = [
        {"prompt": f"{words[i % 5]} {i}", "chosen": words[i % 3] * (i % 2 + 1), "rejected": "z" * (i % 4 + 1)}
        for i in range(43)
    ]
    path = tmp_path_factory.mktemp("preferences") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(place: Path, **sections: dict[str, Any]) -> RunConfig:
    given = {
        "train": {
            "steps": 4,
            "batch_size": 12,
            "sequence_length": 19,
            "accumulate": 2,
            "eval_every": 2,
            "eval_batches": 1,
        },
        "data": {"validation": 0.3},
        "optimizer": {
            "name": "sgd",
            "learning_rate": RATE,
            "schedule": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "clip_norm": 0.0,
        },
        "mesh": {"nodes": 3, "local": 2},
        "checkpoint": {"every": 2},
        "posttrain": {"method": "dpo", "beta": BETA},
    }
    merged = {name: given.get(name, {}) | sections.get(name, {}) for name in {*given, *sections}}
    return micro_config(place, **merged)


def open_run(settings: RunConfig, folder: Path, start: RunFolder, **options: Any) -> PreferenceTrainer:
    return PreferenceTrainer.open(settings, RunFolder(folder), init_from=start.path, **options)


def train(settings: RunConfig, folder: Path, start: RunFolder, **options: Any) -> PreferenceTrainer:
    with open_run(settings, folder, start, **options) as trainer:
        trainer.train()
    return trainer


def lines(folder: Path) -> list[dict[str, Any]]:
    clock = ("step_seconds", "tokens_per_second", "memory_bytes")
    return [
        {name: value for name, value in line.items() if name not in clock}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def plain_margins(model: Any, start: Any, batch: dict[str, Any]) -> Any:
    """By how much more the model prefers each chosen answer than the first model does, in nats."""

    def answer(of: Any, name: str) -> Any:
        tokens = jnp.asarray(batch[name])
        # What follows an answer must not matter: it is no longer zero.
        after = jnp.arange(tokens.shape[1])[None] > 1 + jnp.asarray(batch["ends"][name])[:, None]
        tokens = jnp.where(after, 77, tokens)
        found = jax.nn.log_softmax(of(tokens[:, :-1]).astype(jnp.float32))
        each = jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(each * batch[f"{name}_mask"], axis=1)

    return (
        answer(model, "chosen")
        - answer(start, "chosen")
        - (answer(model, "rejected") - answer(start, "rejected"))
    )


def plain_run(method: str, start: Any, batches: list[dict[str, Any]]) -> tuple[list[float], list[float], Any]:
    """Losses, accuracies and the weights after all batches, of an ordinary optax loop on one device."""
    graph, weights, rest = nnx.split(start, nnx.Param, ...)
    tx = optax.sgd(RATE, momentum=0.9)

    def loss(weights: Any, batch: dict[str, Any]) -> Any:
        margins = plain_margins(nnx.merge(graph, weights, rest), start, batch)
        if method == "dpo":
            each = jnp.log1p(jnp.exp(-BETA * margins))
        else:
            each = (margins - 1 / (2 * BETA)) ** 2
        return each.sum() / len(margins), (margins > 0).sum() / len(margins)

    @jax.jit
    def step(weights: Any, state: Any, batch: dict[str, Any]) -> Any:
        (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(weights, batch)
        updates, state = tx.update(grads, state, weights)
        return value, accuracy, optax.apply_updates(weights, updates), state

    state, losses, accuracies = tx.init(weights), [], []
    for batch in batches:
        value, accuracy, weights, state = step(weights, state, batch)
        losses.append(float(value))
        accuracies.append(float(accuracy))
    return losses, accuracies, nnx.to_pure_dict(weights)


def with_ends(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with the index of each last token that counts, from the texts: the byte before zeros."""
    names = ("chosen", "rejected")
    return batch | {"ends": {name: np.cumsum(batch[f"{name}_mask"], axis=1).argmax(axis=1) for name in names}}


@pytest.mark.parametrize("method", ["dpo", pytest.param("ipo", marks=pytest.mark.slow)])
def test_a_run_equals_a_plain_loop(method: str, place: Path, finished: RunFolder, tmp_path: Path) -> None:
    settings = config(place, posttrain={"method": method})
    with open_run(settings, tmp_path / "run", finished) as trainer:
        start = zerojax.gather_model(trainer.state)
        stream, _ = make_batches(settings, read_pairs(settings, trainer.folder))
        batches = [with_ends(next(stream)) for _ in range(4)]
        stream.close()
        trainer.train()
        after = zerojax.gather_params(trainer.state)
    losses, accuracies, wanted = plain_run(method, start, batches)
    found = lines(tmp_path / "run")
    np.testing.assert_allclose([line["loss"] for line in found], losses, rtol=2e-5)
    # Before the first step all margins are 0, up to rounding.
    np.testing.assert_allclose([line["accuracy"] for line in found[1:]], accuracies[1:], rtol=1e-6)
    before = nnx.to_pure_dict(nnx.state(start, nnx.Param))
    moved = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), wanted, before)
    error = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), after, wanted)
    assert float(optax.tree.norm(error)) < 1e-4 * float(optax.tree.norm(moved))
