"""States without an optimizer: whatever reads weights takes them as any other state; a step does not."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from core_models import in_fp32

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.run.checkpoints import Checkpoints, Record, restore_weights

MODEL = GPTConfig(vocab_size=61, layers=2, d_model=16, heads=2, max_seq_len=16, biases=False, norm="rms")
BATCH = {"tokens": np.random.default_rng(0).integers(0, 61, (12, 13)).astype(np.int32)}
SGD = optax.sgd(0.1)


def logits(model: GPT, batch: Any) -> jax.Array:
    return model(batch["tokens"])


def create(
    tx: Any, mesh: tuple[int, int], lora: Any = None, seed: int = 0, **zero: Any
) -> zerojax.TrainState:
    options = in_fp32(**zero)
    return zerojax.TrainState.create(
        lambda rngs: GPT(MODEL, rngs=rngs),
        tx,
        lm_loss,
        mesh=zerojax.make_mesh(*mesh),
        zero=options,
        lora=lora,
        seed=seed,
    )


@pytest.mark.parametrize(
    ("mesh", "spread"), [((2, 2), "node"), pytest.param((3, 2), "world", marks=pytest.mark.slow)]
)
def test_frozen_weights_say_what_trained_ones_say(mesh: tuple[int, int], spread: Any, tmp_path: Path) -> None:
    trained = create(SGD, (1, 2), seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, trained, Record())
    state = create(None, mesh, frozen=("*",), frozen_spread=spread)
    assert not jax.tree.leaves((state.params, state.opt_state, state.replicas))
    state = restore_weights(tmp_path / "1", state)
    jax.tree.map(np.testing.assert_array_equal, *map(zerojax.gather_params, (state, trained)))
    wanted, found = (zerojax.eval_step(one, BATCH)["loss"] for one in (trained, state))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    predict = partial(zerojax.predict_step, batch=BATCH, fn=logits)
    np.testing.assert_allclose(found := predict(state), predict(trained), atol=1e-5)
    copied = zerojax.with_replica(state)
    assert (copied is state) == (spread == "node")  # every node has the weights already
    np.testing.assert_array_equal(predict(copied), found)


@pytest.mark.slow
def test_frozen_weights_generate_what_trained_ones_do() -> None:
    answers = (
        zerojax.generate(one, list(BATCH["tokens"][:3, :4]), 3, temperature=0)
        for one in (create(SGD, (1, 2)), create(None, (2, 2), frozen=("*",)))
    )
    wanted, found = (one.tokens for one in answers)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["nf4", "fp8", "bf16"])
def test_frozen_formats_are_those_of_a_base(fmt: Any) -> None:
    """The adapters of a new state are zero: it computes with its base alone."""
    zero = {"frozen": ("*",), "frozen_weights": fmt, "precise": ()}
    base = create(SGD, (2, 2), zerojax.LoRA(rank=2), **zero)
    wanted, found = (zerojax.eval_step(one, BATCH)["loss"] for one in (base, create(None, (2, 2), **zero)))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_no_step_takes_them() -> None:
    state = create(None, (1, 1), frozen=("*",))
    assert "parameters trained: 0, frozen:" in repr(state)
    for step in (zerojax.train_step, zerojax.comm_report):
        with pytest.raises(ConfigurationError, match="the state has no optimizer, so it is for inference"):
            step(state, BATCH)
