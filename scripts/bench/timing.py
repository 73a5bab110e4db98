"""Common parts of the benchmarks of single functions: the time of a call, and the row of one that fails."""

import statistics
import time
from collections.abc import Callable

import jax


def milliseconds(
    run: Callable[[], object], seconds: float, *, wait: Callable[[object], object] = jax.block_until_ready
) -> float:
    """Median over five rounds of calls that follow each other without waiting, in so many seconds."""
    wait(run())
    start = time.perf_counter()
    wait(run())
    once = time.perf_counter() - start
    calls = max(1, min(50, int(seconds / 5 / once)))
    rounds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls - 1):
            run()
        wait(run())
        rounds.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(rounds)


def attempt(name: str, work: Callable[[], None]) -> None:
    """Do it, or print the first lines of an error."""
    try:
        work()
    except Exception as error:
        report(name, error)


def report(name: str, error: Exception) -> None:
    """Print the first lines of an error, as a row of a table."""
    lines = str(error).strip().splitlines() or [""]
    print(f"  {name:<22} failed: {type(error).__name__}: {' | '.join(lines[:3])[:400]}", flush=True)
