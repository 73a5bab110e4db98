"""Run the processes of one job on this machine, and end them together.

Each line of their output is prefixed with a process's name. It never waits for its reader for long. SIGTERM
and SIGINT are forwarded. If a process fails, the others get SIGTERM and, after a grace period, SIGKILL.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from zerojax import terminal
from zerojax.log import logger
from zerojax.multihost import pdeathsig
from zerojax.multihost.preemption import JOIN, Requests

# Seconds that the output of tasks waits for a reader before lines queue, and then are dropped.
_PATIENCE = 1.0
# Linux has a folder here for each process.
_PROCESSES = Path("/proc")
_LISTS_PROCESSES = (_PROCESSES / "self").exists()
# Seconds between looks whether a process is ending.
_LOOK_EVERY = 0.05
# A longer line is split into lines of this many bytes.
_PIECE = 64 << 10


Events = queue.SimpleQueue[tuple[str, int]]
"""What a supervisor reacts to: ("signal", number), ("killed", index), ("end", index), ("lost", 0) for a
failure on another host, and ("join", 0) for a host that waits to join. A signal handler may put to a
SimpleQueue, not to a Queue.
"""


@dataclass(frozen=True)
class Task:
    """One process to run."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)  # the whole environment
    pass_fds: tuple[int, ...] = ()
    # Lets a process that stands by begin the task; None if there is none, and the task needs a new process.
    standby: Callable[[], subprocess.Popen[bytes] | None] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    name: str
    code: int  # its exit code; 128 + n when signal n ended it
    stopped: bool  # whether this supervisor ended it, after another failed, a signal, or the timeout


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    outcomes: tuple[Outcome, ...]
    signals: tuple[int, ...]  # received by this process and forwarded
    lost: float | None = None  # when one failed, or all were asked to end for a host; by the monotonic clock

    @property
    def code(self) -> int:
        """The job's exit code: the highest of the processes that ended by themselves, else of all."""
        own = [o.code for o in self.outcomes if not o.stopped]
        return max(own, default=0) or max((o.code for o in self.outcomes), default=0)

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the processes that failed by themselves; else of those that needed SIGKILL."""
        own = tuple(o.name for o in self.outcomes if o.code and not o.stopped)
        return own or tuple(o.name for o in self.outcomes if o.code == 128 + signal.SIGKILL)


def describe(code: int) -> str:
    """A text for an exit code, such as "exit code 3" or "SIGKILL"."""
    if code > 128:
        with suppress(ValueError):
            return signal.Signals(code - 128).name
    return f"exit code {code}"


@dataclass
class Supervisor:
    """Starts all tasks and waits until all have ended.

    Every task gets a separate session. Signals go to its process group, as from a terminal. The first SIGTERM
    or SIGINT is forwarded without a time limit, so that a job can save. The second one starts the grace
    period.

    Attributes:
        tasks: the processes to run, in the order of the result.
        grace: seconds between SIGTERM and SIGKILL.
        timeout: seconds after which all tasks get SIGTERM; None for no limit.
        output: destination of their lines; None is standard output.
        good: exit codes of a task after which the others continue.
        follows: exit code of a task that ended because another had failed.
        started: called once all processes have been started.
        lost: called once a process has failed, before all have ended.
        events: to which another thread may put ("lost", 0) and ("join", 0).
    """

    tasks: Sequence[Task]
    grace: float = 30.0
    timeout: float | None = None
    output: BinaryIO | None = None
    good: Collection[int] = (0,)
    follows: int | None = None
    started: Callable[[], None] = lambda: None
    lost: Callable[[], None] = lambda: None
    events: Events = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._told: set[int] = set()
        self._failed: set[int] = set()
        self._signals: list[int] = []
        self._lost: float | None = None
        self._asked: float | None = None  # when the tasks were first asked to end for a host that joins
        self._deadline: float | None = None  # when the remaining tasks get SIGKILL

    def run(self) -> Result:
        """Run the tasks.

        Raises:
            TimeoutError: ``timeout`` has passed; all tasks have ended.
        """
        with self._forward_signals():
            try:
                return self._run()
            finally:
                for process in self._processes:
                    if process.returncode is None:
                        _signal(process, signal.SIGKILL)
                        process.wait()

    def _run(self) -> Result:
        for task in self.tasks:
            process = task.standby() or subprocess.Popen(
                [sys.executable, "-IS", pdeathsig.__file__, str(os.getpid()), *task.command],
                env=dict(task.env),
                pass_fds=task.pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._processes.append(process)
        self.started()
        copiers = [threading.Thread(target=self._copy, args=(i,), daemon=True) for i in self._all()]
        watchers = [threading.Thread(target=self._watch, args=(i,), daemon=True) for i in self._all()]
        for thread in copiers + watchers:
            thread.start()
        late = self._wait()
        for thread in copiers:  # returns at once, unless a process that left its session holds the pipe
            thread.join(timeout=5)
        if late:
            raise TimeoutError(f"not done after {self.timeout:g} s: {', '.join(late)}")
        outcomes = (
            Outcome(self.tasks[i].name, _exit_code(self._processes[i].returncode), i in self._told)
            for i in self._all()
        )
        return Result(tuple(outcomes), tuple(self._signals), self._lost or self._asked)

    def _all(self) -> range:
        return range(len(self.tasks))

    def _wait(self) -> list[str]:
        """Handle events until all tasks have ended, and return the names of tasks that timed out."""
        running = set(self._all())
        late: list[str] = []
        limit = time.monotonic() + self.timeout if self.timeout is not None else None
        while running:
            kind, value = self._next_event(limit if not late else None)
            if kind == "end":
                running.discard(value)
                # Kill its remaining children before its process id can be reused.
                _signal(self._processes[value], signal.SIGKILL)
                self._processes[value].wait()
                self._react(value, _exit_code(self._processes[value].returncode), running)
            elif kind == "killed":
                code = _exit_code(-(_killed_by(self._processes[value].pid) or 0))
                self._react(value, code, running - {value})
            elif kind == "signal":
                self._signals.append(value)
                self._tell(running, value, limited=len(self._signals) > 1)
            elif kind == "join":
                self._asked = self._asked or time.monotonic()
                for i in running:
                    _signal(self._processes[i], JOIN)
            elif kind == "lost":
                self._note_loss()
                self._tell(running, signal.SIGTERM, limited=True)
            elif kind == "timeout":
                late = [self.tasks[i].name for i in sorted(running)]
                self._tell(running, signal.SIGTERM, limited=True)
            else:
                names = ", ".join(self.tasks[i].name for i in sorted(running))
                logger.warning(f"killing {names}: still running {self.grace:g} s after being asked to end")
                self._tell(running, signal.SIGKILL, limited=False)
                self._deadline = None
        return late

    def _react(self, failed: int, code: int, others: set[int]) -> None:
        """End the other tasks if this one has failed. Called when it begins to end, and when it has ended."""
        if code in self.good or failed in self._failed:
            return
        self._failed.add(failed)
        self._note_loss()
        if failed in self._told:
            return
        if code == self.follows:
            self._told.add(failed)
        else:
            then = "; ending the others" if others else ""
            logger.warning(f"{self.tasks[failed].name} ended with {describe(code)}{then}")
        self._tell(others, signal.SIGTERM, limited=True)

    def _note_loss(self) -> None:
        if self._lost is None:
            self._lost = time.monotonic()
            self.lost()

    def _next_event(self, limit: float | None) -> tuple[str, int]:
        times = [t for t in (self._deadline, limit) if t is not None]
        try:
            wait = max(0.0, min(times) - time.monotonic()) if times else None
            return self.events.get(timeout=wait)
        except queue.Empty:
            return ("kill" if min(times) == self._deadline else "timeout"), 0

    def _tell(self, indices: set[int], number: int, *, limited: bool) -> None:
        self._told |= {i for i in indices if not self._ends(i)}
        for i in indices:
            _signal(self._processes[i], number)
        if limited and self._deadline is None:
            self._deadline = time.monotonic() + self.grace

    def _ends(self, index: int) -> bool:
        """Whether a task has begun to end. Its watcher may not have reported that yet."""
        return _LISTS_PROCESSES and _killed_by(self._processes[index].pid) is not None

    def _watch(self, index: int) -> None:
        """Report a task's end, in a separate thread. The main thread reaps it.

        A process has ended once the system has freed its memory, a GPU's too, which takes seconds. So that a
        signal has killed it is reported before.
        """
        pid = self._processes[index].pid
        if _LISTS_PROCESSES:
            while (killer := _killed_by(pid)) is None:
                time.sleep(_LOOK_EVERY)
            if killer:
                self.events.put(("killed", index))
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self.events.put(("end", index))

    def _copy(self, index: int) -> None:
        """Copy a task's output until it ends, in a separate thread."""
        prefix = f"[{self.tasks[index].name}] ".encode()
        stream = self._processes[index].stdout
        assert stream is not None
        with stream:
            while line := stream.readline(_PIECE):
                # A reader that has exited (| head) must not stop the task.
                with suppress(OSError, ValueError):
                    self._write(prefix + line.rstrip(b"\n") + b"\n")

    def _write(self, line: bytes) -> None:
        if self.output is None:
            terminal.stdout.put(line, _PATIENCE)
        else:
            self.output.write(line)
            self.output.flush()

    @contextmanager
    def _forward_signals(self) -> Generator[None]:
        """Forward SIGTERM and SIGINT. Only the main thread can handle signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers, requests = (signal.SIGTERM, signal.SIGINT), Requests()

        def forward(number: int, _: object) -> None:
            if requests.is_new():
                self.events.put(("signal", number))

        before = [signal.signal(number, forward) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the process group of a process that has not been reaped."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _exit_code(code: int) -> int:
    """The exit code as a shell has it, from one that is negative for a signal."""
    return code if code >= 0 else 128 - code


def _killed_by(pid: int) -> int | None:
    """The signal that has killed a child's main thread, 0 if it ends by itself; None while it runs."""
    found = (_PROCESSES / f"{pid}/stat").read_text().rpartition(")")[2].split()
    return int(found[-1]) & 0x7F if found[0] in "ZX" else None
