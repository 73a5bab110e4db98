"""Hosts of a job, each a thread of this process, whose gathers meet at a barrier."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils


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
        own.rank = rank
        try:
            return run(rank)
        except BaseException:
            barrier.abort()
            raise

    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: own.rank)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    with ThreadPoolExecutor(count) as threads:
        hosts = [threads.submit(host, rank) for rank in range(count)]
    errors = [error for one in hosts if (error := one.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [one.result() for one in hosts]
