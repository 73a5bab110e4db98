"""Failures in jobs of real processes: all processes end soon, with a line that names the cause."""

import itertools
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environment import for_programs

from zerojax.errors import EXIT_PEER_LOST
from zerojax.multihost.distributed import free_port

pytestmark = pytest.mark.alone

# A job whose processes meet in a collective; what follows is appended.
MEET = """
import sys, time
from zerojax import distributed
rank, size, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with distributed.joined(f"127.0.0.1:{port}", rank, size, peer_timeout=3, join_timeout=60) as peers:
    import jax, numpy as np
    from jax.experimental import multihost_utils
    meet = lambda: multihost_utils.process_allgather(np.ones(4))
    meet()
    print("up", flush=True)
"""
FOR_EVER = """
    while True:
        meet()
"""


class Job:
    """The processes of a job, and what they print."""

    def __init__(self, program, size, folder, variables):
        self.port = free_port()
        env = for_programs() | variables
        self.out = [folder / f"out{rank}" for rank in range(size)]
        self.err = [folder / f"err{rank}" for rank in range(size)]
        self.processes = [self._begin(program, rank, size, env) for rank in range(size)]

    def _begin(self, program, rank, size, env):
        command = [sys.executable, "-c", program, str(rank), str(size), str(self.port)]
        with self.out[rank].open("wb") as out, self.err[rank].open("wb") as err:
            return subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=err.name.rpartition("/")[0])

    def wait_until_up(self):
        end = time.monotonic() + 120
        while not all("up" in path.read_text() for path in self.out):
            assert time.monotonic() < end, [path.read_text() for path in self.err]
            assert all(process.poll() is None for process in self.processes), [
                p.read_text() for p in self.err
            ]
            time.sleep(0.05)

    def end(self, *ranks, within):
        """Exit codes and standard error of some processes, which must end within some seconds."""
        limit = time.monotonic() + within
        codes = [self.processes[rank].wait(max(0.1, limit - time.monotonic())) for rank in ranks]
        return codes, [self.err[rank].read_text() for rank in ranks]


@pytest.fixture
def start(tmp_path):
    jobs = []

    def begin(program, size, **variables):
        jobs.append(Job(program, size, tmp_path, variables))
        return jobs[-1]

    yield begin
    for job in jobs:
        for process in job.processes:
            process.kill()
            process.wait()


# The start of a gRPC connection (HTTP/2's preface), after a message that once led to JAX's service.
JAX_CLIENT = b'{"say": "jax"}\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0'


def frame(data):
    return struct.pack(">BI", 1, len(data)) + data


DIED = "zerojax: rank {} has died: its connection is closed\n"
SILENT = (
    "zerojax: rank {} has been silent for 3 s (cluster.peer_timeout): it hangs, is stopped, or its "
    "host cannot be reached\n"
)


