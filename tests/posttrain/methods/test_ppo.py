"""PPO: an update equals a plain loop's, a torn run resumes bit by bit, and critics stay with their policy."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from micro_run import ROLLOUTS, Stop, die_at, lines, merged, micro_config, post_train

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.models import GPT
from zerojax.multihost.preemption import StopRequest
from zerojax.posttrain.data.prompts import Prompt
from zerojax.posttrain.methods.ppo import PPOTrainer
from zerojax.posttrain.processes import Rows
from zerojax.posttrain.roles.critic import Critic, critic_config
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.run.checkpoints import Record, step_dirs
from zerojax.run.checkpoints.manifest import write_manifest
from zerojax.run.config import RunConfig
from zerojax.run.data.tokenizer import BPETokenizer
from zerojax.run.metrics.files import read_metrics
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import CHECKPOINTS
from zerojax.zero_config import ZeroConfig

REWARD = """
def share(prompt, completion):
    return sum(c in "aeiou" for c in completion) / max(len(completion), 1)
"""
KL, DECAY, DISCOUNT, CLIP = 0.1, 0.9, 0.97, 0.05


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts and a reward."""
    folder = tmp_path_factory.mktemp("ppo")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{word} {i}"} for i in range(10) for word in ("all", "work", "play")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(place: Path, **sections: dict[str, Any]) -> RunConfig:
    """Two rollouts of two batches, each of which is seen twice."""
    given: dict[str, dict[str, Any]] = {
        "train": {"steps": 8},
        "checkpoint": {"every": 3},
        "posttrain": {
            "method": "ppo",
            "reward": f"{place / 'reward.py'}:share",
            "rollout_rows": 32,
            "epochs": 2,
            "kl": KL,
            "gae_lambda": DECAY,
            "discount": DISCOUNT,
            "value_clip": CLIP,
        },
        "critic": {"learning_rate": 3e-2},
    }
    return micro_config(place / "prompts.jsonl", **merged(ROLLOUTS, given, sections))


def ragged_rollout() -> tuple[Rollout, np.ndarray]:
    """Completions of one to eight tokens after prompts of other lengths, of which one has no reward."""
    rng = np.random.default_rng(0)
    tokens, mask = np.zeros((32, 17), np.int32), np.zeros((32, 16), np.float32)
    for row in range(32):
        start, length = rng.integers(1, 8), rng.integers(1, 9)
        tokens[row, : start + length] = rng.integers(0, 256, start + length)
        mask[row, start - 1 : start - 1 + length] = 1
    rewards = rng.normal(size=32).astype(np.float32)
    rewards[5] = np.nan
    prompts = [Prompt(tokens[row, :1], "", {}) for row in range(32)]
    zeros = np.zeros_like(mask)
    return Rollout(prompts, [""] * 32, tokens, mask, zeros, np.ones(32, bool)), rewards


def plain(config: RunConfig, params: Any) -> tuple[Any, Any]:
    """A model on one device as (graph, weights)."""
    graph, weights = nnx.split(nnx.eval_shape(lambda: GPT(config.model, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(weights, jax.tree.map(jnp.asarray, params))
    return graph, weights


@partial(jax.jit, static_argnums=0)
def plain_log_probs(graph: Any, weights: Any, tokens: Any) -> Any:
    logits = jax.nn.log_softmax(nnx.merge(graph, weights)(tokens[:, :-1]))
    return jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0]


@partial(jax.jit, static_argnums=0)
def plain_values(graph: Any, weights: Any, tokens: Any) -> Any:
    model = nnx.merge(graph, weights)
    return model.hidden(tokens[:, :-1]) @ model.head.embedding[0]


def plain_gae(rewards: Any, values: Any, mask: Any) -> tuple[Any, Any]:
    """Sums of discounted errors, token by token."""
    advantages = np.zeros_like(values)
    for row, own in enumerate(mask):
        places = np.flatnonzero(own)
        for t in places:
            for n in places[places >= t]:
                after = values[row, n + 1] if n + 1 in places else 0
                error = rewards[row, n] + DISCOUNT * after - values[row, n]
                advantages[row, t] += (DISCOUNT * DECAY) ** (n - t) * error
    return advantages, mask * (advantages + values)


def fit(loss: Any, weights: Any, tx: Any, batches: Any) -> Any:
    """Weights after a step on each batch."""

    @jax.jit
    def step(weights: Any, state: Any, batch: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(weights, batch), state, weights)
        return optax.apply_updates(weights, updates), state

    state = tx.init(weights)
    for batch in batches:
        weights, state = step(weights, state, batch)
    return weights


def adam(rate: float) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.95, eps=1e-4))


