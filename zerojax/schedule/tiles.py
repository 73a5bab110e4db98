"""Functions of single tokens, computed for a part of the tokens at a time.

Intermediate results of such a function, like an MLP's wide activations, then exist for one tile of the tokens
only, forward and backward. The backward pass of a tile computes its forward pass again. Arctic Long Sequence
Training (Bekman et al., 2025) calls it TiledMLP.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax.errors import TraceContextError
from jax.extend import core
from jaxtyping import Array, PyTree

from zerojax.dataflow import equations_within
from zerojax.errors import ConfigurationError
from zerojax.matmul.tiles import LOOP, over_tiles
from zerojax.schedule.remat import RECOMPUTED

TILE = 32768
"""Most tokens of a tile.

The products that make gradients of weights also add them up in fp32 from tile to tile, which reads and writes
8 bytes an element. Compared with no such sums, tiles of this size cost 2.7% of a step, and smaller ones more
(docs/long-context.md).
"""

_RANDOM = ("random_bits", "rng_bit_generator", "rng_uniform")
_WAY_OUT = (
    "call layers that draw random bits (dropout) or keep state (batch norm) outside of it, or pass the drawn "
    "values of each token as an argument"
)


def tiled[T: PyTree[Array]](function: Callable[..., T], *xs: PyTree[Array], tile: int = TILE) -> T:
    """``function(*xs)`` for at most ``tile`` tokens at a time, if the backward pass computes it again.

    It does in units under ``ZeroConfig(remat="full")`` and ``"attention"``, in training and evaluation. With
    ``"none"``, outside of units, or with fewer tokens, ``tiled`` is a plain call. Intermediate results of
    ``function`` then take memory for one tile. Gradients of the weights that it reads are summed over tiles
    in fp32. In fp8 the activations of each tile have separate scales.

    Args:
        function: acts on each token alone, such as an MLP with its norm: its floating-point results must not
            depend on which other tokens there are. It may close over modules and arrays. It assigns to no
            variable, and draws no random bits.
        *xs: arrays ``[batch, time, ...]``. ``function`` gets ``[1, tokens, ...]``. If tokens do not divide
            into tiles, the last token is repeated, and its additional results are dropped.
        tile: most tokens of a tile.

    Returns:
        The results of ``function`` for all tokens.

    Raises:
        ConfigurationError: ``tile`` is below 1, or an array or a result does not have the same tokens as the
            others; or, with several tiles, the function draws random bits or assigns to a variable of NNX.

    Examples:
        >>> double = zerojax.tiled(lambda x: 2 * x, jnp.ones((2, 8, 4)), tile=4)
        >>> double.shape
        (2, 8, 4)
    """
    leaves = jax.tree.leaves(xs)
    shapes = {x.shape[:2] for x in leaves}
    if tile < 1 or len(shapes) != 1 or min(x.ndim for x in leaves) < 2:
        raise ConfigurationError(
            f"tiled: arrays of shapes {', '.join(str(x.shape) for x in leaves)} in tiles of {tile}. Pass "
            "arrays that begin with the same two axes, rows and tokens, and a tile of at least 1 token"
        )
    (whole,) = shapes
    tokens = math.prod(whole)
    if not RECOMPUTED.get() or tokens <= tile:
        return function(*xs)
    size = tokens_of_tile(tokens, tile)
    tiles = -(-tokens // size)

    def cut(x: Array) -> Array:
        flat = x.reshape(tokens, *x.shape[2:])
        # Not by zeros: what a function makes of them may have no derivative.
        if rest := tiles * size - tokens:
            flat = jnp.pad(flat, [(0, rest)] + [(0, 0)] * (flat.ndim - 1), mode="edge")
        return flat.reshape(tiles, 1, size, *x.shape[2:])

    def joined(x: Array) -> Array:
        return x.reshape(tiles * size, *x.shape[3:])[:tokens].reshape(*whole, *x.shape[3:])

    cuts = jax.tree.map(cut, xs)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), cuts)
    try:
        traced, out = jax.make_jaxpr(function, return_shape=True)(*like)
    except TraceContextError as error:
        raise ConfigurationError(f"tiled: the function assigns to a variable: {_WAY_OUT}") from error
    if any(equation.primitive.name in _RANDOM for equation in equations_within(traced.jaxpr)):
        raise ConfigurationError(
            f"tiled: the function draws random bits, which would be the same in each tile: {_WAY_OUT}"
        )
    for x in jax.tree.leaves(out):
        if x.shape[:2] != (1, size) or not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ConfigurationError(
                f"tiled: the function returns {x.dtype}{x.shape} for tokens of shape {(1, size)}. Let it "
                "return floating-point numbers for each token"
            )

    def body(consts: Sequence[Array], tile: Sequence[Array]) -> list[Array]:
        return core.jaxpr_as_fun(core.ClosedJaxpr(traced.jaxpr, consts))(*tile)

    def loop(consts: Sequence[Array], tiles: Sequence[Array]) -> list[Array]:
        return over_tiles(body, consts, tiles)

    loop.__name__ = LOOP
    results = jax.jit(loop)(list(traced.consts), jax.tree.leaves(cuts))
    return jax.tree.unflatten(jax.tree.structure(out), map(joined, results))


def tokens_of_tile(tokens: int, most: int) -> int:
    """The number of tokens in a tile: of the fewest tiles, or of up to twice as many if those are equal."""
    fewest = -(-tokens // most)
    tiles = next((tiles for tiles in range(fewest, 2 * fewest) if tokens % tiles == 0), fewest)
    return -(-tokens // tiles)
