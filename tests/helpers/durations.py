"""What the tests cost, printed at the end under ``--cost``: by test, by folder and by what JAX did.

CPU seconds are those of the process and of the processes that the test started and waited for. Tracing,
lowering and compiling are wall seconds as JAX reports them, of the tests' own process. A fixture counts to
the test that needed it first, and a process that it keeps to the test after which it ends.
"""

import json
import resource
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

_SLOWEST = 40
_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_PROPERTY = "cost"


@dataclass
class Cost:
    """Seconds: of user and system CPU, of children among them, and on the clock."""

    user: float = 0.0
    system: float = 0.0
    children: float = 0.0
    wall: float = 0.0
    trace: float = 0.0
    lower: float = 0.0
    compile: float = 0.0

    @property
    def cpu(self) -> float:
        """User and system time, of children too."""
        return self.user + self.system

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass
class _Phases:
    """Seconds by phase, where a function traced within another one counts once."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES.values(), 0.0))
    ended: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Called by JAX when a phase has ended."""
        if (phase := _PHASES.get(event)) is None:
            return
        start, within = time.time() - duration_secs, 0.0
        while self.ended and self.ended[-1][0] >= start:
            within += self.ended.pop()[1]
        self.ended = [*self.ended[-100:], (start, duration_secs)]
        self.seconds[phase] += duration_secs - within


class Meter:
    """Measures the tests of one process."""

    def __init__(self) -> None:
        import jax.monitoring  # not before the environment is prepared

        self._phases = _Phases()
        jax.monitoring.register_event_duration_secs_listener(self._phases.listen)
        self._last = self.now()

    def now(self) -> Cost:
        """What this process has cost till now."""
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return Cost(
            user=own.ru_utime + children.ru_utime,
            system=own.ru_stime + children.ru_stime,
            children=children.ru_utime + children.ru_stime,
            wall=time.time(),
            **self._phases.seconds,
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add to a report the cost since the last one."""
        report = yield
        now = self.now()
        report.user_properties.append((_PROPERTY, asdict(now - self._last)))
        self._last = now
        return report


class Reporter:
    """Collects the costs of all processes, and prints them at the end."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._tests: defaultdict[str, Cost] = defaultdict(Cost)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the cost of a test's setup, call or teardown."""
        properties: list[tuple[str, Any]] = report.user_properties
        for name, value in properties:
            if name == _PROPERTY:
                self._tests[report.nodeid] += Cost(**value)
        report.user_properties[:] = [p for p in report.user_properties if p[0] != _PROPERTY]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the tables."""
        if self._file != "-":
            costs = {name: asdict(cost) for name, cost in self._tests.items()}
            Path(self._file).write_text(json.dumps(costs))
        for line in _summary(self._tests):
            terminalreporter.write_line(line)


def _summary(tests: dict[str, Cost]) -> Iterable[str]:
    """Yield the lines of the report."""
    header = "   CPU s of children    wall  trace  lower compile   rest"
    folders: defaultdict[str, Cost] = defaultdict(Cost)
    for name, cost in tests.items():
        folders[_folder(name)] += cost
    yield f"{header}  the {_SLOWEST} slowest tests"
    yield from map(_line, *zip(*_largest(tests)[:_SLOWEST], strict=True))
    yield f"{header}  by folder"
    yield from map(_line, *zip(*_largest(folders), strict=True))
    yield _line(f"all {len(tests)} tests", sum(tests.values(), Cost()))


def _largest(costs: dict[str, Cost]) -> list[tuple[str, Cost]]:
    """Sort by CPU seconds, the largest first."""
    return sorted(costs.items(), key=lambda item: -item[1].cpu)


def _folder(test: str) -> str:
    """Return the folder of a test, two levels deep at most."""
    return "/".join(test.split("::")[0].split("/")[:-1][:2])


def _line(name: str, cost: Cost) -> str:
    rest = cost.wall - cost.trace - cost.lower - cost.compile
    return (
        f"{cost.cpu:8.1f} {cost.children:11.1f} {cost.wall:7.1f} {cost.trace:6.1f} {cost.lower:6.1f} "
        f"{cost.compile:7.1f} {rest:6.1f}  {name}"
    )
