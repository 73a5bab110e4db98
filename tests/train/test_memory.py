"""The memory that a state takes and leaves."""

from typing import Any
from unittest import mock

import jax
import numpy as np
from generation_models import SMALL, create

from zerojax.train.memory import device_bytes, free_memory, state_bytes


def test_room_is_what_the_state_leaves_of_a_device():
    mixed = create(SMALL, 2, 4, frozen=("*/mlp/*",), frozen_weights="int8")
    spec = mixed.spec
    assert free_memory(spec) == np.iinfo(np.int32).max  # CPUs do not say
    state = device_bytes([x for x in jax.tree.leaves(mixed) if isinstance(x, jax.Array)])
    assert state_bytes(spec) == state
    devices = [mock.Mock(memory_stats=lambda own=own: {"bytes_limit": own}) for own in (8 << 30, 4 << 30)]
    fake: Any = mock.Mock(mesh=mock.Mock(local_devices=devices), once=lambda *_: state)
    assert free_memory(fake) == int(0.85 * (4 << 30) - state) >> 20
