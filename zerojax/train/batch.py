"""A batch on the mesh: its rows spread over the devices, scalars and ``Replicated`` arrays on all of them."""

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from zerojax.errors import ConfigurationError
from zerojax.schedule.transforms import partition
from zerojax.sharding.mesh import BY_ROWS
from zerojax.train.spec import TrainSpec

Batch = PyTree
"""A pytree of arrays whose leading axis is the batch, scalars, Python's numbers and ``Replicated``."""
NUMBER = (bool, int, float, complex)
"""Python's numbers, which have no dtype of their own."""
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_ON_DEVICES = (np.number, np.bool_, jax.dtypes.prng_key)
_WHOLE = "Mark an array that every device gets whole by zerojax.Replicated(array)."


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replicated:
    """A part of a batch that every device and micro-batch gets whole: class weights, a table, a mask.

    ``train_step(state, {"x": rows, "weights": zerojax.Replicated(weights)})``: the loss function finds the
    array itself in ``batch["weights"]``. In several processes all pass the same values.

    Attributes:
        value: an array of any shape, or a pytree of arrays.

    Examples:
        >>> def weighted(model, batch):
        ...     return jnp.mean(batch["weights"] * (model(batch["x"]) - batch["y"]) ** 2)
        >>> weights = zerojax.Replicated(np.linspace(0, 1, 8))
        >>> metrics = zerojax.eval_step(state, batch | {"weights": weights}, weighted)
    """

    value: PyTree[Array]


