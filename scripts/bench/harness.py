"""The harness of the benchmarks: the command line, times, failures, tables and files.

Imports neither JAX nor PyTorch, because either may be missing where the other is measured.
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any


def parser(description: str | None, **numbers: float) -> argparse.ArgumentParser:
    """A parser of a script's options; ``description`` is the script's docstring. See ``add_numbers``."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_numbers(made, **numbers)
    return made


def add_numbers(parser: argparse.ArgumentParser, **defaults: float) -> None:
    """Options that are numbers of their defaults' types; an underscore in a name is a hyphen."""
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)


def seconds_of(call: Callable[[], object], repeats: int, untimed: int = 1) -> list[float]:
    """Seconds of a call that waits for its device, after some calls that may compile."""
    seconds: list[float] = []
    for _ in range(untimed + repeats):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds[untimed:]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, minimum and maximum."""
    return statistics.median(values), min(values), max(values)


def relative_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and (maximum - minimum) / median."""
    median, least, most = spread(values)
    return median, (most - least) / median


def milliseconds(
    run: Callable[[], object], seconds: float, *, wait: Callable[[object], object] | None = None
) -> float:
    """Median of ``rounds_of`` calls."""
    return 1e3 * statistics.median(rounds_of(run, seconds, wait=wait))


def rounds_of(
    run: Callable[[], object],
    seconds: float,
    *,
    rounds: int = 5,
    wait: Callable[[object], object] | None = None,
) -> list[float]:
    """Seconds of a call in each of several rounds of calls that follow each other without waiting.

    All rounds together take so many ``seconds``. ``wait`` waits for a result; by default
    ``jax.block_until_ready``.
    """
    if wait is None:
        import jax

        wait = jax.block_until_ready
    wait(run())
    start = time.perf_counter()
    wait(run())
    once = time.perf_counter() - start
    calls = max(1, min(50, int(seconds / rounds / once)))
    found: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls - 1):
            run()
        wait(run())
        found.append((time.perf_counter() - start) / calls)
    return found


def attempt(name: str, work: Callable[[], None]) -> None:
    """Do it, or print the first lines of an error, as a row of a table."""
    try:
        work()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        print(f"  {name:<22} failed: {type(error).__name__}: {' | '.join(lines[:3])[:400]}", flush=True)


def end_after(seconds: float) -> None:
    """End the process when so many seconds have passed, whatever it does."""

    def give_up() -> None:
        print(f"ended after {seconds} s", flush=True)
        os._exit(1)

    watch = threading.Timer(seconds, give_up)
    watch.daemon = True
    watch.start()


def heads(*columns: object) -> list[str]:
    """The head of a table in Markdown."""
    return [cells(*columns), "|---" * len(columns) + "|"]


def cells(*values: object) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, values))} |"


def table(*columns: object) -> None:
    """Print the head of a table in Markdown."""
    print(*heads(*columns), sep="\n", flush=True)


def row(*values: object) -> None:
    """Print a row of a table in Markdown."""
    print(cells(*values), flush=True)


def write(path: Path | None, rows: Any) -> None:
    """Write JSON if a path is given; dataclasses become tables."""
    if path is not None:
        path.write_text(json.dumps(rows, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
