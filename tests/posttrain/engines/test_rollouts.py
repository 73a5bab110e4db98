"""Runs whose completions engines make: greedy ones, versions of the weights, and the loss."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished_runs import GPT2
from hf_models import FIXTURES, begin_run
from http_engine import HTTPEngine, loader
from micro_run import ROLLOUTS, lines, merged, micro_config, post_train

from zerojax.errors import ConfigurationError
from zerojax.interop.engines.receiver.ends import Receiver
from zerojax.interop.engines.receiver.mirror import Mirror
from zerojax.multihost.preemption import StopRequest
from zerojax.posttrain.engines import pool as pool_module
from zerojax.posttrain.engines.rollouts import weights_for_engines
from zerojax.posttrain.methods.grpo import GRPOTrainer
from zerojax.posttrain.methods.ppo import PPOTrainer
from zerojax.posttrain.rollout.generator import OwnGenerator
from zerojax.run.build import RunSetup
from zerojax.run.config import MeshSection, PosttrainSection, RunConfig
from zerojax.run.run_dir import RunFolder

SCORES = """
def share(prompt, completion):
    return sum(c in "aeiou" for c in completion) / max(len(completion), 1)

class Game:
    def reset(self, prompt):
        return 0

    def step(self, state, completion):
        return state + 1, None if state == 1 else "?", share("", completion)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    (folder / "scores.py").write_text(SCORES)
    rows = [{"prompt": f"{word} {i}"} for i in range(10) for word in ("all", "work")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(place: Path, **sections: dict[str, Any]) -> RunConfig:
    given = {
        "train": {"steps": 3, "batch_size": 8},
        "data": {"validation": 0.2},
        "checkpoint": {"every": 0},
        "model": GPT2,
        "posttrain": {"method": "grpo", "reward": f"{place / 'scores.py'}:share", "group_size": 4},
    }
    return micro_config(place / "prompts.jsonl", **merged(ROLLOUTS, given, sections))


@pytest.fixture
def served(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPEngine]:
    """An engine for the micro runs' models."""
    monkeypatch.setattr(pool_module, "_RETRY_SECONDS", 0.1)
    with HTTPEngine(lambda _: np.zeros(256), loader(config(place))) as server:
        yield server


def test_greedy_answers_are_those_of_the_runs_own_devices(
    place: Path, served: HTTPEngine, gpt2_run: RunFolder, tmp_path: Path
) -> None:
    settings = config(place, posttrain={"engines": [served.url], "eval_prompts": 4})
    run = partial(GRPOTrainer.open, settings, RunFolder(tmp_path / "run"), init_from=gpt2_run.path)
    with run() as trainer:
        assert trainer.engines is not None
        own = trainer.task.evaluate(OwnGenerator(trainer.state))
        made = trainer.engines.start(trainer.state, 0, lambda generator, _: trainer.task.evaluate(generator))
        found = trainer.engines.wait(made)
        assert own is not None
        np.testing.assert_array_equal(found.tokens, own.tokens)
        np.testing.assert_allclose(found.log_probs, own.log_probs, atol=1e-5)
        assert found.texts == own.texts
        assert (found.version, own.version) == (0, None)


def test_each_rollout_is_made_by_the_newest_weights(
    place: Path, served: HTTPEngine, gpt2_run: RunFolder, tmp_path: Path
) -> None:
    settings = config(place, posttrain={"engines": [served.url]})
    post_train(GRPOTrainer, settings, tmp_path / "run", gpt2_run)
    found = lines(tmp_path / "run")
    assert [line["weights_age"] for line in found] == [0, 0, 0]
    assert [name.rpartition("-")[0] for name in served.loaded] == ["step-0", "step-1", "step-2"]
    for line in found:
        assert line["mismatch"] < 1e-5
        assert line["importance"] == pytest.approx(1, abs=1e-4)
    assert {path.name for path in (tmp_path / "run/weights").iterdir()} == {*served.loaded[1:]}
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert [sample["version"] for sample in samples] == [0] * 4 + [1] * 4 + [2] * 4


def test_one_rollout_ahead_is_made_beside_the_training_by_weights_one_rollout_old(
    place: Path, served: HTTPEngine, gpt2_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt of rollout 2 waits for the end of step 1, which does not wait for the rollout."""
    trained, waited = threading.Event(), list[bool]()
    log_step = GRPOTrainer.log_step

    def logged(trainer: GRPOTrainer, metrics: Any) -> None:
        log_step(trainer, metrics)
        trained.set()

    settings = config(place, posttrain={"engines": [served.url], "rollouts_ahead": 1})
    served.after(1 + 8, lambda: waited.append(trained.wait(60)))  # the trial, and rollout 1
    monkeypatch.setattr(GRPOTrainer, "log_step", logged)
    post_train(GRPOTrainer, settings, tmp_path / "run", gpt2_run)
    assert waited == [True]
    found = lines(tmp_path / "run")
    assert [line["weights_age"] for line in found] == [0, 1, 1]
    assert [name.rpartition("-")[0] for name in served.loaded] == ["step-0", "step-1"]
    assert found[0]["mismatch"] < 1e-5
    assert found[1]["mismatch"] > 1e-3
    assert abs(found[1]["importance"] - 1) > 1e-6


@pytest.mark.parametrize(("cap", "largest"), [(1.5, 1.5), (0.0, 1.0)])
def test_the_ratio_is_measured_from_the_engines_probability_and_begins_at_the_cap_at_most(
    place: Path, served: HTTPEngine, gpt2_run: RunFolder, tmp_path: Path, cap: float, largest: float
) -> None:
    settings = config(place, posttrain={"engines": [served.url], "importance_cap": cap})
    run = partial(GRPOTrainer.open, settings, RunFolder(tmp_path / "run"), init_from=gpt2_run.path)
    with run() as trainer:
        rollout = trainer.rollout(StopRequest())
        rollout.log_probs[:] -= np.log(1.25)  # the engine's weights are older than the run's
        rollout.log_probs[0] -= np.log(4.0)
        rollout.log_probs[1] += np.log(4.0)
        rows = trainer.with_advantages(rollout, np.arange(8.0, dtype=np.float32))
        batch = next(trainer.minibatches(rows))
        metrics = trainer.measure(rollout, np.arange(8.0, dtype=np.float32), rows)
    ratio, counted = np.exp(rows["log_probs"] - rows["old_log_probs"]), rows["mask"] > 0
    for row, expected in ((0, largest), (1, 0.3125 if cap else 1), (2, min(1.25, largest))):
        np.testing.assert_allclose(ratio[row][counted[row]], expected, rtol=1e-4)
    assert metrics["importance"] == pytest.approx(ratio[counted].mean(), rel=1e-4)
    assert metrics["mismatch"] > np.log(1.25)
    assert {*batch} == {"tokens", "mask", "advantages", "old_log_probs"}


@pytest.mark.parametrize("ahead", [0, 1])
def test_ppo_and_environments_generate_with_engines(
    place: Path, served: HTTPEngine, gpt2_run: RunFolder, tmp_path: Path, ahead: int
) -> None:
    game = {"reward": "", "environment": f"{place / 'scores.py'}:Game", "max_turns": 3}
    method = {"method": "ppo", "group_size": 1, "engines": [served.url], "rollouts_ahead": ahead}
    settings = config(place, train={"steps": 2}, posttrain={**game, **method})
    post_train(PPOTrainer, settings, tmp_path / "run", gpt2_run)
    found = lines(tmp_path / "run")
    assert [line["turns"] for line in found] == [2, 2]
    assert [line["weights_age"] for line in found] == [0, ahead]
    assert len(served.served) == 1 + 2 * 8 * 2  # with the trial


def test_a_run_goes_on_when_its_engine_restarts(
    place: Path, served: HTTPEngine, gpt2_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(pool_module.logger, "warning", lambda text, *values: said.append(text % values))

    def restart() -> None:
        served.die()
        served.restart()

    served.after(12, lambda: threading.Thread(target=restart).start())
    post_train(GRPOTrainer, config(place, posttrain={"engines": [served.url]}), tmp_path / "run", gpt2_run)
    assert [line["weights_age"] for line in lines(tmp_path / "run")] == [0, 0, 0]
    assert max(line["mismatch"] for line in lines(tmp_path / "run")) < 1e-5
    assert any("lost an engine, whose prompts go to the others" in line for line in said)
    assert f"{served.url} is back" in said


def test_a_receiver_beside_an_engine_gets_what_has_changed(
    place: Path, served: HTTPEngine, gpt2_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROJAX_JOB_TOKEN", "a secret of this test")
    mirror = Mirror(tmp_path / "mirror")
    receiver = Receiver(mirror, "127.0.0.1:0", "a secret of this test")
    there = {"engine_receivers": [receiver.address], "engine_folder": str(tmp_path / "mirror")}
    settings = config(place, posttrain={"engines": [served.url], **there})
    post_train(GRPOTrainer, settings, tmp_path / "run", gpt2_run)
    receiver.close()
    assert max(line["mismatch"] for line in lines(tmp_path / "run")) < 1e-5
    assert served.loaded == ["current"] * 3
    assert mirror.version == 2
    assert not (tmp_path / "run/weights").exists()


def test_engines_get_fp8_as_zerojax_export_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine's folder is written on the host, the other's by a receiver with codes from the devices."""
    monkeypatch.setenv("ZEROJAX_JOB_TOKEN", "a secret of this test")
    begin_run(FIXTURES / "llama3", folder := RunFolder(tmp_path / "run"))
    read = replace(folder.read_config(), mesh=MeshSection(nodes=1, local=2))
    state = RunSetup(read).initial_state()
    receiver = Receiver(Mirror(tmp_path / "mirror"), "127.0.0.1:0", "a secret of this test")
    written = PosttrainSection(engines=("http://a:1",), engine_weights="fp8-blocks")
    at, place = (receiver.address,), str(tmp_path / "mirror")
    found = list[bytes]()
    for settings in (written, replace(written, engine_receivers=at, engine_folder=place)):
        weights = weights_for_engines(replace(read, posttrain=settings), folder, state)
        version = weights.publish(state, 0)
        assert weights.arrive(0, version, 60.0) == ""
        found += [(version.folder / name).read_bytes() for name in ("model.safetensors", "config.json")]
        weights.close()
    receiver.close()
    assert found[:2] == found[2:]
    assert b"F8_E4M3" in found[0]
    assert b"weight_block_size" in found[1]


def test_receivers_need_a_token(place: Path, gpt2_run: RunFolder, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("ZEROJAX_JOB_TOKEN", raising=False)
    there = {"engines": ["http://a:1"], "engine_receivers": ["a:2"], "engine_folder": "mirror"}
    with pytest.raises(ConfigurationError, match="set ZEROJAX_JOB_TOKEN"):
        GRPOTrainer.open(config(place, posttrain=there), RunFolder(tmp_path / "run"), init_from=gpt2_run.path)


def test_unusable_engines_are_refused(
    place: Path, served: HTTPEngine, gpt2_run: RunFolder, tmp_path: Path
) -> None:
    served.respond = lambda path, body: (404, b"not found")
    settings = config(place, posttrain={"engines": [served.url]})
    with pytest.raises(ConfigurationError, match=r"HTTP status 404.*--enable-scale-out"):
        GRPOTrainer.open(settings, RunFolder(tmp_path / "run"), init_from=gpt2_run.path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"engines": ["localhost:8000"]}, "write it as http://host:port"),
        ({"engines": ["http://a:1/v1"]}, "write it as http://host:port"),
        ({"engines": ["http://a:1", "http://a:1"]}, "names an engine twice"),
        ({"rollouts_ahead": 1}, r"posttrain\.rollouts_ahead is only read with posttrain\.engines"),
        ({"importance_cap": 3.0}, r"posttrain\.importance_cap is only read with posttrain\.engines"),
        ({"engines": ["http://a:1"], "engine_receivers": ["a:2", "a:3"]}, "names 2 receivers for 1 engines"),
        ({"engines": ["http://a:1"], "engine_receivers": ["a:2"]}, "engine_folder is empty: name the mirror"),
        ({"engines": ["http://a:1"], "rollouts_ahead": 2}, "posttrain.rollouts_ahead = 2 must be 0 or 1"),
        (
            {"engines": ["http://a:1"], "importance_cap": -1.0},
            "posttrain.importance_cap = -1.0 must be at least 0",
        ),
        (
            {"engines": ["http://a:1"], "engine_seconds": 0.0},
            "posttrain.engine_seconds = 0.0 must be positive",
        ),
    ],
)
def test_wrong_settings_are_refused(place: Path, tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPOTrainer.open(config(place, posttrain=wrong), RunFolder(tmp_path / "run"))
