"""Keyword arguments that do not exist: the nearest one is suggested."""

from typing import Any

import optax
import pytest

import zerojax
from zerojax.models import GPTConfig
from zerojax.run.checkpoints import Retention
from zerojax.validation.arguments import suggests


@suggests
def scale(x: float, *, factor: float = 2.0) -> float:
    return x * factor


@pytest.mark.parametrize(
    ("call", "arguments", "options", "message"),
    [
        (zerojax.ZeroConfig, (), {"wieghts": "int8"}, "ZeroConfig has no .*: did you mean 'weights'"),
        (zerojax.ZeroConfig.preset, ("delta",), {"acumulate": 2}, "did you mean 'accumulate'"),
        (zerojax.Trainer, (None,), {"save_evry": 2}, "Trainer has no .*: did you mean 'save_every'"),
        (zerojax.TrainState.create, (None, optax.sgd(1), None), {"mash": None}, "create has no .* 'mesh'"),
        (zerojax.TrainState.abstract, (None,) * 3, {"zeros": None}, "abstract has no .* mean 'zero'"),
        (zerojax.LoRA, (), {"rnk": 2}, "LoRA has no argument 'rnk': did you mean 'rank'"),
        (GPTConfig, (), {"layer": 2}, "GPTConfig has no argument 'layer': did you mean 'layers'"),
        (Retention, (), {"newst": 2}, "Retention has no argument 'newst': did you mean 'newest'"),
        (scale, (1.0,), {"xyzzy": 2}, "scale has no argument 'xyzzy': there are x, factor"),
    ],
)
def test_the_nearest_argument_is_suggested(call: Any, arguments: Any, options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        call(*arguments, **options)


def test_other_calls_are_as_before():
    assert scale(3.0, factor=1.0) == 3.0
    call: Any = scale
    with pytest.raises(TypeError, match="missing 1 required"):
        call()
    assert zerojax.ZeroConfig.preset("delta").replace(accumulate=2).accumulate == 2
