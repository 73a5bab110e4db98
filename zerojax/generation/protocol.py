"""What a model needs to generate: three methods. It may have attributes.

``context_length`` is the most tokens of a sequence. ``prefills_in_pieces = False`` says that ``decode`` must
get a prompt at once, however long it is, and ``keys_by_cache_length = True`` that what it keeps depends on
the length of the cache, which is then that of a slot for a prompt, too.
"""

from collections.abc import Callable
from typing import Protocol

import jax
from jaxtyping import Array, Float, Int, PyTree

from zerojax.errors import ConfigurationError

PROTOCOL = ("init_cache", "decode", "logits")
Cache = PyTree[Array]
"""Of keys and values, or whatever a model remembers: arrays that have an axis of rows."""


class Decoder(Protocol):
    """The methods of a model that generates."""

    def init_cache(self, batch: int, length: int, dtype: jax.numpy.dtype, /) -> Cache:
        """An empty cache for ``batch`` rows of ``length`` tokens."""
        ...

    def decode(
        self,
        tokens: Int[Array, "batch time"],
        start: Int[Array, " batch"],
        end: Int[Array, " batch"],
        cache: Cache,
        /,
    ) -> tuple[Float[Array, "batch time width"], Cache]:
        """Run new tokens; returns what ``logits`` takes, and the cache with them.

        Args:
            tokens: padded on the right: what a row has beyond ``end`` must not be attended to, and is
                overwritten later.
            start: how many predecessors each row has in the cache.
            end: how many tokens it has in all, afterwards.
            cache: as it was returned before.
        """
        ...

    def logits(self, hidden: Float[Array, "... width"], /) -> Float[Array, "... vocab"]:
        """Scores of every token."""
        ...


def decoded(
    model: Decoder,
    tokens: Int[Array, "batch time"],
    start: Int[Array, " batch"],
    end: Int[Array, " batch"],
    cache: Cache,
) -> tuple[Float[Array, "batch time width"], Cache]:
    """``model.decode``, checked.

    Raises:
        ConfigurationError: it returns another kind of cache, or no ``hidden`` for each token.
    """
    hidden, after = model.decode(tokens, start, end, cache)
    if jax.tree.structure(after) != jax.tree.structure(cache):
        raise ConfigurationError(
            "the model's decode returns a cache of another structure than init_cache: return the one that it "
            "was given, with new values."
        )
    for before, now in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        if (before.shape, before.dtype) != (now.shape, now.dtype):
            raise ConfigurationError(
                f"the model's decode was given a cache with {before.dtype}{list(before.shape)} and returns "
                f"{now.dtype}{list(now.shape)} in its place: the cache keeps its shapes and dtypes."
            )
    if hidden.ndim != 3 or hidden.shape[:2] != tokens.shape:
        raise ConfigurationError(
            f"the model's decode returns an array of shape {hidden.shape} for tokens of shape "
            f"{tokens.shape}: it must be [batch, time, width]."
        )
    return hidden, after


def batch_axes(init_cache: Callable[[int], Cache]) -> PyTree[int]:
    """The axis of rows in each array of a model's cache: the one that differs in caches of 1 and of 2 rows.

    Raises:
        ConfigurationError: an array has none.
    """
    one, two = (jax.eval_shape(lambda rows=rows: init_cache(rows)) for rows in (1, 2))

    def axis(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> int:
        found = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
        if len(found) != 1:
            raise ConfigurationError(
                f"init_cache made an array of shape {a.shape} for one row and {b.shape} for two: each array "
                "of the cache needs one axis of rows"
            )
        return found[0]

    return jax.tree.map(axis, one, two)