@pytest.mark.parametrize("sharing", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_update_equals_a_plain_loop(
    sharing: int, place: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = {"weight_decay": 0.0, "eps": 1e-4}
    settings = config(
        place,
        mesh={"nodes": 2, "local": 2},
        critic={"stage": 2},
        optimizer=optimizer,
        zero={"compute_dtype": "float32", "remat": "none", "sequence_parallel": sharing},
        train={"steps": 4},
    )
    (rollout, rewards), folder = ragged_rollout(), RunFolder(tmp_path)
    with PPOTrainer.open(settings, folder, init_from=finished.path) as trainer:
        policy, policy_weights = plain(settings, zerojax.gather_params(trainer.state))
        critic, critic_weights = plain(trainer.critic.config, zerojax.gather_params(trainer.critic.state))
        assert (trainer.state.spec.zero.stage, trainer.critic.state.spec.zero.stage) == (3, 2)
        # The reference is another model than the policy, as after some rollouts.
        params = jax.tree.map(lambda x: 1.1 * x, trainer.state.params)
        trainer.state = trainer.state.with_params(params)
        first = jax.tree.map(lambda x: 1.1 * x, policy_weights)
        monkeypatch.setattr(trainer, "rollout", lambda signalled: rollout)
        monkeypatch.setattr(trainer, "score", lambda rollout, signalled: rewards)
        minibatches = trainer.minibatches
        given: list[Rows] = []
        monkeypatch.setattr(trainer, "minibatches", lambda rows: given.append(rows) or minibatches(rows))
        monkeypatch.setattr(trainer, "save", lambda: True)
        trainer.loop(StopRequest())
        trainer.log.drain()

    tokens, mask = jnp.asarray(rollout.tokens), rollout.mask * np.isfinite(rewards)[:, None]
    old, reference = (np.asarray(plain_log_probs(policy, x, tokens)) for x in (first, policy_weights))
    values = np.asarray(plain_values(critic, critic_weights, tokens))
    per_token = -KL * (old - reference) * mask
    for row in np.flatnonzero(np.isfinite(rewards)):
        per_token[row, np.flatnonzero(mask[row])[-1]] += rewards[row]
    advantages, returns = plain_gae(per_token, values, mask)
    among = advantages[mask > 0]
    normalized = mask * (advantages - among.mean()) / among.std()
    (rows,), measured = given, read_metrics(folder.metrics)[-1]
    np.testing.assert_allclose(rows["advantages"], normalized, atol=1e-4)
    np.testing.assert_allclose(rows["returns"], returns, atol=1e-5)
    unexplained = np.var((returns - values)[mask > 0]) / np.var(returns[mask > 0])
    assert measured["explained_variance"] == pytest.approx(1 - unexplained, abs=1e-4)
    assert measured["score"] == pytest.approx(np.nanmean(rewards), abs=1e-6)
    totals = per_token.sum(axis=1)[np.isfinite(rewards)]
    assert measured["reward"] == pytest.approx(totals.mean(), abs=1e-5)
    assert measured["kl"] == pytest.approx((old - reference)[mask > 0].mean(), abs=1e-5)

    def policy_loss(weights: Any, batch: Any) -> Any:
        ratio = jnp.exp(plain_log_probs(policy, weights, batch["tokens"]) - batch["old"])
        clip = settings.posttrain
        held = jnp.clip(ratio, 1 - clip.clip_low, 1 + clip.clip_high) * batch["advantages"]
        gain = jnp.where(batch["mask"] > 0, jnp.minimum(ratio * batch["advantages"], held), 0)
        return -gain.sum() / batch["mask"].sum()

    def value_loss(weights: Any, batch: Any) -> Any:
        found = plain_values(critic, weights, batch["tokens"])
        held = batch["values"] + jnp.clip(found - batch["values"], -CLIP, CLIP)
        worse = jnp.maximum((found - batch["returns"]) ** 2, (held - batch["returns"]) ** 2)
        return (worse * batch["mask"]).sum() / batch["mask"].sum() / 2

    columns = {"tokens": tokens, "mask": mask, "old": old, "advantages": normalized}
    columns |= {"values": values, "returns": returns}
    orders = [np.random.default_rng((0, 0, epoch)).permutation(32) for epoch in range(2)]
    picks = [order[first : first + 16] for order in orders for first in (0, 16)]
    batches = [{name: jnp.asarray(x)[pick] for name, x in columns.items()} for pick in picks]
    wanted = fit(policy_loss, first, adam(1e-2), batches)
    found = plain(settings, zerojax.gather_params(trainer.state))[1]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), found, wanted)
    wanted = fit(value_loss, critic_weights, adam(3e-2), batches)
    found = plain(trainer.critic.config, zerojax.gather_params(trainer.critic.state))[1]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), found, wanted)
    assert {"value_loss", "value_grad_norm"} <= measured.keys()


train = partial(post_train, PPOTrainer)


