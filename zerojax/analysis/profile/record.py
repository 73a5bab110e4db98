"""``--profile start:stop``: traces some steps of a run, and names ranges of the trace for Perfetto."""

import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from zerojax.analysis.profile.events import Event, read_events, trace_files
from zerojax.errors import ConfigurationError


def parse_steps(text: str) -> range:
    """The steps of "start:stop", both included: "10:12" is steps 10, 11 and 12.

    Raises:
        ConfigurationError: ``text`` has another form, or there is no such step.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigurationError(
            f"--profile {text}: give two step numbers, start:stop, of 1 or more, as in --profile 10:12"
        )
    return range(int(first), int(last) + 1)


class StepProfile:
    """Traces the chosen steps of a run that has taken ``done`` of its ``planned`` steps.

    Raises:
        ConfigurationError: the run will not take these steps.
    """

    def __init__(
        self, folder: Path, steps: range | None, say: Callable[[str], None], *, done: int, planned: int
    ) -> None:
        if steps and not done < steps[0] <= steps[-1] <= planned:
            raise ConfigurationError(
                f"--profile {steps[0]}:{steps[-1]}: this run will only take steps {done + 1} to {planned}. "
                "Choose steps among these"
            )
        self._folder = folder
        self._steps = steps or range(0)
        self._say = say
        self._tracing = False

    def step[T](self, number: int, run: Callable[[], T]) -> T:
        """Run a step, and trace it if it was chosen. JAX may still be computing the result."""
        if number not in self._steps:
            return run()
        if not self._tracing:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # otherwise each Python call is an event
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            result = run()
        if number == self._steps[-1]:
            jax.block_until_ready(result)
            self.close()
        return result

    def close(self) -> None:
        """End the running trace, if any, and write its ranges."""
        if not self._tracing:
            return
        self._tracing = False
        jax.profiler.stop_trace()
        newest = trace_files(self._folder)[-1]
        write_ranges(read_events(newest), newest.with_name("ranges.trace.json.gz"))
        self._say(f"profile of steps {self._steps[0]} to {self._steps[-1]}: {newest.parent}")


def write_ranges(events: Sequence[Event], path: Path) -> None:
    """Write named ranges in Chrome's trace format, gzipped, for ui.perfetto.dev.

    Consecutive events of a stream in the same hop or layer form a range.
    """
    lines = {key: number for number, key in enumerate(sorted({(e.device, e.line) for e in events}))}
    written: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}}
        for device in sorted({event.device for event in events})
    ]
    written += [
        {"ph": "M", "name": "thread_name", "pid": device, "tid": number, "args": {"name": line}}
        for (device, line), number in lines.items()
    ]
    for (device, line), number in lines.items():
        own = [event for event in events if (event.device, event.line) == (device, line)]
        for name, group in itertools.groupby(own, key=lambda event: event.scope or "other"):
            inside = list(group)
            start, end = inside[0].start, max(event.end for event in inside)
            written.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": device,
                    "tid": number,
                    "ts": start / 1e3,
                    "dur": (end - start) / 1e3,
                    "args": {"events": len(inside), "first": inside[0].name},
                }
            )
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": written}, file)
