"""Hosts of a job, each a thread of this process, whose gathers meet at a barrier or in a store."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import distributed
from jax.experimental import multihost_utils

from zerojax.comm import gather as gather_module


class Store:
    """JAX's store of keys and values, and the number of each host's next gather."""

    def __init__(self, own: threading.local) -> None:
        self._own, self._there, self._values = own, threading.Condition(), dict[str, str]()

    def __next__(self) -> int:
        return next(self._own.calls)

    def key_value_set(self, key: str, value: str) -> None:
        with self._there:
            self._values[key] = value
            self._there.notify_all()

    def blocking_key_value_get(self, key: str, _: int) -> str:
        with self._there:
            assert self._there.wait_for(lambda: key in self._values, 20)
            return self._values[key]

    def key_value_delete(self, _: str) -> None:
        pass


def on_hosts[T](monkeypatch: pytest.MonkeyPatch, count: int, run: Callable[[int], T]) -> list[T]:
    """Call ``run`` with each rank, in as many threads at once; returns the results by rank."""
    own, barrier = threading.local(), threading.Barrier(count, timeout=20)
    values = [np.zeros(())] * count

    def gather(value: Any, **_: object) -> np.ndarray:
        values[own.rank] = np.array(value)
        barrier.wait()
        every = np.stack(values)
        barrier.wait()
        return every

    def host(rank: int) -> T:
        own.rank, own.calls = rank, itertools.count()
        try:
            return run(rank)
        except BaseException:
            barrier.abort()
            raise

    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: own.rank)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    store = Store(own)
    monkeypatch.setattr(gather_module, "_calls", store)
    monkeypatch.setattr(distributed.global_state, "client", store)
    with ThreadPoolExecutor(count) as threads:
        hosts = [threads.submit(host, rank) for rank in range(count)]
    errors = [error for one in hosts if (error := one.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [one.result() for one in hosts]