@pytest.mark.slow
def test_a_torn_run_resumes_bit_by_bit(
    place: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(place)
    whole = train(settings, tmp_path / "whole", finished)
    with monkeypatch.context() as patch:
        die_at(patch, 12)  # each step is two: it dies in the sixth
        with pytest.raises(Stop):
            train(settings, tmp_path / "torn", finished)
    assert step_dirs.steps(tmp_path / "torn/checkpoints") == [4]
    torn = train(settings, tmp_path / "torn", finished, resume="must")
    assert lines(tmp_path / "torn") == lines(tmp_path / "whole")
    for one, other in ((torn.state, whole.state), (torn.critic.state, whole.critic.state)):
        jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
        jax.tree.map(np.testing.assert_array_equal, one.opt_state, other.opt_state)
    found = lines(tmp_path / "whole")
    assert found[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert found[0]["clip_fraction"] == 0
    assert found[0]["mismatch"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"lora": {"rank": 2}},
        {"zero": {"preset": "delta"}, "critic": {"preset": "zero++"}, "mesh": {"nodes": 2, "local": 1}},
        {"train": {"accumulate": 2}, "posttrain": {"group_size": 2, "kl": 0.0}},
    ],
    ids=["adapters", "formats", "groups"],
)
def test_other_runs_learn_and_resume(
    place: Path, finished: RunFolder, tmp_path: Path, sections: dict[str, Any]
) -> None:
    settings = config(place, **sections)
    first = replace(settings, train=replace(settings.train, steps=4))
    trainer = train(first, tmp_path, finished)
    if "lora" in sections:
        trained = {leaf.path[0] for leaf in trainer.critic.state.spec.leaves}
        assert trained == {"blocks", "head"}
        assert trainer.reference is not None
        assert trainer.reference.state is None
    assert trainer.state.spec.zero.weights_delta == (sections.get("zero", {}).get("preset") == "delta")
    assert not trainer.critic.state.spec.zero.weights_delta
    train(settings, tmp_path, finished, resume="must")
    found = lines(tmp_path)
    assert [line["step"] for line in found] == list(range(1, 9))
    assert all(np.isfinite(line["value_loss"]) and not line["skipped_in_row"] for line in found)
    assert ("kl" in found[0]) == (settings.posttrain.kl > 0)


def test_a_checkpoint_without_a_critic_is_refused(place: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (folder.checkpoints / "3").mkdir(parents=True)
    write_manifest(folder.checkpoints / "3", 3, 0.0, Record())
    with pytest.raises(ConfigurationError, match="checkpoints/3 has no critic"):
        Critic.resume(config(place), folder, 3, CHECKPOINTS)


def test_the_critic_has_settings_of_its_own(place: Path, finished: RunFolder) -> None:
    settings = config(
        place,
        zero={"preset": "zero++", "compute_dtype": "float32", "grads": ["int8", "int8"]},
        critic={"learning_rate": 0.5, "preset": "zero3", "stage": 1, "grads": ["compute", "compute"]},
    )
    own = critic_config(settings)
    assert own.zero == ZeroConfig(stage=1, compute_dtype="float32")
    assert (own.model.outputs, own.model.tied, own.optimizer.learning_rate) == (1, False, 0.5)
    assert critic_config(config(place, critic={"learning_rate": None})).optimizer == settings.optimizer
    named = critic_config(config(place, critic={"init_from": str(finished.path)}))
    assert named.model == replace(finished.read_config().model, outputs=1, tied=False)


def test_a_critic_of_another_tokenizer_is_refused(place: Path, finished: RunFolder, tmp_path: Path) -> None:
    BPETokenizer.train([b"all work and no play"] * 9, 270).save(tmp_path / "tokenizer.json")
    settings = config(
        place,
        data={"tokenizer": str(tmp_path / "tokenizer.json")},
        critic={"init_from": str(finished.path)},
    )
    source = CHECKPOINTS.find(finished.path)
    with pytest.raises(ConfigurationError, match=r"critic.init_from .* has another tokenizer"):
        Critic.begin(settings, RunFolder(tmp_path / "run"), source, CHECKPOINTS)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"posttrain": {"scale_advantages": False}}, "does not read posttrain.scale_advantages"),
        ({"posttrain": {"kl_estimator": "k2"}}, "does not read posttrain.kl_estimator"),
        ({"posttrain": {"gae_lambda": 1.5}}, r"posttrain.gae_lambda = 1.5 must lie in \[0, 1\]"),
        ({"posttrain": {"temperature": 1e-7}}, "posttrain.temperature = 1e-07 must be at least 1e-06"),
        ({"posttrain": {"value_clip": -1.0}}, "posttrain.value_clip = -1.0 must be at least 0"),
        ({"critic": {"learning_rate": 0.0}}, "critic.learning_rate = 0.0 must be positive"),
        ({"critic": {"preset": "local"}}, r"\[critic\] asks for local updates"),
        ({"posttrain": {"reward": "", "reward_model": "gone"}}, "posttrain.reward_model: gone is neither"),
        ({"model": {"tied": False, "outputs": 1}}, 'posttrain.method = "ppo" needs a language model'),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    place: Path, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PPOTrainer.open(config(place, **sections), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
