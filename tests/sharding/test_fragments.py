"""Fragments of a parameter: the same of one in host memory as of one on the device."""

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from zerojax.sharding.fragments import Fragments
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.memory import HOST
from zerojax.sharding.mesh import MeshShape
from zerojax.sharding.wire_format import Codec
from zerojax.zero_config.config import PerHop

EXACT = Codec("fp32", 64)
OWNERS = 2


@pytest.mark.parametrize(
    ("layers", "blocks", "every", "moved"),
    [
        (5, 7, 4, 21),  # longer than a layer
        (3, 8, 5, 10),  # some begin in one layer and end in the next
        (6, 4, 6, 4),  # a layer
        (6, 4, 12, 2),  # a half
        (1, 9, 4, 3),
        (2, 1, 8, 1),  # most are padding
        (2, 1, 1, 2),  # all of it
    ],
)
def test_of_a_parameter_in_host_memory(layers: int, blocks: int, every: int, moved: int) -> None:
    """A fragment is read, and replaced; few blocks besides its own are moved."""
    shard = blocks * EXACT.block
    size, hop = OWNERS * shard, PerHop(EXACT, EXACT)
    leaf = ParamLayout(
        ("w",), (size,), "float32", (layers,), MeshShape(OWNERS, 1), shard, hop, hop, 0, 0, "float32"
    )
    fragments = Fragments(leaf, every, EXACT)
    assert fragments.some * fragments.wide == moved
    here = np.random.default_rng(0).standard_normal(leaf.stored_shape, np.float32)
    there = jax.device_put(here, SingleDeviceSharding(jax.devices()[0], memory_kind=HOST))
    take, put = jax.jit(fragments.take), jax.jit(fragments.put)
    seen = []
    for index in range(every):
        found = take(there, index)
        np.testing.assert_array_equal(found, take(here, index))
        seen.append(np.asarray(found))
        after = put(there, index, -found)
        assert after.sharding.memory_kind == HOST
        np.testing.assert_array_equal(after, put(here, index, -found))
    every_number = np.concatenate(seen)
    assert sorted(every_number[every_number != 0]) == sorted(here.reshape(-1))
