"""A rollout with engines: bytes and seconds from the planner's step and the engines' rates."""

import json

import pytest

from zerojax.analysis.plan.engines import Engines, EngineStep
from zerojax.cli import main

CLUSTER = ["--gpu", "h100", "--nodes", "2", "--gpus-per-node", "1", "--bandwidth", "10gbit"]


@pytest.mark.parametrize(("changed", "measured"), [(0.001, 1.69), (0.01, 1.26), (0.1, 0.84)])
def test_patches_have_the_measured_size(changed: float, measured: float):
    weights = 8_030_261_248
    found = Engines(1, 1.0, 1.0, changed).patch_bytes(weights) / (changed * weights)
    assert found == pytest.approx(measured, rel=0.02)
    assert Engines(1, 1.0, 1.0, 1.0).patch_bytes(1000) <= 2000


def test_what_waits_for_what():
    step = EngineStep(5.0, 1.0, 3.0, full_bytes=8, sparse_bytes=1, full=4.0, sparse=0.5)
    assert step.on_policy(step.sparse) == 9.5
    assert step.ahead(step.sparse) == 5.5  # engines are the limit
    assert EngineStep(1.0, 1.0, 3.0, 8, 1, 4.0, 0.5).ahead(0.5) == 4.0  # the training is


def test_a_plan_predicts_a_rollout(capsys: pytest.CaptureFixture[str]):
    settings = ["--posttrain.rollout-rows", "1024", "--posttrain.epochs", "2"]
    settings += ["--posttrain.engines", "http://a:1", "http://b:1"]
    arguments = ["plan", "arithmetic-grpo", *CLUSTER, *settings, "--engine-tokens", "2000", "--json"]
    assert main([*arguments, "--engine-bandwidth", "1gbit"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found, own = plan["engines"], next(x for x in plan["forecasts"] if x["name"] == plan["configured"])
    assert found["rollout"] == 1024 * 6 / 2000
    assert found["training"] == pytest.approx(2 * 1024 / plan["batch"] * own["seconds"]["seconds"])
    assert 0.2 < 2 * found["scoring"] / found["training"] < 0.5
    assert found["full_bytes"] == 2 * 155_968
    assert found["full"] == pytest.approx(8 * found["full_bytes"] / 0.94e9)
    assert main(arguments) == 0  # both engines share the links of both nodes
    assert json.loads(capsys.readouterr().out)["engines"]["full"] == pytest.approx(found["full"] / 10)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("arithmetic-grpo", ["--changed", "0.1"], "add --engine-tokens"),
        ("arithmetic-grpo", ["--engine-tokens", "-1"], "above 0"),
        ("arithmetic-grpo", ["--engine-tokens", "10", "--changed", "2"], "at most 1"),
        ("arithmetic-grpo", ["--engine-tokens", "10", "--engine-bandwidth", "fast"], "--engine-bandwidth"),
        ("gpt-tiny", ["--engine-tokens", "10"], "only posttrain.method grpo and ppo"),
    ],
)
def test_wrong_rates_are_refused(
    config: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", config, *CLUSTER, *arguments]) == 2
    assert message in capsys.readouterr().err
