"""Models that break the protocol are told how."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generation_models import Averages

from zerojax.errors import ZeroError
from zerojax.generation import continue_text


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

    def decode(self, tokens, start, end, cache):
        hidden, after = super().decode(tokens, start, end, cache)
        return hidden, after | {"tick": cache["tick"] + 1}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wide, r"with float32\[6, 1\] and returns float16\[6, 1\]"),
        (Renamed, "a cache of another structure"),
        (Last, r"shape \(1, 6\) for tokens of shape \(1, 16\): it must be \[batch, time, width\]"),
        (Shared, r"shape \(\) for one row and \(\) for two: each array of the cache needs one axis of rows"),
    ],
)
def test_a_model_that_breaks_the_protocol_is_told_how(model, message):
    with pytest.raises(ZeroError, match=message):
        continue_text(model(nnx.Rngs(0)), [np.arange(3)], 4, key=jax.random.key(0))
