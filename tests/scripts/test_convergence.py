"""The grid of formats x seeds at toy size, what it makes of its runs, and the text that it collects."""

import contextlib
import io
import json
import math
import subprocess
import sys
import unittest.mock
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from environment import ROOT

FOLDER = ROOT / "scripts" / "bench"
sys.path.append(str(FOLDER))

import convergence as grid  # noqa: E402
import machine_text  # noqa: E402
import paired  # noqa: E402
from runs_file import RunsFile  # noqa: E402

from zerojax import ZeroError  # noqa: E402
from zerojax.run.config import RunConfig  # noqa: E402

TOY = {
    "mesh.local": 1,
    "train.batch-size": 4,
    "train.sequence-length": 16,
    "train.steps": 3,
    "train.eval-every": 2,
    "train.eval-batches": 1,
    "model.d-model": 32,
    "model.max-seq-len": 16,
    "model.layers": 1,
    "data.validation": 0.2,
    "optimizer.learning-rate": 1e-3,
}


def convergence(*arguments: object) -> subprocess.CompletedProcess[str]:
    toy = [word for name, value in TOY.items() for word in (f"--{name}", value)]
    return start("gpt-tiny", *toy, *arguments)


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The script, called in this process, which has imported and compiled most of it."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    command = ["convergence.py", *map(str, arguments)]
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        unittest.mock.patch.object(sys, "argv", command),
    ):
        try:
            grid.main()
        except SystemExit as ended:
            code = int(str(ended.code or 0))
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def test_a_file_is_older_than_a_key_of_the_config(tmp_path):
    path, config = tmp_path / "runs.json", RunConfig()
    content = RunsFile(path, config).content
    del content["settings"]["lora"], content["settings"]["train"]["eval_exact_match"]
    path.write_text(json.dumps(content | {"runs": [{"variant": "zero3", "seed": 3}]}))
    assert RunsFile(path, config).done == {("zero3", 3)}
    longer = replace(config, train=replace(config.train, steps=config.train.steps + 1))
    with pytest.raises(ZeroError, match=r"other settings .*train.steps was"):
        RunsFile(path, longer)


@pytest.mark.slow
def test_grid_is_trained_in_pairs_and_continued(text, tmp_path):
    where = ("--json", tmp_path / "runs.json", "--folder", tmp_path / "data", "--text", 0)
    where += ("--data.source", text)
    both = ("--variants", "zero3", "delta-nearest")
    done = convergence(*where, *both, "--seeds", 0)
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "runs.json").read_text())
    assert [(run["variant"], run["seed"]) for run in first["runs"]] == [("zero3", 0), ("delta-nearest", 0)]
    exact, delta = first["runs"]
    assert exact["train_loss"][0] == pytest.approx(delta["train_loss"][0], abs=1e-4)  # same weights and data
    assert exact["train_loss"][2] != delta["train_loss"][2]
    assert exact["loss_exact"] == exact["loss"] == exact["curve"][-1][1]
    assert delta["loss_exact"] != delta["loss"]
    assert delta["loss_exact"] == pytest.approx(delta["loss"], rel=0.01)
    assert [step for step, _ in exact["curve"]] == [2, 3]
    assert delta["between_nodes"] < exact["between_nodes"] / 3
    assert exact["tokens"] == 3 * 4 * 16

    picture = tmp_path / "picture.png"
    done = convergence(*where, *both, "--seeds", 0, 1, "--picture", picture)
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "runs.json").read_text())
    assert again["runs"][:2] == first["runs"]
    assert [(run["variant"], run["seed"]) for run in again["runs"][2:]] == [
        ("zero3", 1),
        ("delta-nearest", 1),
    ]
    assert again["runs"][2]["train_loss"][0] != pytest.approx(exact["train_loss"][0], abs=1e-6)
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    names = [row.split(" | ")[0] for row in rows]
    assert names == ["| variant", "| zero3", "| delta-nearest", "| step", "| zero3", "| delta-nearest"]

    # No time is left for a run; what is missing is compiled before that is known.
    done = convergence(*where, "--variants", "zero3", "--seeds", 0, 1, 2, "--minutes", 1e-9)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs.json").read_text()) == again

    # A run that fails is reported when all others are done.
    train = unittest.mock.Mock(side_effect=[ValueError("no more memory"), {**first["runs"][0], "seed": 3}])
    failed = pytest.raises(RuntimeError, match="zero3, seed 2, failed")
    with unittest.mock.patch.object(grid, "train", train), failed:
        convergence(*where, "--variants", "zero3", "--seeds", 2, 3)
    done_now = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [run["seed"] for run in done_now if run["variant"] == "zero3"] == [0, 1, 3]

    done = convergence(*where, "--train.steps", 4)
    assert done.returncode == 2
    assert "train.steps was 3 and is 4" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_local_updates_are_compared_by_their_outer_weights(text, tmp_path):
    """Metrics come a step late: the first step has none, and the losses are those of zero3's first steps."""
    where = ("--json", tmp_path / "runs.json", "--folder", tmp_path / "data", "--text", 0, "--seeds", 0)
    done = convergence(*where, "--data.source", text, "--mesh.nodes", 2, "--variants", "zero3", "local-16")
    assert done.returncode == 0, done.stderr
    exact, local = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert len(local["train_loss"]) == len(exact["train_loss"]) - 1
    assert local["train_loss"][0] == pytest.approx(exact["train_loss"][0], abs=1e-4)
    # Evaluations read the outer weights as nodes know them, exports as their owners do.
    assert local["loss"] == pytest.approx(local["loss_exact"], rel=0.01)
    assert local["between_nodes"] < exact["between_nodes"] / 3


