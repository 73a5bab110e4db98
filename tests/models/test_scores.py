"""Models with one output: their head, their scores, and where they are refused."""

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
from zerojax.cli import main
from zerojax.errors import ConfigurationError
from zerojax.generation import stream
from zerojax.generation.checks import abstract_model, checked_limits
from zerojax.models import GPT, GPTConfig, flops_per_token, lm_loss, parameter_count, scores
from zerojax.run.run_dir import RunFolder
from zerojax.run.train_run import TrainRun

SMALL: dict[str, Any] = {"vocab_size": 37, "layers": 2, "d_model": 16, "heads": 2, "max_seq_len": 12}
SCORES = SMALL | {"tied": False, "outputs": 1}


def make(**settings: Any) -> GPT:
    return GPT(GPTConfig(**(SCORES | settings)), rngs=nnx.Rngs(0))


def test_a_score_is_the_product_of_the_last_norm_and_the_head() -> None:
    model = make(logit_softcap=0.01)
    tokens = jax.random.randint(jax.random.key(1), (3, 12), 0, 37)
    found = scores(model, tokens)
    assert (found.shape, found.dtype, model.head.embedding.shape) == ((3, 12), np.float32, (1, 16))
    wanted = np.asarray(model.hidden(tokens)) @ np.asarray(model.head.embedding[...])[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    with pytest.raises(ConfigurationError, match="outputs = None: scores need a model with outputs = 1"):
        scores(make(outputs=None), tokens)


def test_the_head_counts_with_its_number_of_outputs() -> None:
    language, score = GPTConfig(**SMALL, tied=False), GPTConfig(**SCORES)
    assert parameter_count(language) - parameter_count(score) == 36 * 16
    assert flops_per_token(language, 8) - flops_per_token(score, 8) == 6 * 36 * 16


def test_tokens_of_a_model_of_scores_are_refused(text: Path, tmp_path: Path) -> None:
    model, tokens = make(), jnp.ones((2, 8), jnp.int32)
    with pytest.raises(ConfigurationError, match=r"outputs = 1 .* a loss of tokens needs a language model"):
        lm_loss(model, {"tokens": tokens})
    with pytest.raises(ConfigurationError, match="generation needs a language model"):
        next(stream(model, np.asarray(tokens[0]), 2, key=jax.random.key(0)))
    config = micro_config(text, model={"tied": False, "outputs": 1})
    with pytest.raises(ConfigurationError, match="zerojax train needs a language model"):
        TrainRun.open(config, RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_state_of_scores_does_not_generate() -> None:
    state = zerojax.TrainState.abstract(
        lambda rngs: GPT(GPTConfig(**SCORES), rngs=rngs),
        tx=optax.sgd(0.1),
        loss_fn=lm_loss,
        mesh=zerojax.make_mesh(1, 2),
    )
    with pytest.raises(ConfigurationError, match="generation needs a language model"):
        checked_limits(abstract_model(state.spec))


@pytest.mark.parametrize("command", ["sample", "eval", "export"])
def test_commands_that_need_tokens_refuse_a_model_of_scores(
    command: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config(micro_config(text, model={"tied": False, "outputs": 1}))
    assert main([command, str(tmp_path), *([str(tmp_path / "out")] * (command == "export"))]) == 2
    assert "outputs = 1 makes a model of scores" in capfd.readouterr().err
