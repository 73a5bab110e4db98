"""Runs with local updates: each step's metrics on its own line, and the same bits after a restart."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from micro_run import Stop, lines

import zerojax
from zerojax.errors import DivergedError

HELD_OUT = [{"x": np.full((4, 4), 0.5, np.float32)}]
TX = optax.adam(0.1)


def loss(model: nnx.Linear, batch: Any) -> Any:
    error = model(batch["x"]) - 1
    return jnp.mean(error**2), {"error": jnp.mean(jnp.abs(error))}


def abstract() -> zerojax.TrainState:
    return zerojax.TrainState.abstract(
        lambda rngs: nnx.Linear(4, 2, rngs=rngs),
        TX,
        loss,
        mesh=zerojax.make_mesh(2, 1),
        zero=zerojax.ZeroConfig.preset("local", every=3, stage=2, compute_dtype="float32", block_size=64),
    )


def draw(bad: set[int], killed_at: int = 0) -> Iterator[dict[str, Any]]:
    """Batches; in some steps the second node has a row that is not finite."""
    for step in itertools.count(1):
        if step == killed_at:
            raise Stop
        x = np.random.default_rng(step).standard_normal((4, 4), dtype=np.float32)
        if step in bad:
            x[-1] = np.nan
        yield {"x": x}


def trainer(folder: Path, **options: Any) -> zerojax.Trainer:
    given: dict[str, Any] = {"save_every": 3, "evaluate": HELD_OUT, "evaluate_every": 4, "max_skips": 3}
    return zerojax.Trainer(abstract(), folder, **given | options)


def test_lines_are_those_of_their_steps_and_the_same_after_a_restart(tmp_path: Path) -> None:
    """Step 3 is skipped by a node, so the save that is due waits for step 4, from which the other resumes."""
    state = trainer(tmp_path / "whole").fit(draw({3}), steps=8)
    whole = lines(tmp_path / "whole")
    assert [line["step"] for line in whole] == list(range(1, 9))
    assert [line["skipped"] for line in whole] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert [line["step"] for line in whole if line["loss"] is None] == [3]
    assert [line["step"] for line in whole if "validation_error" in line] == [4, 8]
    assert np.isfinite([line["error"] for line in whole[3:]]).all()
    last = {name: float(x) for name, x in zerojax.last_metrics(state).items()}
    assert last.items() <= whole[-1].items()
    with pytest.raises(Stop):
        trainer(tmp_path / "torn").fit(draw({3}, killed_at=6), steps=8)
    resumed = trainer(tmp_path / "torn")
    assert resumed.step == 4
    resumed.fit(draw({3}), steps=8)
    assert lines(tmp_path / "torn") == whole


def test_the_metrics_of_a_step_come_with_the_next(tmp_path: Path) -> None:
    told: dict[int, float] = {}
    own: dict[int, float] = {}

    class Listen(zerojax.Callback):
        def on_step_end(self, trainer: zerojax.Trainer) -> None:
            own[trainer.step] = float(zerojax.last_metrics(trainer.state)["loss"])

        def on_log(self, trainer: zerojax.Trainer, step: int, values: Any) -> None:
            told[step] = values["loss"]

    trainer(tmp_path / "run", evaluate=None, evaluate_every=0, callbacks=[Listen()]).fit(draw(set()), steps=5)
    assert told == own


def test_a_run_that_diverges_names_the_steps(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="in 3 steps in a row, from step 4 on") as error:
        trainer(tmp_path / "run").fit(draw(set(range(4, 9))), steps=8)
    assert error.value.good == 2
    assert [line["skipped_in_row"] for line in lines(tmp_path / "run")] == [0, 0, 0, 1, 2, 3]
