"""Keyword arguments that do not exist: the nearest one is suggested."""

# pyright: reportCallIssue=false

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
    ("call", "message"),
    [
        (lambda: zerojax.ZeroConfig(wieghts="int8"), "ZeroConfig has no .*: did you mean 'weights'"),
        (lambda: zerojax.ZeroConfig.preset("delta", acumulate=2), "did you mean 'accumulate'"),
        (lambda: zerojax.Trainer(None, save_evry=2), "Trainer has no .*: did you mean 'save_every'"),
        (lambda: zerojax.TrainState.create(None, optax.sgd(1), None, mash=None), "create has no .* 'mesh'"),
        (lambda: zerojax.TrainState.abstract(None, None, None, zeros=None), "abstract has no .* mean 'zero'"),
        (lambda: zerojax.LoRA(rnk=2), "LoRA has no argument 'rnk': did you mean 'rank'"),
        (lambda: GPTConfig(layer=2), "GPTConfig has no argument 'layer': did you mean 'layers'"),
        (lambda: Retention(newst=2), "Retention has no argument 'newst': did you mean 'newest'"),
        (lambda: scale(1.0, xyzzy=2), "scale has no argument 'xyzzy': there are x, factor"),
    ],
)  # fmt: skip
def test_the_nearest_argument_is_suggested(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_other_calls_are_as_before():
    assert scale(3.0, factor=1.0) == 3.0
    with pytest.raises(TypeError, match="missing 1 required"):
        scale()  # pyright: ignore[reportCallIssue]
    assert zerojax.ZeroConfig.preset("delta").replace(accumulate=2).accumulate == 2
