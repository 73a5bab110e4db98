"""The interface of generators, which complete prompts on this run's devices or by engines elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from zerojax.generation import Completions, Sampling
from zerojax.generation.generate import generate_rows
from zerojax.posttrain.processes import any_process
from zerojax.train.state import TrainState


class Turn(NamedTuple):
    """The prompts of this process's rows, and how to complete them.

    Attributes:
        prompts: token ids.
        limits: the most new tokens of each row; 0 for a row that is over.
        how: the temperature.
        stop: sequences of tokens that end a completion.
        seed: seed of the random bits of all processes' rows.
        width: columns of the result, at least the largest limit.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    how: Sampling
    stop: Sequence[tuple[int, ...]]
    seed: int
    width: int


class Generator(Protocol):
    """Completes prompts with one version of the policy's weights."""

    @property
    def version(self) -> int | None:
        """The optimizer step of an engine's weights; None if this run's own devices generate."""
        ...

    def complete(self, turn: Turn, stopping: Callable[[], bool]) -> Completions:
        """Complete the prompts. Once ``stopping`` returns True, rows may be left empty."""
        ...

    def any_waits(self, waits: bool) -> bool:
        """Whether to call ``complete`` once more, given whether a row of this process waits for it."""
        ...


@dataclass(frozen=True)
class OwnGenerator:
    """Generates on this run's devices with a state's weights. All processes take part in every call."""

    state: TrainState
    version: None = None

    def complete(self, turn: Turn, stopping: Callable[[], bool]) -> Completions:
        """``generate_rows``, which does not stop early."""
        return generate_rows(
            self.state,
            turn.prompts,
            turn.limits,
            how=turn.how,
            stop=[*turn.stop],
            seed=turn.seed,
            unread=0,
            width=turn.width,
        )

    def any_waits(self, waits: bool) -> bool:
        """Whether a row of any process waits."""
        return any_process(waits)[0]
