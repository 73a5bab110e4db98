"""The memory that a state takes and leaves."""

import math
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from generation_models import SMALL, create
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.errors import ConfigurationError, RunError
from zerojax.sharding.host_memory import LIMIT
from zerojax.sharding.memory import HOST
from zerojax.sharding.mesh import make_mesh
from zerojax.train import memory
from zerojax.train.memory import (
    check_host_memory,
    device_bytes,
    free_memory,
    held_in_host,
    host_bytes,
    reserve_host_memory,
    state_bytes,
)


def test_room_is_what_the_state_leaves_of_a_device():
    mixed = create(SMALL, 2, 4, frozen=("*/mlp/*",), frozen_weights="int8")
    spec = mixed.spec
    assert free_memory(spec) == np.iinfo(np.int32).max  # CPUs do not say
    state = device_bytes([x for x in jax.tree.leaves(mixed) if isinstance(x, jax.Array)])
    assert state_bytes(spec) == state
    devices = [mock.Mock(memory_stats=lambda own=own: {"bytes_limit": own}) for own in (8 << 30, 4 << 30)]
    fake: Any = mock.Mock(mesh=mock.Mock(local_devices=devices), once=lambda *_: state)
    assert free_memory(fake) == int(0.85 * (4 << 30) - state) >> 20


def test_arrays_count_in_the_memory_where_they_are():
    mesh = make_mesh(2, 2, devices=jax.devices()[:4])
    sharded = NamedSharding(mesh, PartitionSpec(("local", "node")))
    there = jax.ShapeDtypeStruct((8, 3), np.float32, sharding=sharded.with_memory_kind(HOST))
    here = jax.ShapeDtypeStruct((8, 5), np.float32, sharding=sharded)
    tree = {"there": there, "here": here, "whole": np.zeros(7, np.int8)}
    assert (host_bytes(tree), device_bytes(tree)) == (2 * 3 * 4, 2 * 5 * 4 + 7)
    put = jax.device_put(np.zeros((8, 3), np.float32), there.sharding)
    assert (host_bytes(put), device_bytes(put)) == (2 * 3 * 4, 0)


def test_reserves_page_locked_memory_in_one_piece_or_says_so(monkeypatch):
    arrays, wait = [], jax.block_until_ready
    monkeypatch.setattr(memory, "_reserved", [])
    monkeypatch.setattr(jax, "block_until_ready", lambda x: arrays.append(wait(x)))
    reserve_host_memory(1000)
    assert not arrays, "a CPU locks none"
    monkeypatch.setattr(memory, "on_gpus", lambda _: True)
    reserve_host_memory(1000)
    (array,) = arrays
    assert [(x.data.nbytes, x.device) for x in array.addressable_shards] == [
        (1050, device) for device in jax.local_devices()
    ], "each GPU has a pool"
    assert array.sharding.memory_kind == HOST
    assert memory._reserved == [1 << 30]
    reserve_host_memory(1000, jax.local_devices()[:2])
    assert [x.device for x in arrays[1].addressable_shards] == jax.local_devices()[:2], "the mesh's alone"
    assert memory._reserved == [1 << 30] * 2
    monkeypatch.setattr(jax, "block_until_ready", mock.Mock(side_effect=jax.errors.JaxRuntimeError))
    monkeypatch.setenv(LIMIT, "7")
    with pytest.raises(
        RunError, match=rf"0\.1 GB of page-locked .* {jax.local_device_count()} GPUs.*{LIMIT} \(7 now\)"
    ):
        reserve_host_memory(10**8)
    assert memory._reserved == [1 << 30] * 2


def test_too_little_host_memory_is_refused_with_the_way_out(monkeypatch):
    held, gib = 3 << 30, 1 << 30
    devices = [mock.Mock(platform="gpu")] * 2
    spec: Any = mock.Mock(
        mesh=mock.Mock(local_devices=devices), streams=True, zero=mock.Mock(host=("optimizer",))
    )
    monkeypatch.setattr(memory, "abstract_fields", lambda _: {})
    monkeypatch.setattr(memory, "host_bytes", lambda _: held)
    monkeypatch.setenv(LIMIT, "4")
    monkeypatch.setattr(memory, "memory_limits", lambda: {"host": 8 * gib})
    check_host_memory(spec)
    with pytest.raises(ConfigurationError, match=r"12\.9 GB in the memory of a host.* 8\.59 GB are free"):
        check_host_memory(spec, activations=held)
    with pytest.raises(ConfigurationError, match=r"6\.44 GB in .* needs 12\.9 GB, checkpoints included, and"):
        check_host_memory(spec, saves=True)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "memory_limits", lambda: {"host": 12 * gib})
        check_host_memory(spec, saves=True)  # a portion is in no pool
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_reserved", [gib, 3 * gib])
        patch.setattr(memory, "memory_limits", lambda: {"host": 2 * gib})
        check_host_memory(spec)
        patch.setattr(memory, "memory_limits", lambda: {"host": gib})
        with pytest.raises(ConfigurationError, match=r"needs 2\.15 GB, and 1\.07 GB are free"):
            check_host_memory(spec)
    monkeypatch.setenv(LIMIT, "3")
    with pytest.raises(ConfigurationError, match=rf"(?s)at most 3\.22 GB for each\. .*{LIMIT}=4 python"):
        check_host_memory(spec)
    devices[:] = [mock.Mock(platform="cpu")] * 2  # no pool, and no limit of XLA's
    check_host_memory(spec)
    monkeypatch.setattr(memory, "host_bytes", lambda _: 0)
    monkeypatch.setattr(memory, "memory_limits", lambda: {"host": 0})
    check_host_memory(spec)


def test_processes_of_a_host_need_its_memory_together(monkeypatch):
    """Each fits by itself. XLA's pools double up to their limit; the hint names a limit that is enough."""
    held, gib = 41 << 30, 1 << 30
    zero, devices = mock.Mock(host=("optimizer",)), [mock.Mock(platform="gpu")]
    spec: Any = mock.Mock(mesh=mock.Mock(local_devices=devices), streams=True, zero=zero)
    monkeypatch.setattr(memory, "held_in_host", lambda *_: held)
    monkeypatch.setattr(memory, "memory_limits", lambda: {"host": 118 * gib})
    monkeypatch.setenv(LIMIT, "100")
    check_host_memory(spec)
    monkeypatch.setattr(memory, "gather_from_all", lambda claim: [claim, claim])
    with pytest.raises(
        ConfigurationError, match=rf"2 processes here need together 137 GB.* {LIMIT}=46 "
    ) as no:
        check_host_memory(spec)
    assert len(str(no.value)) <= 500
    monkeypatch.setenv(LIMIT, "46")
    check_host_memory(spec)
    monkeypatch.setattr(memory, "gather_from_all", lambda claim: [claim] * 3)
    with pytest.raises(ConfigurationError, match=r"3 processes .* 148 GB, and 127 GB .* less on the host\.$"):
        check_host_memory(spec)


def test_all_that_local_updates_keep_in_a_node_counts():
    """Each node: weights, known outer weights, two moments and residuals; half of masters and of momentum."""
    spec = create(SMALL, 2, 1, preset="local", host=("optimizer",), abstract=True).spec
    whole = 4 * sum(math.prod(leaf.stored_shape) for leaf in spec.leaves)
    assert held_in_host(spec) == 6 * whole
