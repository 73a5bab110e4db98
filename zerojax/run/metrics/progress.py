"""The progress line of a run: live in a terminal or notebook, every few steps in a log file."""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from zerojax import terminal
from zerojax.formatting import abbreviated, size

# The number of newest steps whose median time and rates are shown.
_RECENT = 10

# Characters of the bar.
_BAR = 20

_MEASURED = {
    "validation_loss": "validation {:.4f}",
    "validation_accuracy": "accuracy {:.1%}",
    "reward": "reward {:.3f}",
    "validation_reward": "held out {:.3f}",
    "exact_match": "exact match {:.1%}",
}


class Progress:
    """The progress line of one run; a context manager.

    ``start`` steps were done before. If the output is not a terminal, a line is printed every ``every``
    steps. A process that is not ``shown`` prints nothing.
    """

    def __init__(
        self,
        *,
        steps: int,
        start: int = 0,
        every: int = 10,
        console: Console | None = None,
        shown: bool = True,
    ) -> None:
        self._console = console or Console(
            file=cast(TextIO, terminal.stdout), soft_wrap=True, quiet=not shown
        )
        self._steps = steps
        self._every = every
        self._recent: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self._compiled = False
        self._unsaid: str | None = None
        self._live: RichProgress | None = None
        self._cell: _Cell | None = None
        if self._console.is_terminal and shown:
            self._live = RichProgress(
                *(BarColumn(_BAR), TextColumn("{task.description}", markup=False)),
                console=self._console,
                transient=True,  # otherwise it prints the last line again, below the summary of the run
            )
            self._task = self._live.add_task("compiling the step", total=steps, completed=start)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        if self._console.is_jupyter and not self._console.quiet:
            self._cell = _Cell(self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            if self._unsaid is not None:  # the run was stopped, or failed
                self.say(self._unsaid)
            self._live.stop()

    def say(self, message: str) -> None:
        """Print a message above the progress line."""
        self._console.print(message, markup=False, highlight=False)

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show a finished step.

        ``values`` are its metrics: "loss", "step_seconds", "memory_bytes"; if known, "tokens_per_second",
        "mfu", "internode_bytes", "exact_match", "reward" and "skipped_total"; and of an evaluation
        "validation_loss" and others with that prefix.
        """
        line = self._line(step, values)
        if self._cell is not None:
            self._cell.show(step, line)
            if _is_evaluated(values):
                self.say(line)
        elif self._live is not None:
            self._live.update(self._task, completed=step, description=line)
            self._unsaid = line
            if _is_evaluated(values) or step == self._steps:
                self.say(line)
                self._unsaid = None
        elif step % self._every == 0 or step in (1, self._steps) or _is_evaluated(values):
            self.say(line)

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        # The first step's time is mostly compilation, so it predicts nothing.
        recent = self._recent if self._compiled else [values]
        if self._compiled:
            self._recent.append(values)

        def typical(name: str) -> float:
            return statistics.median(one[name] for one in recent if name in one)

        parts = [f"step {step}/{self._steps}", f"loss {values['loss']:.4f}"]
        parts += [text.format(values[name]) for name, text in _MEASURED.items() if name in values]
        others = [name for name in values if name.startswith("validation_") and name not in _MEASURED]
        parts += [f"{name.removeprefix('validation_')} {values[name]:.4g}" for name in others]
        if "tokens_per_second" in values:
            parts.append(f"{abbreviated(round(typical('tokens_per_second')), '.1f', least=1e3)} tok/s")
        if "mfu" in values:
            parts.append(f"mfu {typical('mfu'):.1%}")
        if self._compiled:
            left = timedelta(seconds=round(typical("step_seconds") * (self._steps - step)))
            parts.append(f"left {left}")
        parts.append(f"mem {size(values['memory_bytes'])}")
        if "internode_bytes" in values:
            parts.append(f"wire {size(values['internode_bytes'])}/step")
        if values.get("skipped_total"):
            parts.append(f"skipped {values['skipped_total']:.0f}")
        self._compiled = True
        return " | ".join(parts)


def _is_evaluated(values: Mapping[str, float]) -> bool:
    return any(name.startswith("validation_") for name in values)


class _Cell:
    """A line in the output of a notebook's cell that replaces itself.

    rich would need ipywidgets for this, and without them prints nothing.
    """

    def __init__(self, steps: int) -> None:
        from IPython.display import display  # a notebook has it

        self._steps = steps
        self._shown = 0.0
        text = {"text/plain": "compiling the step"}
        self._handle: Any = display(text, raw=True, display_id=True)

    def show(self, step: int, line: str) -> None:
        """Replace the line, at most ten times a second."""
        if step < self._steps and time.monotonic() - self._shown < 0.1:
            return
        self._shown = time.monotonic()
        done = _BAR * step // self._steps
        self._handle.update({"text/plain": f"{'━' * done}{'─' * (_BAR - done)} {line}"}, raw=True)
