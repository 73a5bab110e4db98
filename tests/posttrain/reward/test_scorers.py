"""A reward model scores as its unsharded weights do, and only with the policy's tokenizer."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from micro_run import micro_config

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.models import GPT
from zerojax.posttrain.data.prompts import Prompt
from zerojax.posttrain.reward.scorers import ModelScorer, open_scorer
from zerojax.posttrain.roles.memory import RoleMemory
from zerojax.posttrain.roles.saved_runs import with_reward_checkpoint
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.posttrain.settings import check_settings
from zerojax.run.build import RunSetup
from zerojax.run.checkpoints import Checkpoints, Record
from zerojax.run.config import RunConfig, config_to_dict
from zerojax.run.data.tokenizer import BPETokenizer, ByteTokenizer
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import CHECKPOINTS, start_run
from zerojax.train.memory import device_bytes

SCORES = {"model": {"tied": False, "outputs": 1}}


def saved(config: RunConfig, state: zerojax.TrainState, folder: Path, base: str = "") -> RunConfig:
    """A run of a reward model at a folder, and the settings of a policy that uses it."""
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, state, Record(config=config_to_dict(config), base=base))
    settings = dataclasses.replace(config.posttrain, method="ppo", reward_model=str(folder), max_new_tokens=4)
    plain = dataclasses.replace(config.model, outputs=None)
    return dataclasses.replace(config, posttrain=settings, model=plain, lora=None)


def ragged(rows: int) -> Rollout:
    """Texts of three to sixteen tokens."""
    rng = np.random.default_rng(0)
    tokens, mask = np.zeros((rows, 17), np.int32), np.zeros((rows, 16), np.float32)
    for row in range(rows):
        start, length = rng.integers(1, 9), rng.integers(2, 9)
        tokens[row, : start + length] = rng.integers(0, 256, start + length)
        mask[row, start - 1 : start - 1 + length] = 1
    prompts = [Prompt(tokens[row, :1], "", {}) for row in range(rows)]
    return Rollout(prompts, [""] * rows, tokens, mask, mask, np.ones(rows, bool))


def held(state: zerojax.TrainState) -> int:
    return device_bytes([x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)])


def expected(config: RunConfig, state: zerojax.TrainState, rollout: Rollout) -> list[float]:
    """The scores by the whole model on one device, with other tokens after the end of each text."""
    graph, weights = nnx.split(nnx.eval_shape(lambda: GPT(config.model, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(weights, jax.tree.map(jnp.asarray, zerojax.gather_params(state)))
    head = np.asarray(weights["head"]["embedding"][...])[0]
    ends = [int(np.flatnonzero(mask)[-1]) + 2 for mask in rollout.mask]
    tokens = rollout.tokens.copy()
    for row, end in enumerate(ends):
        tokens[row, end:] = 7
    hidden = jax.jit(lambda weights, tokens: nnx.merge(graph, weights).hidden(tokens))(weights, tokens)
    return [float(np.asarray(own)[end - 1] @ head) for own, end in zip(hidden, ends, strict=True)]


def test_scores_are_those_of_the_unsharded_model(text: Path, tmp_path: Path) -> None:
    config = micro_config(text, mesh={"nodes": 2, "local": 1}, **SCORES)
    state = RunSetup(config).initial_state()
    policy, rollout = saved(config, state, tmp_path), ragged(5)
    check_settings(policy, 1)
    scorer = open_scorer(policy, ByteTokenizer(), CHECKPOINTS)
    found, why = scorer.score(rollout)
    assert (found.dtype, found.shape, why) == (np.float32, (5,), "")
    np.testing.assert_allclose(found, expected(config, state, rollout), rtol=1e-4, atol=1e-6)
    # The memory of the roles before the start is that of the arrays.
    assert isinstance(scorer, ModelScorer)
    roles = RoleMemory.of(policy, RunSetup(policy).abstract_state.spec)
    assert (roles.reward_model, roles.critic, roles.reference) == (held(scorer.state), held(state), None)
    assert {"critic", "reward model"} <= set(map(str, roles.table().columns[0].cells))
    scorer.state = state.with_params(jax.tree.map(lambda x: x * jnp.nan, state.params))
    lost, why = scorer.score(rollout)
    assert np.isnan(lost).all()
    assert "5 of 5 scores by posttrain.reward_model" in why


@pytest.mark.slow
def test_a_run_keeps_the_reward_model_that_it_began_with(text: Path, tmp_path: Path) -> None:
    config = micro_config(text, mesh={"nodes": 1, "local": 1}, **SCORES)
    state = RunSetup(config).initial_state()
    policy, run = saved(config, state, tmp_path / "reward"), RunFolder(tmp_path / "run")
    steps = tmp_path / "reward/checkpoints"

    def reward(**options: Any) -> str:
        resume = options.pop("resume", "auto")
        settings = dataclasses.replace(policy, posttrain=dataclasses.replace(policy.posttrain, **options))
        return with_reward_checkpoint(settings, run, resume).posttrain.reward_model

    assert reward() == str(steps / "1")
    run.path.mkdir()
    run.write_config(with_reward_checkpoint(policy, run, "auto"))
    with Checkpoints(steps) as checkpoints:
        checkpoints.save(2, state, Record(config=config_to_dict(config)))
    assert reward() == str(steps / "1")
    for spelled in (steps.parent, steps / "1"):
        assert reward(reward_model=os.path.relpath(spelled)) == str(steps / "1")
    assert reward(resume="never") == str(steps / "2")
    assert reward(reward_model=str(steps / "2")) == str(steps / "2")
    shutil.rmtree(steps / "1")
    with pytest.raises(ConfigurationError, match=r"this run started with .*checkpoints/1, which is gone.*2,"):
        reward()


@pytest.mark.slow
def test_a_reward_model_of_adapters(text: Path, finished: RunFolder, tmp_path: Path) -> None:
    config = micro_config(text, mesh={"nodes": 1, "local": 2}, lora={"rank": 2}, model=SCORES["model"])
    start = start_run(RunSetup(config), RunFolder(tmp_path), None, finished.path)
    # The same number everywhere would leave the norms little but rounding.
    changed = jax.tree.map(
        lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), start.state.params
    )
    state, rollout = start.state.with_params(changed), ragged(4)
    policy = saved(config, state, tmp_path, start.base)
    found, _ = open_scorer(policy, ByteTokenizer(), CHECKPOINTS).score(rollout)
    np.testing.assert_allclose(found, expected(config, state, rollout), rtol=1e-4, atol=1e-6)


def test_what_is_no_reward_model_is_refused(text: Path, finished: RunFolder, tmp_path: Path) -> None:
    config = micro_config(text, mesh={"nodes": 1, "local": 1}, **SCORES)
    policy = saved(config, RunSetup(config).initial_state(), tmp_path)
    check_settings(policy, 1)
    other = BPETokenizer.train([b"all work and no play"] * 9, 270)
    with pytest.raises(ConfigurationError, match="has another tokenizer than this run"):
        open_scorer(policy, other, CHECKPOINTS)
    longer = dataclasses.replace(
        policy,
        model=dataclasses.replace(policy.model, max_seq_len=64),
        train=dataclasses.replace(policy.train, sequence_length=32),
    )
    with pytest.raises(ConfigurationError, match=r"reads at most 32 tokens, .* have 33"):
        check_settings(longer, 1)
    language = dataclasses.replace(policy.posttrain, reward_model=str(finished.path))
    with pytest.raises(ConfigurationError, match=r"is not a reward model.* Train one"):
        check_settings(dataclasses.replace(policy, posttrain=language), 1)
