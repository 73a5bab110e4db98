"""zerojax launch, with small programs in place of the trainer."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from zerojax.cli import launch
from zerojax.errors import ZeroError
from zerojax.multihost import snapshot_memory
from zerojax.multihost.distributed import free_port
from zerojax.multihost.hosts import Order, Start
from zerojax.sharding import host_memory

pytestmark = pytest.mark.alone

SHOW = """
import os, sys
token = os.environ["ZEROJAX_JOB_TOKEN"]
limit = os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]
print(*sys.argv[1:], os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"].split()[-1], limit, token)
"""
JOIN = r"""
import sys
from zerojax import distributed
coordinator, rank, count = sys.argv[-5], int(sys.argv[-3]), int(sys.argv[-1])
with distributed.joined(coordinator, rank, count):
    import jax
    from jax.experimental import multihost_utils
    total = multihost_utils.process_allgather(jax.numpy.array([rank + 1.0])).sum()
    # In one write: Gloo prints to the same pipe.
    sys.stdout.write(f"total {float(total)} devices {jax.device_count()}\n")
"""


def job(program, nodes=2, **options):
    return launch.Job(["a", "b"], nodes, 2, "cpu", program=[sys.executable, "-c", program], **options)


@pytest.fixture
def attempts(tmp_path):
    """A program that counts the starts of rank 0 and runs a line, and a function to read the count.

    No process runs the line before all have started, which takes a busy machine seconds; each start of them
    has another address.
    """
    notes = tmp_path / "notes"

    def program(line):
        return (
            "import sys, os, time; rank, count = int(sys.argv[-3]), int(sys.argv[-1])\n"
            f"path, up = {str(notes)!r}, {str(tmp_path / 'up')!r} + sys.argv[-5]\n"
            "if rank == 0: open(path, 'a').write(f'{count} ')\n"
            "open(f'{up}-{rank}', 'w').close()\n"
            "while not all(os.path.exists(f'{up}-{i}') for i in range(count)): time.sleep(0.01)\n"
            "tries = len(open(path).read().split())\n" + line
        )

    return program, lambda: [int(n) for n in notes.read_text().split()]


def test_the_options_of_each_process(capfd, monkeypatch):
    monkeypatch.delenv(host_memory.LIMIT, raising=False)
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 60 << 30)
    assert launch.launch(job(SHOW, nodes=3)) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    # Each device may lock 8 GiB, its sixth of 85% of 60.
    pattern = (
        r"\[rank (\d)\] train a --mesh\.nodes 3 --mesh\.local 2 b "
        r"--coordinator 127\.0\.0\.1:(\d+) --process-id (\d) --num-processes 3 "
        r"cpu --xla_force_host_platform_device_count=2 8 ([0-9a-f]{64})"
    )
    found = [re.fullmatch(pattern, line) for line in lines]
    assert all(found), lines
    assert [(m[1], m[3]) for m in found if m] == [(str(i), str(i)) for i in range(3)]
    assert len({(m[2], m[4]) for m in found if m}) == 1


def test_each_attempt_has_a_new_token(tmp_path):
    program = f"import os, sys\nwith open({str(tmp_path / 'tokens')!r}, 'a') as file:\n" + (
        "    print(os.environ['ZEROJAX_JOB_TOKEN'], file=file)\nsys.exit(1)"
    )
    assert launch.launch(job(program, nodes=1, restarts=2)) == 1
    tokens = (tmp_path / "tokens").read_text().split()
    assert len(tokens) == len(set(tokens)) == 3


def test_two_processes_join(capfd):
    assert launch.launch(job(JOIN)) == 0
    out = capfd.readouterr().out
    for rank in range(2):
        assert f"[rank {rank}] total 3.0 devices 4" in out


def test_a_launcher_on_each_host_starts_its_part_of_a_job(capfd, monkeypatch):
    """A process of one host fails, so all start again; both launchers end with the job's code."""
    monkeypatch.setenv("ZEROJAX_JOB_TOKEN", "0123456789abcdef")
    program = (
        "import os, sys, time; rank, again = int(sys.argv[-3]), os.environ.get('ZEROJAX_LOST', '')\n"
        "print(*sys.argv[-6:], again.split(maxsplit=2)[2:], os.environ['ZEROJAX_JOB_TOKEN'])\n"
        "sys.exit(75) if again else sys.exit(9) if rank == 1 else time.sleep(600)"
    )
    meeting = {"coordinator": f"127.0.0.1:{free_port()}", "hosts": 3, "restarts": 1}

    def of_host(host):
        return launch.launch(job(program, nodes=1, host=host, **meeting))

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(of_host, range(3))] == [75, 75, 75]
    pattern = (
        r"\[rank (\d)\] --coordinator 127\.0\.0\.1:(\d+) --process-id \1 --num-processes 3 "
        r"\['lost rank 1'\] 0\S+f"
    )
    found = re.findall(pattern, capfd.readouterr().out)
    assert sorted(rank for rank, _ in found) == ["0", "1", "2"]
    assert len({port for _, port in found}) == 1


