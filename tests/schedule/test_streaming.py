"""Runs over stacks in host memory: every layer's arrays, and copies in both directions at once."""

import itertools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

import zerojax
from zerojax.analysis import aot
from zerojax.comm.xla_options import compiler_options
from zerojax.schedule.streaming import over_host_layers
from zerojax.sharding.layers import Index, empty_layers, layer_at
from zerojax.sharding.memory import HOST, to_host

SIZES = {"a": 1 << 18, "b": 3, "c": 1 << 18, "d": 1 << 20, "e": 1 << 19}
"""Elements of a layer, by stack."""
Stacks = dict[str, Array]


def halved(index: Index, have: Stacks) -> tuple[Stacks, Array]:
    return {key: x / 2 + index for key, x in have.items()}, have["b"][:2]


def run(stored: Stacks) -> tuple[Stacks, Array]:
    layers = len(stored["a"])
    return over_host_layers(layers, stored, empty_layers(jnp.zeros(2), layers), halved, stores=True)[:2]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_every_layer_is_read_and_stored_once(layers: int) -> None:
    place = NamedSharding(zerojax.make_mesh(1, 1), PartitionSpec(), memory_kind=HOST)
    rng = np.random.default_rng(0)
    before = {key: rng.standard_normal((layers, min(n, 7)), np.float32) for key, n in SIZES.items()}
    places = (dict.fromkeys(SIZES, place), place.with_memory_kind("device"))
    after, read = jax.jit(run, out_shardings=places)(jax.device_put(before, place))
    for key, x in before.items():
        np.testing.assert_array_equal(after[key], x / 2 + np.arange(layers, dtype=np.float32)[:, None])
    np.testing.assert_array_equal(read, before["b"][:, :2])


def test_on_gpus_each_read_has_a_write_beside_it(cuda_mesh) -> None:
    """XLA has four streams for them all: one after the other, reads would wait for writes before them."""
    mesh: Mesh = cuda_mesh(1, 1)  # skips without a compiler

    def program(start: Array) -> list[Array]:
        # Described devices have no inputs in host memory.
        stored = {key: to_host(lax.full((6, n), start)) for key, n in SIZES.items()}
        return [layer_at(x, 0)[:1] for x in run(stored)[0].values()]

    start = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    jitted = jax.jit(program, compiler_options=compiler_options(mesh, host_memory=True))
    copies = hlo.host_copies(str(jitted.lower(start).compile(dict(aot.COMPILER_OPTIONS)).as_text()))
    looped = [copy for copy in copies if copy.count > 1]
    assert all(copy.by_dma for copy in looped)
    assert max(copy.bytes for copy in looped) == 4 * max(SIZES.values())
    in_a_row = [len(list(group)) for _, group in itertools.groupby(looped, lambda copy: copy.to_host)]
    assert len(looped) == sum(in_a_row) >= 2 * len(SIZES)
    assert max(in_a_row) <= 2