@pytest.mark.parametrize(
    ("victim", "number", "line"),
    [
        (0, signal.SIGKILL, DIED),
        (1, signal.SIGSTOP, SILENT),
        pytest.param(1, signal.SIGKILL, DIED, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, SILENT, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_or_hangs(start, tmp_path, victim, number, line):
    job = start(MEET + FOR_EVER, 3)
    job.wait_until_up()
    job.processes[victim].send_signal(number)
    others = [rank for rank in range(3) if rank != victim]
    # An idle machine needs at most 9 seconds; JAX by itself, 100.
    codes, errors = job.end(*others, within=60)
    assert codes == [EXIT_PEER_LOST] * 2
    assert errors == [line.format(victim)] * 2, "one line each, and nothing of XLA's"
    assert not list(tmp_path.glob("core*"))


STRANGERS = """
    import psutil
    ports = [c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
    print(*ports, flush=True)
    while not open("strangers").read():
        time.sleep(0.1)
    meet()
"""


def test_strangers_cannot_reach_a_running_job(start, tmp_path):
    """Neither through rank 0's port, with messages that end a job, nor through JAX's service behind it."""
    (tmp_path / "strangers").touch()
    job = start(MEET.replace("    meet()\n", "") + STRANGERS, 2)
    job.wait_until_up()
    failure = b'{"say": "end", "failure": {"kind": "failed", "rank": 1, "why": "\\u001b[2J", "code": 1}}'
    for said in (frame(failure), frame(b'{"say": "here", "rank": 1, "size": 2, "facts": {}}'), JAX_CLIENT):
        with socket.create_connection(("127.0.0.1", job.port), timeout=20) as stranger:
            stranger.sendall(said)
            while stranger.recv(4096):
                pass
    (tmp_path / "strangers").write_text("have been here")
    codes, errors = job.end(0, 1, within=120)
    assert (codes, errors) == ([0, 0], ["", ""])
    ports = [path.read_text().splitlines()[1].split() for path in job.out]
    assert ports == [[str(job.port)], []], "JAX's service listens at no port"


def test_an_error_in_one_process_ends_the_others(start):
    """While they wait for it, as at a barrier while one process prepares the data."""
    job = start(MEET + "\n    if rank == 0: raise OSError('no such source')\n    meet()\n", 2)
    (code, other), (error, line) = job.end(0, 1, within=120)
    assert (code, other) == (1, EXIT_PEER_LOST)
    assert error.endswith("OSError: no such source\n")
    assert line == "zerojax: rank 0 failed: OSError: no such source\n"


def test_all_leave_together(start):
    """Process 0, which runs the coordinator, may be done first."""
    job = start(MEET + "\n    time.sleep(rank)\n", 2)
    codes, errors = job.end(0, 1, within=120)
    assert codes == [0, 0]
    assert errors == ["", ""]


# Rank 0 mostly waits for rank 1 in a collective. Both say which time it is.
UNTIL_TOLD = """
    def told():
        time.sleep(0.05 * rank)
        all_told = multihost_utils.process_allgather(np.array(bool(open("told").read())))
        sys.stdout.write(f"{time.time()} up\\n")
        return all_told.any()
    while not told():
        pass
    multihost_utils.sync_global_devices("the coordination service still works")
"""


@pytest.fixture
def shifted_clock(tmp_path):
    """The variables that let a program's wall clock be shifted, and the function that shifts it."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    library, file = tmp_path / "clock.so", tmp_path / "offset"
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    file.write_bytes(bytes(8))

    def shift(seconds):
        with file.open("r+b") as shared:
            shared.write(struct.pack("=q", seconds))

    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(file)}, shift


def test_a_wall_clock_that_jumps_ends_no_job(start, tmp_path, shifted_clock):
    """JAX's service checks its heartbeats every few seconds, and Gloo's waits have a limit of 30 minutes."""
    variables, shift = shifted_clock
    (tmp_path / "told").touch()
    job = start(
        MEET.replace('    print("up", flush=True)\n', "") + UNTIL_TOLD,
        2,
        TF_CPP_MIN_LOG_LEVEL="1",
        **variables,
    )
    job.wait_until_up()
    for seconds in (3600, -3600, 86400):
        shift(seconds)
        time.sleep(8)
    (tmp_path / "told").write_text("now")
    codes, errors = job.end(0, 1, within=60)
    assert (codes, errors) == ([0, 0], ["", ""])
    for path in job.out:
        times = [float(time) for time in re.findall(r"^(\d+\.\d+) up$", path.read_text(), re.MULTILINE)]
        jumps = [round((after - before) / 3600) for before, after in itertools.pairwise(times)]
        assert [jump for jump in jumps if jump] == [1, -2, 25]


NAN = r"""
    import hashlib
    import jax.numpy as jnp, optax, zerojax
    from flax import nnx
    mesh = zerojax.make_mesh()
    model = lambda rngs: nnx.Linear(6, 3, rngs=rngs)
    loss_fn = lambda model, batch: batch["a"] * batch["b"] * jnp.mean((model(batch["x"]) - 1) ** 2)
    zero = zerojax.ZeroConfig.preset("zero++", compute_dtype="float32")
    state = zerojax.TrainState.create(model, optax.adamw(1e-2), loss_fn, mesh=mesh, zero=zero)
    skipped = []
    for step in range(4):
        x = np.random.default_rng((step, rank)).normal(size=(4, 6)).astype("f4")
        if step == 2 and rank == 1: x[0, 0] = np.nan
        state, metrics = zerojax.train_step(state, {"x": x, "a": 0.5, "b": np.float32(1 + step)})
        skipped.append(int(metrics["skipped"]))
    whole = jax.jit(lambda p: p, out_shardings=jax.NamedSharding(mesh, jax.P()))(state.params)
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(whole))).hexdigest()
    sys.stdout.write(f"{skipped} {digest}\n")  # in one write: Gloo prints to the same file
"""


def test_a_nan_in_one_process_is_skipped_by_all(start):
    job = start(MEET + NAN, 2)
    codes, errors = job.end(0, 1, within=200)
    assert codes == [0, 0], errors
    first, second = (path.read_text().splitlines()[-1] for path in job.out)
    assert first.startswith("[0, 0, 1, 0] ")
    assert first == second, "all have the same parameters"


TRAIN = """
import sys, time
rank, size, port = int(sys.argv[1]), sys.argv[2], sys.argv[3]
from zerojax.cli import main
from zerojax.run import loop
real_step, real_time, step = loop.train_step, time.time, 0

def train_step(state, batch):
    global step
    step += 1
    if rank == 1:
        time.sleep(0.2)  # a slow peer
        if step == 3:
            time.time = lambda: real_time() - 3e8  # its clock jumps back ten years
        if step == {hang}:
            while True:  # finally it hangs
                time.sleep(1)
    return real_step(state, batch)

loop.train_step = train_step
sys.exit(main(["train", {config!r}, "--run-dir", {folder!r}, "--coordinator", f"127.0.0.1:{{port}}",
    "--process-id", str(rank), "--num-processes", size, "--cluster.step-timeout", "2"]))
"""


def test_a_hung_step_is_ended_and_its_stack_is_written(start, tmp_path, text_config):
    folder = tmp_path / "run"
    job = start(TRAIN.format(config=str(text_config), folder=str(folder), hang=9), 2)
    codes, errors = job.end(0, 1, within=200)
    assert codes == [EXIT_PEER_LOST] * 2, errors
    for error in errors:
        (line,) = error.splitlines()
        (times,) = re.findall(r" has taken (\S+) s; recent ones took (\S+) s", line)
        taken, usual = map(float, times)
        limit = max(2, 10 * usual)  # cluster.step_timeout and step_factor; the line has three digits of each
        assert 0.99 * limit < taken < limit + 1
        assert line.startswith("zerojax: rank ")
        assert "the stacks of its threads are in" in line
    stacks = [(folder / "stacks" / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert 'File "<string>", line' in stacks[1].partition("loop.py")[0], "what hung is in the program above"
    assert "loop.py" in stacks[0]
    assert '"status": "failed"' in (folder / "run.json").read_text()
    # Despite slowness and the clock, the run reached its last checkpoint.
    assert (folder / "checkpoints" / "6").is_dir()


@pytest.fixture
def text_config(tmp_path) -> Path:
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text("all work and no play makes a dull run\n" * (i + 4))
    path = tmp_path / "micro.toml"
    path.write_text(
        f"""
        train = {{steps = 40, batch_size = 4, sequence_length = 16, eval_every = 0, eval_batches = 1}}
        model = {{vocab_size = 256, layers = 1, d_model = 8, heads = 2, max_seq_len = 16, biases = false}}
        data = {{source = "{tmp_path / "text"}", validation = 0.2}}
        zero = {{compute_dtype = "float32", remat = "none"}}
        checkpoint = {{every = 3}}
        log = {{trackers = []}}
        """
    )
    return path