def micro_batches(batch: Batch, count: int) -> tuple[list[Array], Callable[[Sequence[Array]], Batch]]:
    """A batch's rows in ``count`` parts along a new first axis, and a function from a part to a batch."""
    rows, whole, combine = partition(batch, have_rows(batch))
    parts = [x.reshape(count, x.shape[0] // count, *x.shape[1:]) for x in rows]
    return parts, lambda part: combine(part, whole)


def unmarked(batch: Batch) -> PyTree:
    """A batch as a loss function receives it, without ``Replicated``."""
    return jax.tree.map(lambda x: x.value if _is_replicated(x) else x, batch, is_leaf=_is_replicated)


def batch_specs(batch: Batch) -> PyTree[PartitionSpec]:
    """The PartitionSpec of each array of a batch: ``BY_ROWS``, or empty if every device gets it whole."""

    def of(x: Any) -> PyTree[PartitionSpec]:
        if isinstance(x, Replicated):
            return jax.tree.map(lambda _: PartitionSpec(), x)
        return BY_ROWS if np.shape(x) else PartitionSpec()

    return jax.tree.map(of, batch, is_leaf=_is_replicated)


def abstract_batch(spec: TrainSpec, batch: Batch) -> PyTree[jax.ShapeDtypeStruct]:
    """The shapes, dtypes and shardings of a global batch on the devices, as ``place`` spreads it.

    Raises:
        ConfigurationError: its rows do not divide among the devices and micro-batches.
    """
    copies = spec.zero.sequence_parallel
    _check_batch(batch, spec.world.size // copies, spec.zero.accumulate, copies=copies)

    def abstract(x: Any, to: PartitionSpec) -> Any:
        if isinstance(x, NUMBER):
            return x
        shape = (copies * x.shape[0], *x.shape[1:]) if to == BY_ROWS else np.shape(x)
        return spec.abstract(shape, jax.dtypes.canonicalize_dtype(x.dtype), to)

    return jax.tree.map(abstract, batch, batch_specs(batch))


@contextmanager
def places_arguments() -> Generator[None]:
    """Allow a function to transfer the numbers and arrays that it is given, also under
    ``jax.transfer_guard``.

    Its caller asks for these transfers, but JAX considers them implicit.
    """
    with jax.transfer_guard_host_to_device("allow"):
        yield


def place(spec: TrainSpec, batch: Batch, accumulate: int, *, shared: bool = True) -> Batch:
    """Spread a host batch over the devices, and replicate its scalars and ``Replicated`` arrays.

    Arrays that are already in place stay there. Python's numbers stay numbers, because jit gives them weak
    dtypes.

    With ``shared``, devices share rows if the options say so. Each of these devices then gets whole rows.
    """
    processes = spec.once("processes", lambda: len({d.process_index for d in spec.mesh.devices.flat}))
    copies = spec.zero.sequence_parallel if shared else 1
    groups = spec.world.size // copies
    _check_batch(batch, groups, accumulate, min(processes, groups), copies)
    if copies > 1:
        own = spec.world.size // processes

        def spread(x: Any, to: PartitionSpec) -> Any:
            if to != BY_ROWS:
                return x
            if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(_by_groups(spec), x.ndim):
                return _with_shards(x, spec.sharding(BY_ROWS), (copies * x.shape[0], *x.shape[1:]))
            return _rows_of_devices(x, own=own, copies=copies)

        batch = jax.tree.map(spread, batch, batch_specs(batch))

    def place_one(x: Any, to: PartitionSpec) -> Any:
        if isinstance(x, NUMBER):
            return x
        sharding = spec.sharding(to)
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            # A program takes arrays of one mesh, and this one may be of another with the same devices.
            return _with_shards(x, sharding, x.shape)
        if processes == 1:
            return jax.device_put(x, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return jax.tree.map(place_one, batch, batch_specs(batch))


def _rows_of_devices(x: Any, *, own: int, copies: int) -> Array | np.ndarray:
    """The rows of groups of ``copies`` devices, once for each of this process's ``own`` devices.

    Raises:
        ConfigurationError: a group spans devices of several processes but not all of their devices, or the
            rows are already on the devices of several processes.
    """
    if own % copies and copies % own:
        raise ConfigurationError(
            f"sequence_parallel={copies}: a process has {own} devices, and some would share rows with "
            "another process's devices. Choose a divisor or a multiple."
        )
    if not _is_of_host(x):
        raise ConfigurationError(
            f"sequence_parallel={copies}: an array of the batch is already on devices of several processes. "
            "Pass each process's rows as NumPy arrays; train_step places them on the devices."
        )
    groups, numpy = max(1, own // copies), np if isinstance(x, np.ndarray) else jnp
    each = numpy.reshape(x, (groups, 1, -1, *x.shape[1:]))
    every = numpy.broadcast_to(each, (groups, min(own, copies), *each.shape[2:]))
    return every.reshape(-1, *x.shape[1:])


def rows_once(spec: TrainSpec, x: jax.Array) -> jax.Array:
    """``x`` [rows, ...], with the rows that ``sequence_parallel`` devices share once instead of on each."""
    copies = spec.zero.sequence_parallel
    return x if copies == 1 else _with_shards(x, _by_groups(spec), (x.shape[0] // copies, *x.shape[1:]))


def _by_groups(spec: TrainSpec) -> NamedSharding:
    """The sharding of rows over groups of devices. Each device of a group has all its rows."""
    groups = spec.mesh.devices.reshape(-1, spec.zero.sequence_parallel)
    mesh = Mesh(groups, ("groups", "devices"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec("groups"))


def _with_shards(x: jax.Array, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """An array of another shape or sharding that consists of the same shards on the same devices."""
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def processes_a_row(devices: int) -> int:
    """The number of processes that share a row if so many devices do; all of them pass it to a step."""
    return max(1, devices // jax.local_device_count())


def local_rows(x: jax.Array) -> np.ndarray:
    """The rows of a batch-sharded array that are on this process's devices. Shared rows occur once."""
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def _check_batch(batch: Batch, devices: int, accumulate: int, processes: int = 1, copies: int = 1) -> None:
    """Refuse anything but arrays with equally many rows.

    The batch is one process's part; an array on the devices of several processes is global. If ``copies``
    devices share a row, ``devices`` counts groups of them.

    Raises:
        ConfigurationError: naming the array, and what to pass in its place.
    """
    found = jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_list_of_numbers)
    leaves = [(f"batch{jax.tree_util.keystr(path)}", x) for path, x in found]
    for name, x in leaves:
        _check_array(name, x)
    spread = list(itertools.compress(leaves, have_rows(batch)))
    if leaves and not spread:
        raise ConfigurationError(
            "the batch has only scalars and Replicated arrays, which every device gets: no array has a "
            "leading axis to spread."
        )
    each: dict[float, tuple[str, Array]] = {}
    what = "devices" if copies == 1 else f"groups of {copies} devices"
    for name, x in spread:
        parts = devices // (processes if _is_of_host(x) else 1)
        if x.shape[0] == 0 or x.shape[0] % (parts * accumulate):
            raise ConfigurationError(
                f"{name} of shape {x.shape} has {x.shape[0]} rows, not a positive multiple of {parts} "
                f"{what} x accumulate={accumulate}: its leading axis is the batch. Fill a last batch up with "
                f'rows that do not count, by the aux "tokens". {_WHOLE}'
            )
        each.setdefault(x.shape[0] // parts, (name, x))
    if len(each) > 1:
        (first, x), (other, y) = list(each.values())[:2]
        raise ConfigurationError(
            f"{first} has shape {x.shape}, and {other} {y.shape}: the leading axis of both is "
            f"the batch, which is spread over the devices, so both need equally many rows. {_WHOLE}"
        )


def _check_array(name: str, x: Any) -> None:
    """Refuse anything but a number or an array of numbers."""
    if isinstance(x, Tracer):
        raise ConfigurationError(
            "the batch is traced: zerojax's steps are compiled already, with options and donation of their "
            "own. Call them outside jax.jit."
        )
    if isinstance(x, list):
        raise ConfigurationError(
            f"{name} is a list, whose elements would be scalars that every device gets: make it an array by "
            "np.asarray."
        )
    if isinstance(x, int | np.integer | np.ndarray):
        _refuse_wide(name, np.asarray(x))
    if isinstance(x, NUMBER) or hasattr(x, "__jax_array__"):
        return
    if not isinstance(x, _ARRAYS):
        raise ConfigurationError(
            f"{name} is of type {type(x).__name__}: a batch holds arrays of numpy or JAX, and numbers. "
            "Convert it, or leave it out of the batch."
        )
    swapped = isinstance(x.dtype, np.dtype) and not x.dtype.isnative
    if swapped or not any(jnp.issubdtype(x.dtype, kind) for kind in _ON_DEVICES):
        raise ConfigurationError(
            f"{name} is an array of dtype {x.dtype}, which no device can hold: a batch holds numbers. "
            "Convert it, or leave it out of the batch."
        )


def _refuse_wide(name: str, x: np.ndarray) -> None:
    """Refuse integers outside JAX's range, which would lose their upper bits."""
    if x.dtype.kind not in "iu" or not x.size or jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype:
        return
    bounds = np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
    if beyond := [int(n) for n in (x.min(), x.max()) if not bounds.min <= n <= bounds.max]:
        raise ConfigurationError(
            f"{name} contains {beyond[0]}, and JAX's integers have 32 bits. Renumber the ids to fit in 32 "
            "bits, or pass the upper and lower halves as two arrays."
        )


def have_rows(batch: Batch) -> list[bool]:
    """For each array of a batch, whether it is spread by rows."""
    return [spec == BY_ROWS for spec in jax.tree.leaves(batch_specs(batch))]


def _is_of_host(x: object) -> bool:
    """Whether an array is one process's own."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _is_replicated(x: object) -> TypeGuard[Replicated]:
    return isinstance(x, Replicated)


def _is_list_of_numbers(x: object) -> bool:
    """Whether a pytree is a list as in JSON, perhaps nested, that has only numbers or only strings."""
    return (
        isinstance(x, list)
        and bool(x)
        and all(isinstance(item, (*NUMBER, str)) or _is_list_of_numbers(item) for item in x)
    )