LOOP = r"""
import sys
from zerojax import distributed
from zerojax.errors import Stopped, ZeroError
with distributed.joined():
    import jax
    from jax.experimental import multihost_utils
    total = multihost_utils.process_allgather(jax.numpy.array([jax.process_index() + 1.0])).sum()
    sys.stdout.write(f"total {float(total)} devices {jax.device_count()} {sys.argv[1:]}\n")
    if "--stop" in sys.argv:
        raise Stopped("saved")
    if "--wrong" in sys.argv:
        raise ZeroError("no such thing")
"""


def launch_program(path, *arguments, **options):
    path.write_text(LOOP)
    return launch.launch(launch.Job([str(path), *arguments], 2, 2, "cpu", **options))


@pytest.mark.parametrize(
    ("argument", "code", "line"), [("--stop", 75, ""), ("--wrong", 2, "zerojax: no such thing")]
)
def test_a_program_of_ones_own_joins_by_one_call_and_ends_with_the_code_of_its_error(
    argument, code, line, tmp_path, capfd
):
    assert launch_program(tmp_path / "my_loop.py", "--steps", "3", argument, restarts=3) == code
    found = capfd.readouterr()
    for rank in range(2):
        assert f"[rank {rank}] total 3.0 devices 4 ['--steps', '3', '{argument}']" in found.out
    assert line in found.out
    assert "Traceback" not in found.out
    assert "restarting" not in found.err


def test_a_program_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ZeroError, match=r"my_loop\.py: there is no such program"):
        launch.launch(launch.Job([str(tmp_path / "my_loop.py")], 2, 2, "cpu", restarts=3))


def test_a_death_ends_the_job_and_names_the_rank(capfd):
    program = "import sys, os, time\nif sys.argv[-3] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    started = time.monotonic()
    assert launch.launch(job(program)) == 128 + 9
    assert time.monotonic() - started < 120
    assert "rank 1 ended with SIGKILL" in capfd.readouterr().err


def test_restarts_until_it_works(attempts, capfd):
    program, starts = attempts
    assert launch.launch(job(program("sys.exit(0 if tries == 3 else 1)"), restarts=5)) == 0
    assert starts() == [2, 2, 2]
    assert "3 restarts left" in capfd.readouterr().err


def test_a_restart_is_told_when_a_process_was_lost(attempts, capfd):
    program, _ = attempts
    line = (
        "if tries == 1: os.kill(os.getpid(), 9) if rank else time.sleep(600)\n"
        "lost, ended, cause = os.environ['ZEROJAX_LOST'].split(maxsplit=2)\n"
        "lost, ended = float(lost), float(ended)\n"
        "assert cause == 'lost rank 1', cause\n"
        "sys.stdout.write(f'{0 < lost < ended < time.monotonic()} {ended - lost:.1f}\\n')"
    )
    assert launch.launch(job(program(line), restarts=1)) == 0
    found = re.findall(r"\[rank \d\] True (\S+)", capfd.readouterr().out)
    assert len(found) == 2
    assert float(found[0]) < 30


