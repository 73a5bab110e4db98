"""A batch on the mesh: its rows spread over the devices, its scalars replicated."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from zerojax.errors import ConfigurationError
from zerojax.train.spec import TrainSpec

NUMBER = (bool, int, float, complex)
"""Python's numbers, which have no dtype of their own."""


def abstract_batch(spec: TrainSpec, batch: Any) -> Any:
    """The global batch's shapes, dtypes and shardings, as one process sees it."""
    _check_batch(batch)

    def place_one(x: Any) -> Any:
        if isinstance(x, NUMBER):
            return x
        _check_rows(np.shape(x), spec.world.size, spec.zero.accumulate)
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        sharding = spec.sharding(batch_spec(spec, x))
        return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=sharding)

    return jax.tree.map(place_one, batch)


def place(spec: TrainSpec, batch: Any, accumulate: int) -> Any:
    """Spread a host batch over the devices, and replicate its scalars.

    Arrays that are already in place stay as they are. Python's numbers stay numbers, because jit gives them
    weak dtypes.
    """
    _check_batch(batch)
    processes = spec.once("processes", lambda: len({d.process_index for d in spec.mesh.devices.flat}))

    def place_one(x: Any) -> Any:
        if isinstance(x, NUMBER):
            return x
        sharding = spec.sharding(batch_spec(spec, x))
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        _check_rows(np.shape(x), spec.world.size // processes, accumulate)
        if processes == 1:
            return jax.device_put(x, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return jax.tree.map(place_one, batch)


def local_rows(x: jax.Array) -> np.ndarray:
    """The rows of a batch-sharded array that are on this process's devices."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def _check_batch(batch: Any) -> None:
    leaves = jax.tree.leaves(batch)
    if any(isinstance(x, Tracer) for x in leaves):
        raise ConfigurationError(
            "the batch is traced: zerojax's steps are compiled already, with options and donation of their "
            "own. Call them outside jax.jit."
        )
    if leaves and not any(map(np.shape, leaves)):
        raise ConfigurationError(
            "the batch has only scalars, which every device gets: no array has a leading axis to spread."
        )


def _check_rows(shape: tuple[int, ...], devices: int, accumulate: int) -> None:
    if shape and (shape[0] == 0 or shape[0] % (devices * accumulate)):
        raise ConfigurationError(
            f"a batch array of shape {shape} has {shape[0]} rows, not a positive multiple of {devices} "
            f"devices x accumulate={accumulate}: its leading axis is the batch."
        )


def batch_spec(spec: TrainSpec, x: Any) -> PartitionSpec:
    """The sharding of an array of a batch: scalars are replicated."""
    return spec.batch_spec if np.shape(x) else PartitionSpec()
