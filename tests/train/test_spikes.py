"""A loss that is a spike skips its step, by a rule that numpy agrees with; on any mesh, over a resume."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES

import zerojax
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.run.checkpoints.canonical import to_canonical

RULE = zerojax.SpikeRule(3.0, window=4)
ROWS, STEPS, SPIKES, NOT_FINITE = 24, 12, (7, 8, 11), 3
LOSSY = {"weights": "int8", "weights_delta": True, "hpz": True, "grads": ("int8", "int4"), "block_size": 64}


def start(nodes: int, local: int, *, abstract: bool = False, rule: Any = RULE, **zero: Any) -> Any:
    case = CASES["nnx"]
    create = zerojax.TrainState.abstract if abstract else zerojax.TrainState.create
    return create(case.model, optax.adamw(1e-2), case.loss, **case._rest(nodes, local, zero), spikes=rule)


def train(state: Any, first: int, last: int) -> tuple[Any, list[dict[str, float]]]:
    """Steps `first` to `last`, with losses that jump at some of them, and one that is not a number."""
    batches, metrics = CASES["nnx"].batches(ROWS, STEPS), []
    for step in range(first, last + 1):
        batch = dict(batches[step - 1])
        if step in SPIKES:
            batch["y"] = batch["y"] * 20
        if step == NOT_FINITE:
            batch["y"] = batch["y"] * np.nan
        before = jax.tree.map(np.asarray, (state.params, state.opt_state))
        state, found = zerojax.train_step(state, batch)
        metrics.append({name: float(value) for name, value in found.items()})
        if metrics[-1]["skipped"]:
            after = (state.params, state.opt_state)
            jax.tree.map(np.testing.assert_array_equal, before, after)
    return state, metrics


def limits(losses: list[float]) -> list[float]:
    """The rule in numpy: before each step, the largest loss that is no spike."""
    recent: list[float] = []
    found = []
    for loss in losses:
        window = np.array(recent[-RULE.window :])
        full = len(window) == RULE.window
        found.append(window.mean() + RULE.deviations * window.std() if full else np.inf)
        if np.isfinite(loss) and loss <= found[-1]:
            recent.append(loss)
    return found


@pytest.mark.parametrize(
    ("nodes", "local", "zero"),
    [
        pytest.param(1, 1, {"stage": 0}, marks=pytest.mark.slow),
        (2, 4, {"accumulate": 3}),
        pytest.param(3, 2, {"stage": 2}, marks=pytest.mark.slow),
        pytest.param(4, 2, {**LOSSY, "accumulate": 3}, marks=pytest.mark.slow),
    ],
)
def test_spikes_are_skipped(nodes: int, local: int, zero: dict[str, Any]) -> None:
    state, metrics = train(start(nodes, local, **zero), 1, STEPS)
    losses = [m["loss"] for m in metrics]
    np.testing.assert_allclose([m["loss_limit"] for m in metrics], limits(losses), rtol=1e-5)
    assert [step for step, m in enumerate(metrics, 1) if m["spike"]] == list(SPIKES)
    assert [step for step, m in enumerate(metrics, 1) if m["skipped"]] == [NOT_FINITE, *SPIKES]
    assert [int(m["skipped_in_row"]) for m in metrics] == [0, 0, 1, 0, 0, 0, 1, 2, 0, 0, 1, 0]
    assert int(state.losses["count"]) == RULE.window


@pytest.mark.slow
def test_a_resumed_run_decides_as_it_would_have(tmp_path: Path) -> None:
    """The losses are saved; on another mesh they go along, and where they cannot they begin anew."""
    state, _ = train(start(2, 4, **LOSSY), 1, 6)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(6, state, Record())
    kept = jax.tree.map(np.asarray, state.losses)
    whole, expected = train(state, 7, STEPS)
    assert sum(m["spike"] for m in expected) == 3
    again, found = train(restore(tmp_path / "6", start(2, 4, abstract=True, **LOSSY)), 7, STEPS)
    assert found == expected
    jax.tree.map(np.testing.assert_array_equal, to_canonical(again), to_canonical(whole))
    moved = restore(tmp_path / "6", start(3, 2, abstract=True))
    jax.tree.map(np.testing.assert_array_equal, moved.losses, kept)
    wider = restore(
        tmp_path / "6", start(2, 4, abstract=True, rule=zerojax.SpikeRule(3.0, window=5), **LOSSY)
    )
    assert int(wider.losses["count"]) == 0
    assert restore(tmp_path / "6", start(2, 4, abstract=True, rule=None, **LOSSY)).losses == {}


def test_equal_losses_are_no_spikes() -> None:
    losses, loss = RULE.start(), jnp.float32(0.1)
    for _ in range(20):
        assert loss <= RULE.limit(losses)
        losses = RULE.add(losses, loss, jnp.bool_(True))
    assert RULE.limit(losses) < 0.1001


@pytest.mark.parametrize(("deviations", "window"), [(0, 10), (float("nan"), 10), (float("inf"), 10), (3, 1)])
def test_what_is_no_rule_is_refused(deviations: float, window: int) -> None:
    with pytest.raises(zerojax.ZeroError, match="SpikeRule: "):
        zerojax.SpikeRule(deviations, window)