@pytest.mark.slow
def test_runs_begin_with_trained_weights(finished, tmp_path):
    """Both seeds begin with the same weights; copies of deltas are exact then, two bits are not."""
    where = (finished.config, "--mesh.local", 1, "--mesh.emulate", "--init-from", finished.path)
    where += (
        "--json",
        tmp_path / "runs.json",
        "--folder",
        tmp_path / "data",
        "--text",
        0,
        "--train.steps",
        3,
    )
    where += ("--train.eval-every", 2)
    variants, picture = ("--variants", "zero3", "weights-int2", "deltas-int2"), tmp_path / "picture.png"
    done = start(*where, *variants, "--seeds", 0, 1, "--picture", picture)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    exact, direct, deltas, again = runs[:4]
    assert exact["base"] == again["base"]
    assert exact["base"]["step"] == 8
    assert [step for step, _ in exact["curve"]] == [0, 2, 3]
    before = exact["base"]["validation_loss"]
    assert [run["curve"][0][1] for run in (exact, again)] == [pytest.approx(before, rel=1e-4)] * 2
    assert exact["loss"] != again["loss"]
    assert deltas["curve"][0][1] == pytest.approx(before, rel=1e-4)
    assert abs(direct["curve"][0][1] / before - 1) > 1e-3
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[0][2] == "perplexity"
    assert rows[1][2] == f"{(math.exp(exact['loss']) + math.exp(again['loss'])) / 2:.4f}"
    assert rows[5][:2] == ["| zero3", f"{math.exp(exact['curve'][0][1]):.4f}"]
    assert picture.read_bytes().startswith(b"\x89PNG")

    content = json.loads((tmp_path / "runs.json").read_text())
    content["runs"][0]["base"]["saved_at"] += 1
    (tmp_path / "runs.json").write_text(json.dumps(content))
    done = start(*where, "--variants", "zero3", "--seeds", 0, 2, "--minutes", 1e-9)
    assert done.returncode == 2
    assert "runs of seed 0 that began with other weights: name other --seeds" in done.stderr


def test_text_is_cut_into_the_tokens_of_the_trained_run(tmp_path):
    config = RunConfig()
    assert grid.with_tokenizer_of(tmp_path, config) == config  # bytes
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer.json").touch()
    assert grid.with_tokenizer_of(tmp_path, config).data.tokenizer == str(
        tmp_path / "data" / "tokenizer.json"
    )


def test_text_of_other_kinds_is_refused(tmp_path):
    (tmp_path / "text.json").write_text('{"kinds": {"Python": 1, "C and C++": 1}}')
    with pytest.raises(ZeroError, match=r"holds text of other kinds \(Python\): name another --folder"):
        grid.prepare_text(RunConfig().data, tmp_path, 1, ("C and C++",))


@pytest.mark.parametrize("name", grid.VARIANTS)
def test_variants_are_settings(name):
    zero = grid.with_variant(RunConfig(), name).to_zero()
    assert zero.base == grid.VARIANTS[name]["preset"]


