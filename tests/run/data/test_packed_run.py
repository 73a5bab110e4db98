"""A run on packed documents of a mixture: it learns, reports what it read, and resumes where it was."""

import json
from pathlib import Path
from typing import Any

import pytest
from micro_run import micro_config

import zerojax
from zerojax.run import loop
from zerojax.run.config import dump_config, load_config
from zerojax.run.metrics.files import read_metrics
from zerojax.run.run_dir import RunFolder
from zerojax.run.train_run import TrainRun


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["tokens"]) for line in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_a_torn_run_on_a_mixture_goes_on_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.dumps({"body": f"row {i}: " + "to be or not to be " * (i % 5)}) for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    notes = tmp_path / "notes"
    notes.mkdir()
    for i in range(40):
        (notes / f"{i}.txt").write_text(f"note {i} " * (3 + i % 4))
    mixture = [
        {"source": str(tmp_path / "rows.jsonl"), "weight": 3, "column": "body"},
        {"source": str(notes)},
    ]
    config = micro_config(
        tmp_path,
        train={"sequence_length": 32},
        mesh={"nodes": 1, "local": 2},
        data={"source": "stdlib", "mixture": mixture, "packing": "documents"},
    )
    # The run's folder keeps the settings that it began with.
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config

    def train(folder: Path, **options: Any) -> TrainRun:
        with TrainRun.open(config, RunFolder(folder), **options) as trainer:
            trainer.train()
        return trainer

    train(tmp_path / "whole")
    with monkeypatch.context() as patch:
        real, steps = zerojax.train_step, iter(range(5))

        def train_step(state: Any, batch: Any) -> Any:
            if next(steps, None) is None:
                raise KeyError("torn")
            return real(state, batch)

        patch.setattr(loop, "train_step", train_step)
        with pytest.raises(KeyError, match="torn"):
            train(tmp_path / "torn")
    train(tmp_path / "torn", resume="must")
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "torn") == whole
    assert len(whole) == 8
    assert whole[-1][0] < whole[0][0] - 0.5
    # Eight rows of 33 places, of which each document but the last of a row gives one to the next.
    assert all(8 * 20 < tokens < 8 * 32 for _, tokens in whole)
    first, second = RunFolder(tmp_path / "whole").read_summary()["sources"]
    assert (first["weight"], second["weight"]) == (3, 1)
    assert first["documents"] > 100 > second["documents"]
    assert first["rounds"] > 0
    assert second["rounds"] > 0
