"""zerojax.multihost.supervisor with small real processes."""

import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from stopped_reader import full_pipe

from zerojax.multihost import supervisor
from zerojax.multihost.preemption import ONE_REQUEST

pytestmark = pytest.mark.alone


def shell(name: str, script: str) -> supervisor.Task:
    return supervisor.Task(name, ["sh", "-c", script], env=os.environ)


def run(*tasks, **options):
    output = io.BytesIO()
    result = supervisor.Supervisor(tasks, output=output, **options).run()
    return result, output.getvalue().decode().splitlines()


def gone(path: Path, within: float = 60.0) -> bool:
    """Whether the process whose id is in a file has ended."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            os.kill(int(path.read_text()), 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{path.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_output_is_prefixed_and_codes_are_kept():
    result, lines = run(shell("a", "echo one; echo two >&2"), shell("b", "printf three; exit 0"))
    assert sorted(lines) == ["[a] one", "[a] two", "[b] three"]
    assert [(o.name, o.code, o.stopped) for o in result.outcomes] == [("a", 0, False), ("b", 0, False)]
    assert (result.code, result.failed, result.signals) == (0, (), ())


def test_a_line_without_an_end_is_copied_in_pieces():
    """Binary data on a task's standard output could otherwise take the supervisor's memory."""
    _, lines = run(shell("a", "head -c 200000 /dev/zero | tr '\\0' x; echo; echo end"))
    assert lines[-1] == "[a] end"
    assert {line[:5] for line in lines} == {"[a] x", "[a] e"}
    assert sum(len(line) - 4 for line in lines[:-1]) == 200_000
    assert max(map(len, lines)) == 4 + (64 << 10)


def test_a_task_gets_only_its_environment():
    task = supervisor.Task("a", ["/bin/sh", "-c", "env | grep -c HOME; echo $X"], env={"X": "y"})
    assert run(task)[1] == ["[a] 0", "[a] y"]


def test_a_failure_ends_the_others_and_is_named(capfd):
    started = time.monotonic()
    result, _ = run(shell("rank 0", "sleep 600"), shell("rank 1", "exit 7"))
    assert time.monotonic() - started < 120
    assert result.code == 7
    assert result.failed == ("rank 1",)
    assert result.outcomes[0].stopped
    assert capfd.readouterr().err.splitlines() == [
        "zerojax: rank 1 ended with exit code 7; ending the others"
    ]


def test_a_killed_process_is_noticed_before_it_has_ended(capfd, monkeypatch):
    """Freeing the memory of a GPU's process takes seconds."""
    lost, waitid, told = threading.Event(), os.waitid, list[bool]()
    monkeypatch.setattr(os, "waitid", lambda *args: (told.append(lost.wait(10)), waitid(*args))[1])
    result, _ = run(shell("rank 0", "sleep 600"), shell("rank 1", "kill -9 $$"), lost=lost.set)
    assert told == [True, True], "told before"
    assert [(o.code, o.stopped) for o in result.outcomes] == [(128 + 15, True), (128 + 9, False)]
    assert capfd.readouterr().err == "zerojax: rank 1 ended with SIGKILL; ending the others\n"


def test_a_process_that_is_dying_when_another_host_fails_is_at_fault(monkeypatch):
    """Its watcher has not noticed it yet."""
    watch = supervisor.Supervisor._watch

    def late(self, index):
        while not self._ends(index):
            time.sleep(0.01)
        self.events.put(("lost", 0))
        watch(self, index)

    monkeypatch.setattr(supervisor.Supervisor, "_watch", late)
    result, _ = run(shell("rank 0", "sleep 60"), shell("rank 1", "kill -9 $$"))
    assert [(one.code, one.stopped) for one in result.outcomes] == [(128 + 15, True), (128 + 9, False)]


def test_a_thread_that_outlives_the_main_one_is_no_failure(capfd):
    alone = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1,)).start();"
    exit_of_this_thread = "ctypes.CDLL(None).syscall(60, 7)"
    task = supervisor.Task("a", [sys.executable, "-c", alone + exit_of_this_thread], os.environ)
    result, _ = run(task, lost=lambda: pytest.fail("lost"))
    assert (result.code, result.lost, capfd.readouterr().err) == (0, None, "")


def test_a_killed_process_is_named_by_its_signal(capfd):
    result, _ = run(shell("rank 0", "sleep 60"), shell("rank 1", "kill -9 $$"))
    assert result.code == 128 + 9
    assert "rank 1 ended with SIGKILL" in capfd.readouterr().err
    assert run(shell("alone", "kill -9 $$"))[0].code == 128 + 9
    assert capfd.readouterr().err == "zerojax: alone ended with SIGKILL\n"


