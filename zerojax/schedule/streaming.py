"""Runs over stacks in host memory: while a layer computes, the next one is fetched and the last one stored.

The copies are made by DMA (``zerojax.schedule.stacked``). An iteration reads and writes each stack, one after
the other. Half of the bytes are read first and half are written first, so that both directions run at once:
on an H100 6.4 GB went to the device and back in 155 ms, and in 190 ms with all of them read first.

With local updates the run is mapped over nodes (``vmap``), of which a device has one. JAX would make gathers
and scatters of the slices, which host memory has none of; here they are slices along the second axis.
"""

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, PyTree

from zerojax.schedule import stacked
from zerojax.schedule.stacked import Index


def over_host_layers[K: Hashable, R: PyTree[Array]](
    layers: int,
    stored: dict[K, Array],
    results: R,
    compute: Callable[[Index, dict[K, Array]], tuple[dict[K, Array], R]],
    *,
    stores: bool,
) -> tuple[dict[K, Array], R, R]:
    """Run ``new, result = compute(index, arrays)`` for every layer.

    The stacks of ``stored`` are in host memory; on the device ``compute`` makes of a layer's arrays new ones
    and its result. The new arrays take the place of the old ones if it ``stores`` them; if not, they are not
    looked at.

    Returns:
        The stacks in host memory, the results, and the last layer's result.
    """
    first = read_first(stored)

    def swap(
        stored: dict[K, Array], new: dict[K, Array], index: Index
    ) -> tuple[dict[K, Array], dict[K, Array]]:
        """Store layer ``index - 1``, and fetch layer ``index + 1``."""
        if not stores:
            return stored, layer_at(stored, index + 1)
        early = {key: x for key, x in stored.items() if key in first}
        late = {key: x for key, x in stored.items() if key not in first}
        # Without the barrier XLA would copy the whole stacks, to read them while they are written.
        fetched, early = lax.optimization_barrier((layer_at(early, index + 1), early))
        early = put_layer(early, {key: new[key] for key in early}, index - 1)
        late = put_layer(late, {key: new[key] for key in late}, index - 1)
        return early | late, fetched | layer_at(late, index + 1)

    new, last = compute(0, layer_at(stored, 0))
    results = put_layer(results, last, 0)
    if layers > 1:
        have, stored = lax.optimization_barrier((layer_at(stored, 1), stored))

        def layer(
            index: Index, carry: tuple[dict[K, Array], dict[K, Array], dict[K, Array], R]
        ) -> tuple[dict[K, Array], dict[K, Array], dict[K, Array], R]:
            stored, have, new, results = carry
            stored, following = swap(stored, new, index)
            new, result = compute(index, have)
            return stored, following, new, put_layer(results, result, index)

        stored, have, new, results = lax.fori_loop(1, layers - 1, layer, (stored, have, new, results))
        stored = put_layer(stored, new, layers - 2) if stores else stored
        new, last = compute(layers - 1, have)
        results = put_layer(results, last, layers - 1)
    return put_layer(stored, new, layers - 1) if stores else stored, results, last


@custom_vmap
def layer_at[T: PyTree[Array]](stack: T, index: Index) -> T:
    """``stacked.layer_at``, mapped over all arrays or none."""
    return stacked.layer_at(stack, index)


@layer_at.def_vmap
def _layer_of_each[T: PyTree[Array]](
    size: int, mapped: tuple[PyTree[bool], bool], stack: T, index: Index
) -> tuple[T, PyTree[bool]]:
    assert all(jax.tree.leaves(mapped[0]))
    assert not mapped[1], f"the same layer of all {size}"
    return stacked.layer_at(stack, index, axis=1), mapped[0]


@custom_vmap
def put_layer[T: PyTree[Array]](stack: T, layer: T, index: Index) -> T:
    """``stacked.put_layer``, likewise."""
    return stacked.put_layer(stack, layer, index)


@put_layer.def_vmap
def _put_layer_of_each[T: PyTree[Array]](
    size: int, mapped: tuple[PyTree[bool], PyTree[bool], bool], stack: T, layer: T, index: Index
) -> tuple[T, PyTree[bool]]:
    def of_each(x: Array, each: bool) -> Array:
        return x if each else jnp.broadcast_to(x, (size, *x.shape))  # one that begins empty

    assert all(jax.tree.leaves(mapped[1]))
    assert not mapped[2], f"the same layer of all {size}"
    return stacked.put_layer(jax.tree.map(of_each, stack, mapped[0]), layer, index, axis=1), mapped[1]


def read_first[K: Hashable](stored: dict[K, Array]) -> set[K]:
    """The stacks that an iteration reads before it writes them: about half of the bytes."""
    chosen: set[K] = set()
    balance = 0
    for key, x in sorted(stored.items(), key=lambda item: -item[1].nbytes):
        if balance <= 0:
            chosen.add(key)
            balance += x.nbytes
        else:
            balance -= x.nbytes
    return chosen