def test_a_variant_may_have_its_own_rate():
    config = grid.with_variant(RunConfig(), "local-64@2e-3")
    assert (config.optimizer.learning_rate, config.to_zero().every) == (2e-3, 64)
    with pytest.raises(ZeroError, match="'local-64@fast': 'fast' is no learning rate"):
        grid.with_variant(RunConfig(), "local-64@fast")


def test_later_seeds_are_compared_at_the_best_rates_of_the_first():
    runs = [run("zero3", 0, 2.0), run("zero3@1", 0, 1.9), run("delta@1", 0, 3.0), run("zero3@1", 1, 1.8)]
    assert grid.best_rates(runs, 0) == {"zero3": "zero3@1", "delta": "delta@1"}
    found = [(one["variant"], one["seed"]) for one in grid.with_best_rates(runs, 0)]
    assert found == [("zero3", 0), ("delta", 0), ("zero3", 1)]


def test_unknown_variants_are_refused():
    done = convergence("--variants", "zero4")
    assert done.returncode == 2
    assert done.stderr.startswith("zerojax: no variant 'zero4': there are zero3, ")


def run(variant: str, seed: int, loss: float) -> dict[str, Any]:
    curve = [[1, 2 * loss], [2, loss]]
    return {
        "variant": variant,
        "seed": seed,
        "loss": loss,
        "loss_exact": 0.99 * loss,
        "curve": curve,
        "between_nodes": 3e6,
    }


RUNS = [
    run("zero3", 0, 2.0),
    run("zero3", 1, 4.0),
    run("delta", 0, 2.02),
    run("delta", 1, 4.12),
    run("delta", 2, 9.0),  # has no exact run to compare with
    run("int8", 1, 3.96),
]


def test_differences_are_paired_by_seed():
    found = paired.differences(RUNS, "zero3")
    assert found["delta"] == pytest.approx({0: 0.01, 1: 0.03})
    assert found["int8"] == pytest.approx({1: -0.01})


def test_table_has_means_and_standard_errors():
    exact, delta, int8 = paired.table(RUNS[:4] + RUNS[5:], "zero3")[2:5]
    assert exact == "| zero3 | 2 | 3.0000 | 1.4142 |  | -1.00% | 3.0 MB |"
    assert delta == "| delta | 2 | 3.0700 | 1.4849 | +2.00% ± 1.00% | -1.00% | 3.0 MB |"
    assert int8 == "| int8 | 1 | 3.9600 |  | -1.00% | -1.00% | 3.0 MB |"


def test_perplexities_are_of_losses():
    found = paired.in_perplexity(RUNS[:1])
    assert found[0]["loss"] == pytest.approx(math.exp(2))
    assert found[0]["loss_exact"] == pytest.approx(math.exp(1.98))
    assert found[0]["curve"][0] == (1, pytest.approx(math.exp(4)))


def test_curves_are_means_of_the_seeds():
    assert paired.by_step(RUNS)[::2] == [
        "| step | 1 | 2 |",
        "| zero3 | 6.0000 | 3.0000 |",
        "| int8 | 7.9200 | 3.9600 |",
    ]


def test_chance_is_what_variants_and_seeds_leave():
    # Two seeds of three variants: log losses are 1, 2 by seed and 0, 0, 3e by variant, and +-e is chance.
    e, losses = 0.001, {}
    for seed, level in ((0, 1.0), (1, 2.0)):
        sign = 1 if seed else -1
        losses |= {("a", seed): level + sign * e, ("b", seed): level - sign * e, ("c", seed): level + 3 * e}
    chance = paired.Chance.of([run(*key, loss=math.exp(log)) for key, log in losses.items()])
    assert chance is not None
    # Residuals are e, e and 0 in each seed: 4 e^2 in 6 - 4 degrees of freedom. Variants' means are 0, 0 and
    # 3 e: 12 e^2 in 2 degrees. F(2, 2) = 6 / 2, beyond which lies 1 / (1 + 3).
    assert chance.freedom == 2
    assert chance.deviation == pytest.approx(2 * e)
    assert chance.probability == pytest.approx(1 / 4)


def test_chance_needs_more_runs_than_variants_and_seeds():
    assert paired.Chance.of(RUNS[:1]) is None
    assert paired.Chance.of([RUNS[0], RUNS[2]]) is None


