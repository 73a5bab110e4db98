"""The loop: it learns what is rewarded, resumes bit by bit, and leaves out what has no reward."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from micro_run import ROLLOUTS, Stop, die_at, lines, merged, micro_config, post_train

from zerojax.cli import main
from zerojax.errors import ConfigurationError, RunError, Stopped
from zerojax.multihost.preemption import StopRequest
from zerojax.posttrain.methods.grpo import GRPOTrainer
from zerojax.posttrain.reward.scorers import FunctionScorer
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.run.config import PosttrainSection, RunConfig
from zerojax.run.run_dir import RunFolder

REWARD = """
def share(prompt, completion):
    return sum(c in "aeiou" for c in completion) / max(len(completion), 1)

def refuse(prompt, completion):
    raise ValueError("never")

def hang(prompt, completion):
    import time
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts and rewards."""
    folder = tmp_path_factory.mktemp("posttrain")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{word} {i}"} for i in range(10) for word in ("all", "work", "play")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(place: Path, **sections: dict[str, Any]) -> RunConfig:
    given = {
        "train": {"steps": 4},
        "data": {"validation": 0.2},
        "checkpoint": {"every": 2},
        "posttrain": {"method": "grpo", "reward": f"{place / 'reward.py'}:share", "group_size": 4},
    }
    return micro_config(place / "prompts.jsonl", **merged(ROLLOUTS, given, sections))


def two_rollouts(place: Path) -> RunConfig:
    """Two rollouts of two batches, each of which is seen twice; the reference is a second state."""
    return config(
        place,
        train={"steps": 8},
        posttrain={"rollout_rows": 32, "epochs": 2, "kl": 0.01},
        checkpoint={"every": 3},
    )


train = partial(post_train, GRPOTrainer)


def scorer(place: Path, name: str, seconds: float) -> FunctionScorer:
    """A scorer by another function than the run's."""
    return FunctionScorer(
        PosttrainSection(reward=f"{place / 'reward.py'}:{name}", reward_seconds=seconds, reward_workers=1)
    )


class Signalled(StopRequest):
    """As after SIGTERM."""

    @property
    def received(self) -> bool:
        return True


