"""Models that break the protocol are told how."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generation_models import Averages

from zerojax.errors import ZeroError
from zerojax.generation import stream
from zerojax.generation.protocol import batch_axes


class Wide(Averages):
    def decode(self, tokens, start, end, cache):
        hidden, cache = super().decode(tokens, start, end, cache)
        return hidden, {"sum": cache["sum"].astype(jnp.float16)}


class Renamed(Averages):
    def decode(self, tokens, start, end, cache) -> Any:
        hidden, cache = super().decode(tokens, start, end, cache)
        return hidden, (cache["sum"],)


class Last(Averages):
    def decode(self, tokens, start, end, cache):
        hidden, cache = super().decode(tokens, start, end, cache)
        return hidden[:, -1], cache


class Shared(Averages):
    def init_cache(self, batch, length, dtype):
        return super().init_cache(batch, length, dtype) | {"tick": jnp.zeros((), dtype)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wide, r"with float32\[6, 1\] and returns float16\[6, 1\]"),
        (Renamed, "a cache of another structure"),
        (Last, r"shape \(1, 6\) for tokens of shape \(1, 16\). Return \[batch, time, width\]"),
    ],
)
def test_a_model_that_breaks_the_protocol_is_refused_with_the_method(model, message):
    with pytest.raises(ZeroError, match=message):
        list(stream(model(nnx.Rngs(0)), np.arange(3), 4, key=jax.random.key(0)))


def test_an_array_of_the_cache_without_an_axis_of_rows_is_refused():
    model = Shared(nnx.Rngs(0))
    with pytest.raises(
        ZeroError, match=r"shape \(\) for one row and \(\) for two. Give each array of the cache"
    ):
        batch_axes(lambda rows: model.init_cache(rows, 4, jnp.float32))