def test_memory_for_snapshots_outlives_the_processes(attempts):
    program, starts = attempts
    line = (
        "file, *other = os.environ['ZEROJAX_SNAPSHOT'].split(); assert other == ['3.0', '0.0', '0']\n"
        "before = os.pread(int(file), 100, 0).decode()\n"
        "assert before == ('' if tries == 1 else f'rank {rank}'), before\n"
        "os.pwrite(int(file), f'rank {rank}'.encode(), 0)\n"
        # The first process that ends ends the others, which must have written by then.
        "open(f'{up}-{rank}-wrote', 'w').close()\n"
        "while not all(os.path.exists(f'{up}-{i}-wrote') for i in range(count)): time.sleep(0.01)\n"
        "sys.exit(1 if tries == 1 else 0)"
    )
    files = os.listdir("/proc/self/fd")
    assert launch.launch(job(program(line), restarts=3)) == 0
    assert starts() == [2, 2]
    assert os.listdir("/proc/self/fd") == files, "the launcher has closed them"


@pytest.mark.parametrize(
    "options", [{"restarts": 0}, {"restarts": 1, "snapshot_seconds": 0.0}, {"restarts": 1, "program": True}]
)
def test_without_snapshots_there_is_no_memory(options, tmp_path):
    line = "import os, sys; sys.exit('ZEROJAX_SNAPSHOT' in os.environ)"
    if options.pop("program", False):
        (tmp_path / "my_loop.py").write_text(line)
        assert launch.launch(launch.Job([str(tmp_path / "my_loop.py")], 1, 1, "cpu", **options)) == 0
    else:
        assert launch.launch(job(line, nodes=1, **options)) == 0


def test_fewer_nodes_get_the_snapshots_of_the_first(attempts):
    program, starts = attempts
    line = (
        "file, *_ = os.environ['ZEROJAX_SNAPSHOT'].split()\n"
        "assert os.pread(int(file), 9, 0) == (b'' if tries == 1 else b'rank 0')\n"
        "os.pwrite(int(file), f'rank {rank}'.encode(), 0)\n"
        "open(f'{up}-{rank}-wrote', 'w').close()\n"
        "while not all(os.path.exists(f'{up}-{i}-wrote') for i in range(count)): time.sleep(0.01)\n"
        "sys.exit(1) if rank == count - 1 and count > 1 else time.sleep(0.5 if count == 1 else 60)"
    )
    files = os.listdir("/proc/self/fd")
    assert launch.launch(job(program(line), nodes=2, restarts=1, min_nodes=1, grace=5)) == 0
    assert starts() == [2, 1]
    assert os.listdir("/proc/self/fd") == files, "the launcher has closed both"


def test_a_stopped_run_is_not_restarted(attempts, capfd):
    program, starts = attempts
    assert launch.launch(job(program("time.sleep(0.5 * rank); sys.exit(75)"), restarts=5)) == 75
    assert starts() == [2]
    assert "ending the others" not in capfd.readouterr().err


def test_processes_that_only_follow_are_not_the_cause(attempts, capfd):
    program, starts = attempts
    line = "sys.exit(0 if tries > 1 else 4 if rank == 0 else (time.sleep(60), 9)[1])"
    assert launch.launch(job(program(line), nodes=2, restarts=5, min_nodes=1)) == 0
    # Rank 1 was told to end before it could fail by itself: nobody is known to be at fault.
    assert starts() == [2, 2]
    assert "rank 0 ended" not in capfd.readouterr().err


def test_a_hung_node_is_left_out(attempts):
    program, starts = attempts
    line = "tries == 1 and (os.kill(os.getpid(), 19) if rank else (time.sleep(1), sys.exit(4)))"  # SIGSTOP
    assert launch.launch(job(program(line), nodes=2, restarts=1, min_nodes=1, grace=0.5)) == 0
    assert starts() == [2, 1]


def test_gives_up_when_no_restart_is_left(attempts):
    program, starts = attempts
    assert launch.launch(job(program("sys.exit(5)"), restarts=1)) == 5
    assert starts() == [2, 2]


def test_wrong_use_is_not_retried(attempts):
    program, starts = attempts
    assert launch.launch(job(program("sys.exit(2)"), restarts=5)) == 2
    assert starts() == [2]


