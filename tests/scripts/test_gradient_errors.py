"""Errors of wire formats on a trained run's gradients."""

import sys

import numpy as np
import pytest
from environment import ROOT

sys.path.append(str(ROOT / "scripts" / "bench"))

import gradient_errors
from gradient_errors import Case, Exact

from zerojax.cli.trained import open_trained
from zerojax.run.config import MeshSection
from zerojax.run.data.dataset import open_dataset


@pytest.fixture(scope="module")
def units(finished):
    config = finished.read_config()
    trained = open_trained(finished, config, MeshSection(nodes=1, local=1))
    return gradient_errors.device_gradients(trained, open_dataset(config.data, finished.data), 1)


@pytest.mark.slow
def test_units_are_the_rest_and_each_layer(units):
    rest, *layers = units
    assert len(layers) == 2
    assert layers[0].keys() == layers[1].keys()
    assert all(x.shape[0] == 8 and x.ndim == 3 for unit in units for x in unit.values())
    for path, x in layers[0].items():
        assert not np.array_equal(x, layers[1][path])
        assert not np.array_equal(x[0], x[1])
    assert rest


def test_exact_formats_have_no_error(units):
    for unit in units:
        mean = gradient_errors.reduced(unit, Case("fp32", "fp32").zero, 0)
        for path, x in unit.items():
            np.testing.assert_allclose(mean[path], x.mean(0), atol=1e-6 * np.abs(x).max())


def test_a_row_is_near_its_theory(units):
    known = [{path: Exact.of(x) for path, x in unit.items()} for unit in units]
    cells = gradient_errors.row(Case("int8", "int4", 64), units, known).strip("| ").split(" | ")
    assert cells[:4] == ["int8 / int4", "64", "-", "nearest"]
    error, theory, ratio = float(cells[4].rstrip("%")), float(cells[5].rstrip("%")), float(cells[6])
    assert 0.5 < ratio < 1.5
    assert ratio == pytest.approx(error / theory, abs=0.01)
    assert abs(float(cells[7].rstrip("%"))) < 3
