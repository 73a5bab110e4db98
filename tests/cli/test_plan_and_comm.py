"""``zerojax plan`` and ``zerojax comm``."""

import json

import pytest

from zerojax.cli import main

TINY = ["gpt-tiny", "--mesh.nodes", "2", "--mesh.local", "4", "--zero.preset", "zero++"]


def test_plan_and_comm_report_the_same_bytes(capsys):
    assert main(["plan", *TINY, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(["comm", *TINY, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sums = report["phases"].pop("metrics")
    assert plan["savings"]["now"]["sent"] == plan["between_nodes"]
    assert report["savings"]["now"]["sent"] == pytest.approx(report["between_nodes"], abs=1)
    both = [[trial["option"] for trial in found["savings"]["sent"]] for found in (plan, report)]
    assert both[0] == both[1] == ["--zero.preset delta", "--zero.preset local"]
    assert plan["node_bytes"] == report["node_bytes"] - sums["node_bytes"] > 0
    assert plan["local_bytes"] == report["local_bytes"] - sums["local_bytes"] > 0
    assert plan["memory"]["kinds"]["parameters"] == pytest.approx(4 * report["parameters"] / 8, rel=0.01)


def test_both_print_text(capsys):
    assert main(["plan", *TINY]) == 0
    out = capsys.readouterr().out
    assert "hpZ: each node keeps the gathered weights" in out
    assert [line.split(" than ")[0] for line in out.splitlines()[-2:]] == ["To send less", "To hold less"]
    assert main(["comm", *TINY]) == 0
    out = capsys.readouterr().out
    assert "between nodes, per node and step" in out
    assert out.splitlines()[-1].startswith("To send less than 433 KB between nodes")


@pytest.mark.parametrize("command", ["plan", "comm"])
def test_a_config_without_a_mesh_is_refused(command, capsys):
    assert main([command, "gpt2-124m"]) == 2
    assert "--mesh.nodes" in capsys.readouterr().err
    assert main([command]) == 2
    assert "name a config first" in capsys.readouterr().err


@pytest.mark.parametrize("method", [pytest.param("dpo", marks=pytest.mark.slow), "reward"])
def test_pairs_are_two_texts(method, capsys):
    scores = ["--model.outputs", "1", "--model.no-tied"] if method == "reward" else []
    command = [*TINY, *scores, "--posttrain.method", method, "--json"]
    assert main(["plan", *command]) == 0
    roles = json.loads(capsys.readouterr().out)["roles"]
    assert roles["generator"] is None
    assert (roles["reference"] is None) == (method == "reward")
    assert main(["comm", *command]) == 0
    assert json.loads(capsys.readouterr().out)["between_nodes"] > 0
    rows = []
    for options in (command, [*TINY, *scores, "--json", "--sequences", "8"]):
        assert main(["plan", *options, "--gpu", "h100", "--bandwidth", "100gbit"]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    assert rows[0] == rows[1]  # 32 pairs on 8 devices