def test_a_program_is_compiled_once_for_each_number_of_nodes(monkeypatch):
    """Their processes get no memory of the job's snapshots, and leave it as it is."""
    begun, ended = [], []

    class Process:
        def __init__(self, command, env, pass_fds, after, value="1"):
            self.about = command[-1], value
            begun.append((*self.about, len(pass_fds), snapshot_memory.VARIABLE in env))

        def close(self):
            ended.append(self.about)

    monkeypatch.setattr(launch, "Standby", Process)
    options = {"restarts": 9, "min_nodes": 1, "compile_ahead": True}
    kept = launch._Kept(launch.Job(["a"], 3, 1, "cpu", **options))
    start, fewer, last = (Start("localhost:1", 0, nodes, nodes) for nodes in (3, 2, 1))
    with closing(kept):
        kept.tasks(start, {})
        files = [*kept._files]
        kept.prepare_for(Order(start, None, fewer=fewer))
        kept.prepare_for(Order(start, None, fewer=fewer))
        assert begun == [("2", "compile", 0, False)] * 2
        kept.prepare_for(Order(fewer, None, fewer=last))
        assert kept._files == files
        assert begun[2:] == [("1", "compile", 0, False)]
        kept.prepare_for(Order(last, None))
        assert ended == [("2", "compile")] * 2 + [("1", "compile")]


def test_continues_with_the_remaining_nodes(attempts):
    program, starts = attempts
    line = "sys.exit(1) if rank == count - 1 and count > 1 else time.sleep(0.5 if count == 1 else 60)"
    assert launch.launch(job(program(line), nodes=3, restarts=5, min_nodes=1, grace=5)) == 0
    assert starts() == [3, 2, 1]


def test_a_signal_prevents_restarts(attempts, tmp_path):
    program, starts = attempts

    def interrupt():
        while not [*tmp_path.glob("up*-0")]:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert launch.launch(job(program("time.sleep(60)"), restarts=5)) == 128 + signal.SIGTERM
    thread.join()
    assert starts() == [2]


def test_the_command_line_becomes_a_job():
    parsed = launch.parse(
        [
            "--nodes",
            "2",
            "--devices-per-node",
            "4",
            "--restarts",
            "3",
            "gpt-tiny",
            "--run-dir",
            "x",
            "--nodes",
            "9",
        ]
    )
    assert (parsed.nodes, parsed.devices_per_node, parsed.restarts) == (2, 4, 3)
    assert parsed.train == ["gpt-tiny", "--run-dir", "x", "--nodes", "9"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"restarts": -1}, "restarts"),
        ({"min_nodes": 3}, "min_nodes"),
        ({"snapshot_seconds": -1.0}, "snapshot_seconds"),
        ({"copy_seconds": -1.0}, "copy_seconds must be"),
        ({"copy_seconds": 5.0}, "set --restarts"),
        ({"copy_seconds": 5.0, "restarts": 1}, "one host has no other"),
        ({"compile_ahead": True, "restarts": 1}, "set --restarts and --min-nodes"),
        ({"nodes": 0}, "at least 1"),
        ({"host": 1}, "--coordinator, --host, --hosts belong together: only --host given"),
        ({"host": 2, "hosts": 2, "coordinator": "a:1"}, "processes are 0 to 1"),
        ({"host": 1, "hosts": 2, "coordinator": "192.0.2.1:1"}, "same ZEROJAX_JOB_TOKEN"),
    ],
)
def test_impossible_jobs_are_refused(options, message):
    with pytest.raises(ZeroError, match=message):
        launch.launch(job("pass", **options))


def test_train_may_be_named_and_a_command_that_is_no_job_is_refused():
    mesh = ["--nodes", "1", "--devices-per-node", "2"]
    named, other = launch.parse([*mesh, "train", "a"]), launch.parse([*mesh, "a"])
    assert launch._command(named, "host:1", 0, 1) == launch._command(other, "host:1", 0, 1)
    with pytest.raises(ZeroError, match=r"not eval: run zerojax eval by itself"):
        launch.launch(launch.Job(["eval", "runs/a"], 2, 2))


def test_wrong_options_end_with_code_2():
    code = "from zerojax.cli import launch; launch.run(['--nodes', '2'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--devices-per-node" in done.stderr
