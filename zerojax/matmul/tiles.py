"""A loop over tiles of tokens, which sums the gradients of shared inputs in fp32."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, PyTree

from zerojax.matmul.late_zeros import at, put, scan, zeros_after

LOOP = "zerojax_tiles"
"""The name of a call in a jaxpr that holds nothing but ``over_tiles`` (``zerojax.matmul.replay``)."""


def over_tiles(
    body: Callable[[Any, list[Array]], Sequence[PyTree[Array]]],
    consts: PyTree[Array],
    tiles: Sequence[Array],
) -> list[Array]:
    """``body(consts, tile)`` for each of the stacked ``tiles``; gradients of ``consts`` are summed in fp32.

    ``body`` is pure, closes over nothing that is traced, and is traced once.
    """
    like = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in tiles]
    call = jaxpr_as_fun(jax.make_jaxpr(body)(consts, like))
    count, leaves = len(tiles[0]), jax.tree.leaves(consts)
    made = [((count, *x.shape), x.dtype) for x in jax.eval_shape(call, *leaves, *like)]

    @jax.custom_vjp
    def run(consts: list[Array], tiles: list[Array]) -> list[Array]:
        # Interpreters of the program read this loop; under differentiation `forward` runs in its place.
        return lax.map(lambda tile: call(*consts, *tile), tiles)

    def forward(consts: list[CustomVJPPrimal], tiles: list[CustomVJPPrimal]) -> tuple[list[Array], _Kept]:
        own, values = ([x.value for x in part] for part in (consts, tiles))
        wanted = tuple(x.perturbed and jnp.issubdtype(x.value.dtype, jnp.inexact) for x in (*consts, *tiles))

        results = scan(lambda _, tile: ((), call(*own, *tile)), (), values)[1]
        return results, _Kept(own, values, wanted)

    def backward(
        kept: _Kept, cotangents: list[Array | SymbolicZero]
    ) -> tuple[list[Array | None], list[Array | None]]:
        consts, tiles, wanted = kept.consts, kept.tiles, kept.wanted
        given = zip(cotangents, made, strict=True)
        known = [x for x in cotangents if not isinstance(x, SymbolicZero)]
        arrived = [zeros_after(known, *own) if isinstance(x, SymbolicZero) else x for x, own in given]
        summed = [x for x, own in zip(consts, wanted, strict=False) if own]
        sums = [zeros_after(known, x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in summed]
        stacks, places = _places(
            arrived, [x for x, own in zip(tiles, wanted[len(consts) :], strict=True) if own]
        )

        def one(number: Array, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
            sums, stacks = carry
            tile, cotangent = at((tiles, stacks[: len(arrived)]), number)
            # A tile waits for the tile before it, even if XLA unrolls the loop.
            sums, tile, cotangent = lax.optimization_barrier((sums, tile, cotangent))
            every = [*consts, *tile]

            def of(varied: list[Array]) -> list[Array]:
                parts = iter(varied)
                return call(*(next(parts) if own else x for x, own in zip(every, wanted, strict=True)))

            varied = [x for x, own in zip(every, wanted, strict=True) if own]
            (found,) = jax.vjp(of, varied)[1](cotangent)
            own = dict(zip(places, found[len(sums) :], strict=True))
            written = [put(x, own[place], number) if place in own else x for place, x in enumerate(stacks)]
            return [*map(jnp.add, sums, found)], written

        sums, stacks = lax.fori_loop(0, count, one, (sums, stacks))
        of_consts = (x.astype(like.dtype) for x, like in zip(sums, summed, strict=True))
        found = iter([*of_consts, *(stacks[place] for place in places)])
        every = [next(found) if own else None for own in wanted]
        return every[: len(consts)], every[len(consts) :]

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(leaves, list(tiles))


def _places(arrived: list[Array], tiles: list[Array]) -> tuple[list[Array], list[int]]:
    """Stacks for the cotangents of tiles, and for each of ``tiles`` the number of its stack.

    The first stacks are the results' cotangents. They are reused if a shape fits, because a tile's part is
    dead when the cotangent of the tile is computed.
    """
    stacks, free, places = [*arrived], {*range(len(arrived))}, []
    for x in tiles:
        like = [i for i in sorted(free) if (stacks[i].shape, stacks[i].dtype) == (x.shape, x.dtype)]
        place = like[0] if like else len(stacks)
        if not like:
            stacks.append(zeros_after(arrived, x.shape, x.dtype))
        free.discard(place)
        places.append(place)
    return stacks, places


@functools.partial(jax.tree_util.register_dataclass, data_fields=["consts", "tiles"], meta_fields=["wanted"])
@dataclass(frozen=True)
class _Kept:
    """The residuals: ``consts``, stacked ``tiles``, and whether each of these has a gradient.

    Gradients of frozen weights would take a third of the time, and memory for their sums.
    """

    consts: list[Array]
    tiles: list[Array]
    wanted: tuple[bool, ...]
