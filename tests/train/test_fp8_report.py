"""The loss of weights in fp8 against numpy, and the warning of a device without fp8 matmuls."""

from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from wire_models import Stacked, batch_of, squared_error

import zerojax
from zerojax.matmul.fp8 import has_fp8
from zerojax.train import step as step_module
from zerojax.zero_config.config import Preset


def state_of(preset: Preset, **settings) -> zerojax.TrainState:
    return zerojax.TrainState.create(
        lambda rngs: Stacked(32, 48, 3, rngs=rngs),
        optax.sgd(0.01),
        squared_error,
        mesh=zerojax.make_mesh(2, 4),
        zero=zerojax.ZeroConfig.preset(preset, **settings),
    )


def in_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One layer's weight times its power of two, and the same through e4m3."""
    scale = 2.0 ** np.floor(np.log2(448 / np.abs(x).max()))
    return x * scale, (x * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def test_shares_and_errors_are_those_of_numpy():
    state = state_of("zero3", matmul_dtype="fp8")
    weights = zerojax.gather_params(state)
    up = weights["blocks"]["block"]["up"]
    kernel = up["kernel"] = up["kernel"].copy()
    kernel[1, 0, :4] = 1e-9, -1e-9, 0, 30  # two underflow beside an outlier, and so may others
    state = zerojax.put_params(state, weights)
    found = zerojax.fp8_report(state)
    assert sorted(found) == ["blocks/block/down/kernel", "blocks/block/up/kernel"]
    pairs = [in_fp8(layer) for layer in kernel]
    exact, coded = (np.stack([pair[i] for pair in pairs]) for i in (0, 1))
    report = found["blocks/block/up/kernel"]
    assert report.saturated == 0
    underflowed = np.sum((exact != 0) & (coded == 0))
    assert underflowed >= 2
    assert report.underflowed == pytest.approx(underflowed / kernel.size)
    wanted = np.sqrt(np.sum((coded - exact) ** 2) / np.sum(exact**2))
    assert report.error == pytest.approx(wanted, rel=1e-4)
    assert 0.01 < found["blocks/block/down/kernel"].error < 0.04


@pytest.mark.slow
def test_delta_reports_its_copies_as_the_next_step_finds_them():
    state = state_of("delta", matmul_dtype="fp8", rotation=0, rounding="nearest")
    first = zerojax.fp8_report(state)
    state, _ = zerojax.train_step(state, batch_of(8))
    for name, after in zerojax.fp8_report(state).items():
        assert first[name].error < 0.04
        # In the same codes, behind by what int4 differences have not sent yet.
        assert 0.01 < after.error < 0.1
        assert after.saturated == 0


def test_without_fp8_matmuls_there_is_nothing_to_report():
    assert zerojax.fp8_report(state_of("zero3")) == {}


@pytest.mark.parametrize(
    ("capability", "has"), [("9.0", True), ("8.9", True), ("10.0", True), ("8.6", False), ("gfx942", False)]
)
def test_fp8_matmuls_by_compute_capability(capability, has):
    assert has_fp8(SimpleNamespace(compute_capability=capability)) == has
    assert not has_fp8(jax.devices()[0])


def test_the_first_step_warns_once_where_there_are_none(capsys):
    step_module._warn_without_fp8.cache_clear()
    state = state_of("zero3", matmul_dtype="fp8")
    assert not capsys.readouterr().err
    for _ in range(2):
        state, _ = zerojax.train_step(state, batch_of(8))
    said = capsys.readouterr().err
    assert said.count("cpu, which has no fp8 matmuls") == 1
    assert "the same numbers come from a reference path, slower than bf16" in said
