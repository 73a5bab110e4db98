"""Agreement between the processes of a run: results of process zero, and requests of any process.

No step waits for an agreement. The devices reduce requests together with a step. All processes act on them
after the next step.
"""

import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from zerojax.comm.gather import gather_from_all
from zerojax.errors import ConfigurationError


def run_on_process_zero(find: Callable[[], Any]) -> Any:
    """Call ``find`` on process zero only, and return its result, or raise its error, on all processes.

    The result must be JSON-serializable.
    """
    if jax.process_count() == 1:
        return find()
    return _found(gather_from_all(_result(find) if jax.process_index() == 0 else None)[:1])[0]


def run_on_each_process(find: Callable[[], Any]) -> list[Any]:
    """Call ``find`` on all processes, and return the results by rank, or raise the first error, on all.

    The results must be JSON-serializable.
    """
    return [find()] if jax.process_count() == 1 else _found(gather_from_all(_result(find)))


def _found(responses: Sequence[dict[str, Any]]) -> list[Any]:
    for response in responses:
        if "refused" in response:
            raise ConfigurationError(response["refused"])
    return [response["found"] for response in responses]


def _result(find: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"found": find()}
    except ConfigurationError as error:
        return {"refused": str(error)}


class Requests(NamedTuple):
    """Actions requested after a step.

    Attributes:
        save: save a checkpoint.
        stop: save a checkpoint, then stop.
        end: save a checkpoint, and count the run as done.
        snapshot: take a snapshot in memory, unless a process is ``busy`` with the one before.
    """

    save: bool = False
    stop: bool = False
    end: bool = False
    snapshot: bool = False
    busy: bool = False

    @property
    def saves(self) -> bool:
        """Whether to save a checkpoint."""
        return self.save or self.stop or self.end

    def __or__(self, other: "Requests") -> "Requests":
        return Requests(*map(operator.or_, self, other))


class Agreement:
    """Distributes requests, so that all processes act on them at the same step.

    A single process acts at once. Several processes know the requests of before step s after step s + 1. The
    devices reduce them before they start step s, so no process waits for the result. But the devices of a
    node wait for each other, so only every ``every``-th step has such a reduction.
    """

    def __init__(self, mesh: Mesh, every: int = 1) -> None:
        self._alone = jax.process_count() == 1
        self._every = 1 if self._alone else every
        self._steps = 0
        self._split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        everyone = NamedSharding(mesh, PartitionSpec())
        self._any = jax.jit(lambda rows: rows.max(axis=0), out_shardings=everyone)
        self._placed: dict[Requests, Array] = {}
        self._pending: deque[tuple[int, Requests | Array]] = deque()

    def put(self, requests: Requests) -> None:
        """Submit this process's requests, which stay until they are met. All call this before each step."""
        self._steps += 1
        if self._steps % self._every == 0:
            asked = requests if self._alone else self._any(self._place(requests))
            self._pending.append((self._steps, asked))

    def get(self) -> Requests:
        """The requests of all processes. All call this after each step, and act on the result."""
        if not self._pending or (not self._alone and self._pending[0][0] == self._steps):
            return Requests()
        _, oldest = self._pending.popleft()
        return oldest if isinstance(oldest, Requests) else Requests(*(bool(x) for x in np.asarray(oldest)))

    def forget(self) -> None:
        """Drop pending requests, because a save has just fulfilled them."""
        self._pending.clear()

    def _place(self, requests: Requests) -> Array:
        if requests not in self._placed:
            local = len(self._split.addressable_devices)
            rows = np.tile(np.asarray(requests, np.int32), (local, 1))
            self._placed[requests] = jax.make_array_from_process_local_data(self._split, rows)
        return self._placed[requests]