def test_a_task_that_does_not_end_is_killed_after_the_grace_period(capfd, tmp_path):
    deaf = f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    other = f"until [ -e {tmp_path}/ready ]; do sleep 0.02; done; exit 3"
    result, _ = run(shell("deaf", deaf), shell("b", other), grace=0.5)
    assert [o.code for o in result.outcomes] == [128 + 9, 3]
    assert "killing deaf" in capfd.readouterr().err


def test_tasks_that_can_end_for_a_host_do_so():
    """The request is repeated, since a task that cannot do so yet ignores it. It is no failure."""
    events = queue.SimpleQueue()
    late = (
        "import signal, sys, time; time.sleep(0.5)\n"
        "signal.signal(signal.SIGURG, lambda *_: sys.exit(75)); time.sleep(60)"
    )
    tasks = [supervisor.Task(name, [sys.executable, "-c", late], os.environ) for name in "ab"]
    asking = threading.Thread(target=lambda: [(events.put(("join", 0)), time.sleep(0.2)) for _ in range(50)])
    asking.start()
    begun = time.monotonic()
    result, _ = run(*tasks, events=events, good=(0, 75), lost=lambda: pytest.fail("lost"))
    assert [(one.code, one.stopped) for one in result.outcomes] == [(75, False)] * 2
    assert result.lost is not None
    assert begun <= result.lost < time.monotonic() - 0.5
    asking.join()


def test_timeout():
    with pytest.raises(TimeoutError, match="slow"):
        run(shell("quick", "true"), shell("slow", "sleep 60"), timeout=0.3)


def test_a_task_whose_supervisor_ended_while_it_started_does_not_run():
    ended = subprocess.Popen(["true"])
    ended.wait()
    command = [sys.executable, "-IS", supervisor.pdeathsig.__file__, str(ended.pid), "echo", "runs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_missing_command():
    task = supervisor.Task("a", ["/no/such/program"], env=os.environ)
    result, lines = run(task)
    assert result.code == 127
    assert lines == ["[a] cannot run /no/such/program: No such file or directory"]


def test_processes_left_by_a_task_are_killed(tmp_path):
    left = tmp_path / "pid"
    run(shell("a", f"sleep 600 & echo $! > {left}; exit 0"))
    assert gone(left)


def test_a_signal_is_forwarded(tmp_path):
    def interrupt():
        """As `timeout` does, which signals its child and then its process group."""
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    saver = f"trap 'sleep 1; echo saved; exit 9' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    result, lines = run(shell("a", saver), grace=0.2)
    thread.join()
    assert lines[-1] == "[a] saved", "the grace only runs after a second request"
    assert result.signals == (signal.SIGTERM,)
    assert result.code == 9
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_outlives_a_killed_supervisor(tmp_path):
    pid = tmp_path / "pid"
    program = (
        "import os; from zerojax.multihost import supervisor as s;"
        f"s.Supervisor([s.Task('a', ['sh', '-c', 'echo $$ > {pid}; exec sleep 600'], os.environ)]).run()"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program])
    while not (pid.exists() and pid.read_text()):
        assert supervisor.poll() is None
        time.sleep(0.02)
    supervisor.kill()
    supervisor.wait()
    assert gone(pid)


@pytest.mark.parametrize("end", ["a dead rank", "two signals"])
def test_a_job_ends_although_nobody_reads_its_output(end, tmp_path):
    deaf = f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    script = "exit 7" if end == "a dead rank" else deaf
    program = (
        "import os, sys; from zerojax.multihost import supervisor as s;"
        "chatty = s.Task('rank 0', ['sh', '-c', 'while :; do echo on and on; sleep 0.01; done'], os.environ);"
        f"last = s.Task('rank 1', ['sh', '-c', {script!r}], os.environ);"
        "sys.exit(s.Supervisor([chatty, last], grace=0.5).run().code)"
    )
    with full_pipe() as (_, writer):
        job = subprocess.Popen([sys.executable, "-c", program], stdout=writer, stderr=writer)
        try:
            if end == "two signals":
                while not (tmp_path / "ready").exists():
                    assert job.poll() is None
                    time.sleep(0.02)
                for _ in range(2):
                    job.terminate()
                    time.sleep(2 * ONE_REQUEST)
            assert job.wait(timeout=120) == (7 if end == "a dead rank" else 128 + signal.SIGTERM)
        finally:
            job.kill()
