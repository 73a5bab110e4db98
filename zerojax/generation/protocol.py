"""The methods that a model needs to generate, and three optional attributes.

- ``context_length``: the most tokens of a sequence.
- ``prefills_in_pieces = False``: ``decode`` must get a whole prompt at once, however long it is.
- ``keys_by_cache_length = True``: the cached values depend on the cache's length. A prompt then gets a cache
  of a slot's length.
"""

from collections.abc import Callable
from typing import Protocol

import jax
from jaxtyping import Array, Float, Int, PyTree

from zerojax.errors import ConfigurationError

PROTOCOL = ("init_cache", "decode", "logits")
Cache = PyTree[Array]
"""Keys and values, or other memory of a model: arrays with an axis of rows."""


class Decoder(Protocol):
    """The methods of a model that generates."""

    def init_cache(self, batch: int, length: int, dtype: jax.numpy.dtype, /) -> Cache:
        """An empty cache for ``batch`` rows of up to ``length`` tokens, with keys and values in ``dtype``."""
        ...

    def decode(
        self,
        tokens: Int[Array, "batch time"],
        start: Int[Array, " batch"],
        end: Int[Array, " batch"],
        cache: Cache,
        /,
    ) -> tuple[Float[Array, "batch time width"], Cache]:
        """Run new tokens; return the input of ``logits``, and the cache with the tokens.

        Args:
            tokens: padded on the right. Tokens beyond ``end`` must not be attended to, and are overwritten
                later.
            start: tokens of each row in the cache before the call.
            end: tokens of each row in the cache after the call.
            cache: from ``init_cache`` or an earlier call.
        """
        ...

    def logits(self, hidden: Float[Array, "... width"], /) -> Float[Array, "... vocab"]:
        """Logits of all tokens, for one position or many."""
        ...


def decoded(
    model: Decoder,
    tokens: Int[Array, "batch time"],
    start: Int[Array, " batch"],
    end: Int[Array, " batch"],
    cache: Cache,
) -> tuple[Float[Array, "batch time width"], Cache]:
    """Call ``model.decode`` and check the shapes and dtypes of its results.

    Raises:
        ConfigurationError: the cache changed its structure, or the hidden states have another shape.
    """
    hidden, after = model.decode(tokens, start, end, cache)
    if jax.tree.structure(after) != jax.tree.structure(cache):
        raise ConfigurationError(
            "the model's decode returns a cache of another structure than init_cache. Return the cache that "
            "it gets, with new values."
        )
    for before, now in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        if (before.shape, before.dtype) != (now.shape, now.dtype):
            raise ConfigurationError(
                f"the model's decode gets a cache with {before.dtype}{list(before.shape)} and returns "
                f"{now.dtype}{list(now.shape)} in its place. Return the same shapes and dtypes."
            )
    if hidden.ndim != 3 or hidden.shape[:2] != tokens.shape:
        raise ConfigurationError(
            f"the model's decode returns an array of shape {hidden.shape} for tokens of shape "
            f"{tokens.shape}. Return [batch, time, width]."
        )
    return hidden, after


def batch_axes(init_cache: Callable[[int], Cache]) -> PyTree[int]:
    """The axis of rows in each array of a cache: the only one that differs for 1 and for 2 rows.

    Raises:
        ConfigurationError: an array has no such axis, or several.
    """
    one, two = (jax.eval_shape(lambda rows=rows: init_cache(rows)) for rows in (1, 2))

    def axis(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> int:
        found = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
        if len(found) != 1:
            raise ConfigurationError(
                f"init_cache made an array of shape {a.shape} for one row and {b.shape} for two. Give each "
                "array of the cache exactly one axis of rows."
            )
        return found[0]

    return jax.tree.map(axis, one, two)
