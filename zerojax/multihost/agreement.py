"""What the processes of a run settle together: what the first one finds, and what any of them wants.

Nothing here makes a step wait. A wish goes around the devices with a step and is acted on after the next one,
by all processes at the same step.
"""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from zerojax.errors import ZeroError


def from_first(find: Callable[[], Any]) -> Any:
    """Call `find` on the first process alone, and return its result, or raise its refusal, on all.

    Args:
        find: returns JSON-able data.

    Raises:
        ZeroError: as `find` did.
    """
    if jax.process_count() == 1:
        return find()
    text = _answer(find) if jax.process_index() == 0 else b""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    data = np.frombuffer(text.ljust(length), np.uint8)
    answer = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes())
    if "refused" in answer:
        raise ZeroError(answer["refused"])
    return answer["found"]


def _answer(find: Callable[[], Any]) -> bytes:
    try:
        return json.dumps({"found": find()}).encode()
    except ZeroError as error:
        return json.dumps({"refused": str(error)}).encode()


@dataclass(frozen=True)
class Wishes:
    """What a process wants to be done after a step.

    Attributes:
        save: a checkpoint.
        stop: a checkpoint, and the end.
    """

    save: bool = False
    stop: bool = False

    def __or__(self, other: "Wishes") -> "Wishes":
        """What either wants."""
        return Wishes(self.save or other.save, self.stop or other.stop)


class Agreement:
    """Lets all processes know what any of them wants, at the same step.

    In one process that is at once. In several, the wishes that were put before step s are known after step
    s + 1: they are reduced by the devices before they begin step s, so nobody waits for them then.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Prepare the reduction.

        Args:
            mesh: of the run.
        """
        self._alone = jax.process_count() == 1
        self._split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        everyone = NamedSharding(mesh, PartitionSpec())
        self._any = jax.jit(lambda wishes: wishes.max(axis=0), out_shardings=everyone)
        self._placed: dict[Wishes, Array] = {}
        self._under_way: deque[Wishes | Array] = deque()

    def put(self, wishes: Wishes) -> None:
        """Say what this process wants; all processes call this before each step."""
        self._under_way.append(wishes if self._alone else self._any(self._place(wishes)))

    def get(self) -> Wishes:
        """What any process wants; all processes call this after each step and do it then."""
        if len(self._under_way) <= (0 if self._alone else 1):
            return Wishes()
        oldest = self._under_way.popleft()
        return oldest if isinstance(oldest, Wishes) else Wishes(*(bool(x) for x in np.asarray(oldest)))

    def forget(self) -> None:
        """Drop what is under way, as a save has just fulfilled it."""
        self._under_way.clear()

    def _place(self, wishes: Wishes) -> Array:
        if wishes not in self._placed:
            local = len(self._split.addressable_devices)
            rows = np.tile(np.asarray([wishes.save, wishes.stop], np.int32), (local, 1))
            self._placed[wishes] = jax.make_array_from_process_local_data(self._split, rows)
        return self._placed[wishes]