@pytest.mark.parametrize(
    ("measured", "rows", "columns"),
    [
        ("quality-124m-2x1", 17, (1, 2, 3, 4, 6)),
        ("quality-124m-800-steps", 2, (1, 2, 3, 4)),
        ("quality-350m-2x1", 3, (1, 2, 4, 6)),
    ],
)
def test_page_has_the_measured_table(measured, rows, columns):
    """Seeds, loss, spread, difference and bytes of every variant with several seeds; of other sizes less."""
    root = FOLDER.parents[1]
    runs = json.loads((root / "docs" / "measured" / f"{measured}.json").read_text())["runs"]
    page = (root / "docs" / "quality.md").read_text()
    lines = [
        row.removesuffix(" |").split(" | ") for row in paired.table(runs, "zero3")[2:] if row[:2] == "| "
    ]
    assert len(lines) == rows
    for cells in lines:
        shown = " | ".join(cells[column] for column in columns).replace("  ", " ") in page.replace("  ", " ")
        assert shown or (rows > 3 and cells[1] == "1")
        within = 0.06 if "fp8" in cells[0] else 0.015 if "fp6" in cells[0] else 0.005
        assert abs(float(cells[5].removesuffix("%"))) < within


def test_page_has_the_perplexities():
    root = FOLDER.parents[1]
    runs = json.loads((root / "docs" / "measured" / "fine-tuning-124m-2x1.json").read_text())["runs"]
    page = (root / "docs" / "quality.md").read_text()
    rows = [
        row for row in paired.table(paired.in_perplexity(runs), "zero3", "perplexity")[2:] if row[:2] == "| "
    ]
    assert len(rows) == 8
    for row in rows:
        assert row.split(" | ", 1)[1] in page


def test_a_table_of_no_runs_has_a_head_alone():
    """There was no time for the first run, or all have failed."""
    assert len(paired.table([], "zero3")) == 2
    assert paired.by_step([]) == []


def test_picture_of_runs_without_a_pair(tmp_path):
    paired.draw(RUNS, "zero3", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def lines(first: int, last: int) -> str:
    return "".join(f"    some words about the number {i}\n" for i in range(first, last))


def collected(path: Path, roots: list[Path], megabytes: float) -> tuple[dict[str, Any], list[str]]:
    found = machine_text.collect(path, roots, megabytes)
    return found, [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_text_has_each_document_once(tmp_path):
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "a.py").write_text(lines(0, 20))
    (root / "deep" / "same.py").write_text(lines(0, 20))
    (root / "deep" / "b.md").write_text(lines(100, 120))
    (root / "moved.h").write_text("\n\n" + lines(112, 120) + lines(100, 112).replace("    ", "\t"))
    (root / "half.rst").write_text(lines(200, 220) + lines(100, 110))
    (root / "short.py").write_text("x = 1\n")
    (root / "numbers.txt").write_text("0.12345 0.54321\n" * 40)
    (root / "wide.py").write_text("x" * 2000)
    (root / "latin.txt").write_bytes(lines(300, 320).encode() + b"\xe9")
    (root / "picture.png").write_text(lines(400, 420))
    found, texts = collected(tmp_path / "text.jsonl", [root, root / "deep"], 1)
    # Of copies the one whose path's hash comes first is taken.
    assert len(texts) == found["documents"] == 3
    assert found["duplicates"] == 1
    assert found["near_duplicates"] == 1
    assert lines(0, 20) in texts
    assert sum(map(len, texts)) == found["bytes"]
    assert found["kinds"].keys() <= machine_text.KINDS.keys()
    assert found == collected(tmp_path / "again.jsonl", [root], 1)[0]


def test_text_is_of_some_kinds(tmp_path):
    (tmp_path / "a.py").write_text(lines(0, 20))
    (tmp_path / "b.h").write_text(lines(100, 120))
    out = tmp_path / "text.jsonl"
    found = machine_text.collect(out, [tmp_path], 1, ["C and C++"])
    assert found["kinds"].keys() == {"C and C++"}
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == [lines(100, 120)]


def test_text_ends_at_its_size(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(lines(100 * i, 100 * i + 30))  # about 1 kB each
    found, texts = collected(tmp_path / "out" / "text.jsonl", [tmp_path], 0.005)
    assert 5000 <= found["bytes"] < 6500
    assert len(texts) < 20