def test_a_torn_run_resumes_bit_by_bit(
    place: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = two_rollouts(place)
    whole = train(settings, tmp_path / "whole", finished)
    with monkeypatch.context() as patch:
        die_at(patch, 6)
        with pytest.raises(Stop):
            train(settings, tmp_path / "torn", finished)
    more = replace(settings, posttrain=replace(settings.posttrain, reward_workers=2))
    torn = train(more, tmp_path / "torn", finished, resume="must")
    assert lines(tmp_path / "torn") == lines(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, torn.state.params, whole.state.params)
    jax.tree.map(np.testing.assert_array_equal, torn.state.opt_state, whole.state.opt_state)
    assert (tmp_path / "torn/samples.jsonl").read_text() == (tmp_path / "whole/samples.jsonl").read_text()
    found = lines(tmp_path / "whole")
    # The first step is on the weights that made the rollout, which are those of the reference.
    assert found[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert found[0]["clip_fraction"] == 0
    assert found[-1]["kl"] > 1e-4
    assert found[0]["mismatch"] < 1e-4
    assert RunFolder(tmp_path / "torn").read_summary()["status"] == "finished"
    samples = [json.loads(line) for line in (tmp_path / "whole/samples.jsonl").read_text().splitlines()]
    assert [sample["rollout"] for sample in samples] == [1] * 4 + [2] * 4


@pytest.mark.slow
def test_a_stop_does_not_wait_for_the_rewards_of_a_rollout(
    place: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped, and made again by the run that resumes, which comes to the same end."""
    settings = config(place)
    whole = train(settings, tmp_path / "whole", finished)
    plain = GRPOTrainer.score

    def score(trainer: GRPOTrainer, rollout: Rollout, signalled: StopRequest) -> np.ndarray:
        if trainer.rollouts == 0:
            return plain(trainer, rollout, signalled)
        trainer.task.scorer.close()
        trainer.task.scorer = scorer(place, "hang", 600.0)
        return plain(trainer, rollout, Signalled())

    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "score", score)
        with pytest.raises(Stopped, match="at step 1 of 4, and saved"):
            train(settings, tmp_path / "stopped", finished)
    found = train(settings, tmp_path / "stopped", finished, resume="must")
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, found.state.params, whole.state.params)


@pytest.mark.slow
def test_a_run_learns_what_is_rewarded(place: Path, finished: RunFolder, tmp_path: Path) -> None:
    settings = config(
        place, train={"steps": 60, "batch_size": 64, "eval_every": 30}, posttrain={"eval_prompts": 4}
    )
    train(settings, tmp_path / "run", finished)
    rewards = [line["reward"] for line in lines(tmp_path / "run")]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3
    summary = RunFolder(tmp_path / "run").read_summary()
    assert 0 <= summary["first_validation_reward"] <= 1
    assert summary["validation_reward"] == lines(tmp_path / "run")[-1]["validation_reward"] > 0.6
    assert "validation_reward" in lines(tmp_path / "run")[29]


@pytest.mark.slow
def test_adapters_are_compared_with_their_base(place: Path, finished: RunFolder, tmp_path: Path) -> None:
    settings = config(place, lora={"rank": 2}, posttrain={"kl": 0.01}, train={"steps": 2})
    trainer = train(settings, tmp_path / "run", finished)
    assert trainer.reference is not None
    assert trainer.reference.state is None
    found = lines(tmp_path / "run")
    assert found[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert found[1]["kl"] > 1e-7


def test_a_completion_without_a_reward_counts_nowhere(
    place: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    with GRPOTrainer.open(two_rollouts(place), folder, init_from=finished.path) as trainer:
        rollout = trainer.rollout(StopRequest())
        assert len(rollout.texts) == 32
        assert [one.text for one in rollout.prompts[:4]] == [rollout.prompts[0].text] * 4
        for row, prompt in enumerate(rollout.prompts):
            drawn = rollout.tokens[row, 1:][rollout.mask[row] > 0]
            assert trainer.task.tokenizer.decode(drawn.tolist()) == rollout.texts[row]
            assert rollout.tokens[row, : len(prompt.tokens)].tolist() == prompt.tokens.tolist()
        rewards = np.arange(32, dtype=np.float32)
        rewards[[3, 4, 5, 6, 7]] = np.nan
        rows = trainer.with_advantages(rollout, rewards)
        assert (rows["mask"].any(axis=1) == np.isfinite(rewards)).all()
        assert not rows["advantages"][3:8].any()
        scale = np.sqrt(2 / 3)
        wanted = np.asarray([-1, 0, 1])[:, None] / scale * rows["mask"][:3]
        np.testing.assert_allclose(rows["advantages"][:3], wanted, atol=1e-4)
        measured = trainer.measure(rollout, rewards, rows)
        assert measured["lost_rewards"] == 5 / 32
        assert float(measured["reward"]) == pytest.approx(np.nanmean(rewards))
        trainer.task.scorer.close()
        trainer.task.scorer = scorer(place, "refuse", 1.0)
        with pytest.raises(RunError, match="no completion of rollout 1 has a reward: ValueError"):
            trainer.score(rollout, StopRequest())
        limits: list[tuple[str, float]] = []
        monkeypatch.setattr(trainer.watchdog, "phase", lambda *phase: limits.append(phase))
        with pytest.raises(RunError):
            trainer.score(rollout, StopRequest())
        assert limits == [("scoring rollout 1", 320.0)]  # 32 rewards of 10 s, one after another


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"posttrain": {"method": "none"}}, 'posttrain.method is "none"'),
        ({"posttrain": {"reward": ""}}, "there is no reward: set posttrain.reward"),
        ({"posttrain": {"reward_model": "x"}}, "posttrain.reward and posttrain.reward_model exclude"),
        ({"critic": {"stage": 2}}, r"posttrain.method = \"grpo\" does not read \[critic\]"),
        ({"posttrain": {"group_size": 1}}, "group_size must be at least 2: grpo compares"),
        ({"posttrain": {"rollout_rows": 24}}, "rollout_rows = 24 is not .* = 16: set it to 32"),
        ({"posttrain": {"group_size": 3}}, "do not divide into groups of posttrain.group_size 3"),
        ({"posttrain": {"epochs": 3}}, "train.steps = 4 ends within a rollout of 3 steps: set it to 6"),
        ({"posttrain": {"max_new_tokens": 16}}, "leaves no room for prompts in train.sequence_length = 16"),
        ({"model": {"dropout": 0.1}}, "model.dropout = .* makes comparisons"),
        (
            {"zero": {"sequence_parallel": 24}, "train": {"sequence_length": 24}},
            "sequence_parallel = 24 shares rows .* of 12 devices.* Start one process on each",
        ),
        ({"zero": {"preset": "local"}}, r"\[zero\] asks for local updates, .* Set zero.preset to another"),
        (
            {"checkpoint": {"keep_best": 1}, "train": {"eval_every": 2}},
            "checkpoint.keep_best needs a validation loss",
        ),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(
    place: Path, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPOTrainer.open(config(place, **sections), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_begins_with_trained_weights(place: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"starts with a trained model.*: name its run in --init-from"
    ):
        GRPOTrainer.open(config(place), RunFolder(tmp_path / "run"))


def test_zerojax_eval_refuses_a_run_of_posttrain(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_config(config(place))
    assert main(["eval", str(folder.path)]) == 2
    assert f"see zerojax report {folder.path}" in capfd.readouterr().err


def test_zerojax_train_refuses_a_config_of_posttrain(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[posttrain]\nmethod = "grpo"\n')
    assert main(["train", str(path)]) == 2
    assert 'posttrain.method = "grpo" is for zerojax posttrain' in capfd.readouterr().err
    assert main(["posttrain", str(path), "--posttrain.method", "none"]) == 2
