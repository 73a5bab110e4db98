"""Engines that share requests: if one dies, the others take its requests."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import jax
import numpy as np

from zerojax.errors import RunError
from zerojax.generation import Completions, Sampling
from zerojax.log import logger
from zerojax.posttrain.engines.client import Completion, Engine, EngineLost, EngineRefused, Request
from zerojax.posttrain.engines.weights import Weights
from zerojax.posttrain.rollout.generator import Turn

_REQUESTS = 128  # of each process at the same time to one engine
_ATTEMPTS = 5  # of a request that engines refuse
_RETRY_SECONDS = 2.0  # between attempts to reach a lost engine
_ARRIVAL_SECONDS = 60.0
_STOP_SECONDS = 0.1


@dataclass
class _Member:
    """An engine of a pool, and what is known about it.

    Attributes:
        engine: its client.
        arrive: waits some seconds until its host has weights, and returns "" or why it has not.
        loaded: the name of the weights that it has, or "".
        lost: why it cannot be used now, or "".
        retry: the time of the next attempt to reach a lost engine.
    """

    engine: Engine
    arrive: Callable[[Weights, float], str]
    loaded: str = ""
    lost: str = ""
    retry: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_ready(self, weights: Weights) -> bool:
        """Whether the engine has these weights; loads them if it does not."""
        with self.lock:
            if self.loaded == weights.name:
                return True
            if time.monotonic() < self.retry:
                return False
            try:
                if self.engine.version() != weights.name:
                    if why := self.arrive(weights, _ARRIVAL_SECONDS):
                        raise EngineLost(f"{self.engine.url}: {why}")
                    self.engine.load(weights)
            except EngineLost as why:
                self._note(why)
                return False
            if self.lost:
                logger.warning("%s is back", self.engine.url)
            self.loaded, self.lost = weights.name, ""
            return True

    def note_lost(self, why: EngineLost) -> None:
        """Note that a request failed. The engine is asked for its weights before the next request."""
        with self.lock:
            self._note(why)

    def _note(self, why: EngineLost) -> None:
        if not self.lost:
            logger.warning("lost an engine, whose prompts go to the others: %s", why)
        self.loaded, self.lost, self.retry = "", str(why), time.monotonic() + _RETRY_SECONDS


class EnginePool:
    """The engines of a run. Any of them completes any request.

    Args:
        engines: their clients.
        arrive: as ``EngineWeights.arrive``.
    """

    def __init__(self, engines: Sequence[Engine], arrive: Callable[[int, Weights, float], str]) -> None:
        self._members = [_Member(engine, partial(arrive, index)) for index, engine in enumerate(engines)]

    @property
    def nothing_works(self) -> str:
        """Why no engine can be used; "" if one can."""
        every = [member.lost for member in self._members]
        return every[-1] if all(every) else ""

    def complete(
        self,
        requests: Sequence[Request],
        how: Sampling,
        stop: Sequence[tuple[int, ...]],
        weights: Weights,
        stopping: Callable[[], bool],
    ) -> list[Completion | None]:
        """Complete every request by these weights. Wait as long as there is no engine.

        Once ``stopping`` returns True, the completions that are still missing are None.

        Raises:
            RunError: engines refuse a request again and again.
        """
        todo, over, refused = SimpleQueue[int | None](), threading.Event(), Counter[int]()
        found = [Future[Completion]() for _ in requests]
        for row in range(len(requests)):
            todo.put(row)

        def serve(member: _Member) -> None:
            while not over.is_set():
                if not member.is_ready(weights):
                    over.wait(_RETRY_SECONDS / 4)
                    continue
                if (row := todo.get()) is None:
                    todo.put(None)  # for the next thread
                    return
                try:
                    found[row].set_result(member.engine.complete(requests[row], how, stop, weights))
                except EngineLost as why:
                    member.note_lost(why)
                    refused[row] += isinstance(why, EngineRefused)
                    if refused[row] < _ATTEMPTS:
                        todo.put(row)
                    else:
                        error = RunError(f"engines refuse to complete a prompt: {why}")
                        found[row].set_exception(error)

        for member in self._members:
            for _ in range(min(_REQUESTS, len(requests))):
                # Nobody joins these threads: at a stop, some still wait for a response.
                threading.Thread(target=serve, args=(member,), daemon=True).start()
        left = found
        while left:
            done, left = wait(left, _STOP_SECONDS, FIRST_EXCEPTION)
            if stopping() or any(one.exception() is not None for one in done):
                break
        over.set()
        todo.put(None)
        return [one.result() if one.done() else None for one in found]


@dataclass(frozen=True)
class EngineGenerator:
    """Generates by engines with one version of the weights. Processes do not wait for each other."""

    pool: EnginePool
    weights: Weights

    @property
    def version(self) -> int:
        """The optimizer step of the weights."""
        return self.weights.step

    def complete(self, turn: Turn, stopping: Callable[[], bool]) -> Completions:
        """Complete the rows whose limit is above 0, each with its own seed."""
        waiting = np.flatnonzero(turn.limits).tolist()
        first = jax.process_index() * len(turn.prompts)
        requests = [
            Request(turn.prompts[row], turn.limits[row], _seed(turn.seed, first + row)) for row in waiting
        ]
        found = self.pool.complete(requests, turn.how, turn.stop, self.weights, stopping)
        rows = len(turn.prompts)
        tokens, lengths = np.zeros((rows, turn.width), np.int32), np.zeros(rows, np.int32)
        log_probs = np.zeros((rows, turn.width), np.float32)
        for row, completion in zip(waiting, found, strict=True):
            if completion is not None:
                lengths[row] = length = len(completion.tokens)
                tokens[row, :length], log_probs[row, :length] = completion
        return Completions(tokens, lengths, log_probs)

    def any_waits(self, waits: bool) -> bool:
        """Whether a row of this process waits."""
        return waits


def _seed(seed: int, row: int) -> int:
    """A seed of 31 bits for a row."""
    return int(np.random.SeedSequence((seed, row)).generate_state(1)[0]) >> 1
