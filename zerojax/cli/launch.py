"""``zerojax launch``: start, supervise and restart the processes of a training run.

    zerojax launch --nodes 2 --devices-per-node 4 --restarts 3 gpt-tiny --run-dir runs/a

starts ``zerojax train gpt-tiny --run-dir runs/a`` twice, as one job, with four devices each. ``doctor``,
``links`` or ``follow`` in place of the config starts that command. ``posttrain`` before the config starts
``zerojax posttrain``, and ``train`` may be there. With a Python program,

    zerojax launch --nodes 2 --devices-per-node 4 --restarts 3 my_loop.py --steps 100

it starts ``python my_loop.py --steps 100``, which joins the job by ``zerojax.distributed.joined()``.

On several hosts each has a launcher, with the same command. They meet at the launcher of host 0:

    zerojax launch --hosts 2 --host 1 --coordinator host0:9876 --nodes 1 --devices-per-node 8 gpt-1.3b

Exit codes: 0, success. 2, wrong use or settings, of this command or of ``zerojax train``. 3, the run
diverged. 75, the run stopped on request and saved. Otherwise it is the highest code of the processes that
failed by themselves, 128 + n for signal n; processes that ended because another did (4) do not count. The job
is restarted after every failure except 2 and 3, unless a signal has asked it to stop.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import get_args

from zerojax.cli import COMMANDS
from zerojax.errors import EXIT_OK, EXIT_PEER_LOST, EXIT_STOPPED, ConfigurationError
from zerojax.log import logger
from zerojax.multihost import distributed, snapshot_memory
from zerojax.multihost.devices import Platform, separate_nodes, share_devices
from zerojax.multihost.hosts import Alone, Follower, Launchers, Leader, Order, Place, Plan, Report, Start
from zerojax.multihost.peers.handshake import VARIABLE, new_token
from zerojax.multihost.snapshot_memory import Intervals
from zerojax.multihost.standby import COMPILE, Standby
from zerojax.multihost.supervisor import Supervisor, Task
from zerojax.run import recovery
from zerojax.sharding.host_memory import limit_variable
from zerojax.versions import VERSION

# Per machine, emulated devices included.
_MAX_DEVICES = 4096

# Settings that the launchers of all hosts share.
_SHARED = (
    *("train", "nodes", "devices_per_node", "restarts", "min_nodes"),
    *("snapshot_seconds", "copy_seconds", "standby", "compile_ahead"),
)

# Commands that a job can run: before a config, and without one.
_ON_CONFIG = ("train", "posttrain")
_OTHERS = ("doctor", "links", "follow")

_ZEROJAX = (sys.executable, "-m", "zerojax")
# The C library takes memory in huge pages, where Linux leaves them to programs. Before its first array XLA
# fills 8 bytes of it for each 256 of the GPU's memory: 3.5 GB, which take 1.7 s in pages of 4 KiB.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Seconds before standby processes start, because the job starts at the same time; and before processes start
# that compile for one node less.
_STANDBY_AFTER, _COMPILE_AFTER = 10.0, 30.0
# Beside a job XLA takes only the GPU memory that it needs to time kernels.
_BESIDE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@dataclass(frozen=True)
class Job:
    """The processes to start, and how to restart them."""

    # Arguments of `zerojax train`; or another command, or a Python program, and its arguments.
    train: Sequence[str]
    nodes: int  # Processes of each host.
    devices_per_node: int
    platform: Platform = "auto"
    restarts: int = 0
    min_nodes: int | None = None  # After a failure continue without failed nodes, down to this many.
    grace: float = 15.0  # Seconds for the others to end after one has failed.
    # Seconds of work that a restart may repeat; 0 keeps no snapshots.
    snapshot_seconds: float = 3.0 if snapshot_memory.SUPPORTED else 0.0
    copy_seconds: float = 0.0  # Seconds of work that a lost host may cost; 0 keeps no copies on other hosts.
    standby: bool = True  # Keep a process for each node that is ready to take over.
    compile_ahead: bool = False  # Compile the program of one node less while the job trains.
    coordinator: str | None = None  # "host:port" of the launcher of host 0.
    host: int | None = None
    hosts: int | None = None
    program: Sequence[str] = _ZEROJAX

    @property
    def trains(self) -> bool:
        """Whether its processes take snapshots, and save when they are asked to."""
        return not is_program(self.train[0]) and self.train[0] not in _OTHERS


def launch(job: Job) -> int:
    """Run a job to its end, restarting it after failures.

    Returns:
        The exit code; see the module.
    """
    if is_program(job.train[0]) and not Path(job.train[0]).is_file():
        raise ConfigurationError(f"{job.train[0]}: there is no such program; check the path")
    if (name := job.train[0]) in {*COMMANDS}.difference(_ON_CONFIG, _OTHERS):
        raise ConfigurationError(
            f"a job runs {', '.join((*_ON_CONFIG, *_OTHERS))}, not {name}: run zerojax {name} by itself"
        )
    if job.restarts < 0:
        raise ConfigurationError(f"restarts must not be negative: {job.restarts}")
    for name in ("grace", "snapshot_seconds", "copy_seconds"):
        if not 0 <= (seconds := getattr(job, name)) < float("inf"):
            raise ConfigurationError(f"{name} must be a number of seconds, not {seconds}")
    if job.nodes * job.devices_per_node > _MAX_DEVICES:
        raise ConfigurationError(
            f"{job.nodes} x {job.devices_per_node} devices are more than {_MAX_DEVICES} on one machine: for "
            "several machines, start a launcher on each (--hosts)"
        )
    if job.copy_seconds and not (job.restarts and job.snapshot_seconds):
        raise ConfigurationError("copy_seconds copies snapshots: set --restarts and --snapshot-seconds, too")
    if job.compile_ahead and not (
        job.restarts and job.min_nodes and job.train[0] != "posttrain" and job.trains
    ):
        raise ConfigurationError(
            "compile_ahead compiles the step of zerojax train for a restart with one node less: set "
            "--restarts and --min-nodes, or leave it out"
        )
    share_devices(job.nodes, job.devices_per_node, job.platform)  # refuses what this machine lacks
    with ExitStack() as stack:
        launchers = stack.enter_context(closing(_launchers(job)))
        kept = stack.enter_context(closing(_Kept(job)))
        report, lost = Report(kept.ports()), time.monotonic()
        while isinstance(order := launchers.next(report), Order):
            restart = recovery.variable(lost, order.cause) if order.cause else {}
            result = Supervisor(
                kept.tasks(order.start, restart),
                job.grace,
                good=(EXIT_OK, EXIT_STOPPED),
                follows=EXIT_PEER_LOST,
                started=partial(kept.prepare_for, order),
                lost=kept.prepare,
                events=launchers.events,
            ).run()
            lost = result.lost or time.monotonic()
            report = Report(kept.ports(), result.outcomes, result.signals, kept.stands_by)
        return order


def _launchers(job: Job) -> Launchers:
    """The launchers of all hosts, as this one sees them."""
    given = {"--coordinator": job.coordinator, "--host": job.host, "--hosts": job.hosts}
    if None in given.values() and (some := [name for name, value in given.items() if value is not None]):
        raise ConfigurationError(f"{', '.join(given)} belong together: only {', '.join(some)} given")
    found = distributed.find_job(job.coordinator, job.host, job.hosts)
    hosts = found[2] if found else 1
    if job.min_nodes is not None and not 1 <= job.min_nodes <= job.nodes * hosts:
        raise ConfigurationError(
            f"min_nodes must be from 1 to nodes={job.nodes * hosts}, not {job.min_nodes}"
        )
    plan = Plan(hosts, job.nodes, job.restarts, job.min_nodes, job.trains, job.compile_ahead)
    if found is None or hosts == 1:
        if job.copy_seconds:
            raise ConfigurationError("one host has no other to keep its state: leave out --copy-seconds")
        return Alone(plan)
    address, index, _, _ = found
    host, port = distributed.split_address(address)
    listen = distributed.listening_at(distributed.own_address(address)) if index == 0 else (host, port)
    # Each restart of the processes uses it, so all launchers must know it.
    token = distributed.job_token(None, insecure=False, host=listen[0])
    settings = {name: repr(getattr(job, name)) for name in _SHARED} | {"version": VERSION}
    place = Place(host, port, listen, index, hosts, token, settings)
    return Leader(place, plan) if index == 0 else Follower(place)


class _Kept:
    """The launcher's snapshots and standby processes, which it keeps from one start of a job to the next.

    The commands that train use them, if there are restarts.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._snapshots = bool(job.trains and job.restarts and job.snapshot_seconds)
        self._standby = bool(job.trains and job.restarts and job.standby) and job.program == _ZEROJAX
        self._files: list[int] = []
        self._waiting: list[tuple[Task, Standby]] = []
        self._waits_for: Start | None = None
        self._compiling: list[Standby] = []
        self._compiles_for = 0  # nodes

    def ports(self) -> tuple[int, int, int]:
        """Free ports of this host for rank 0 of the starts in an order."""
        now, later, ahead = distributed.free_ports(3)
        return now, later, ahead

    def prepare_for(self, order: Order) -> None:
        """Start processes that wait for the next start, and ones that compile for one node less."""
        self._stand_by(order.following)
        self._compile_for(order.fewer)

    def _compile_for(self, start: Start | None) -> None:
        """Start processes that compile the program of a start, once for each number of nodes."""
        nodes = 0 if start is None else start.size
        if nodes == self._compiles_for:
            return
        _close(self._compiling)
        self._compiles_for = nodes
        self._compiling = [
            Standby(task.command, {**task.env, **_BESIDE}, (), _COMPILE_AFTER, COMPILE)
            for task in (self._tasks(start) if start is not None else ())
        ]

    def _stand_by(self, start: Start | None) -> None:
        tasks = self._new(start) if self._standby and start is not None else []
        self._waits_for = start
        self._waiting = [
            (task, Standby(task.command, task.env, task.pass_fds, _STANDBY_AFTER)) for task in tasks
        ]

    @property
    def stands_by(self) -> bool:
        """Whether all processes that stand by can begin."""
        return self._standby and all(process.waits for _, process in self._waiting)

    def prepare(self) -> None:
        """Let the processes that stand by do what they can while the job's processes end."""
        for _, process in self._waiting:
            process.prepare()

    def tasks(self, start: Start, restart: Mapping[str, str]) -> list[Task]:
        """The tasks of a start: those that stand by for it, if there are such."""
        if self._waiting and start == self._waits_for:
            begins = [(task, partial(process.begin, restart)) for task, process in self._waiting]
            self._waiting = []
        else:
            if self._waiting and not self.stands_by:
                logger.warning("a process that stood by has ended: starting new ones")
            self._end_standby()
            begins = [(task, task.standby) for task in self._new(start)]
        return [replace(task, env={**task.env, **restart}, standby=begin) for task, begin in begins]

    @cached_property
    def _limit(self) -> dict[str, str]:
        """The limit of locked memory. A later start would find less that is free: the job before has it."""
        return limit_variable(self._job.nodes * self._job.devices_per_node)

    def _new(self, start: Start) -> list[Task]:
        """The tasks of a new job, with their memory for snapshots."""
        for file in self._files[start.count :]:
            os.close(file)
        missing = (start.count - len(self._files)) * self._snapshots
        self._files = self._files[: start.count] + [snapshot_memory.create() for _ in range(missing)]
        tasks, intervals = self._tasks(start), self._intervals(start)
        if not self._files:
            return tasks
        return [
            replace(
                task, env={**task.env, snapshot_memory.VARIABLE: intervals.variable(file)}, pass_fds=(file,)
            )
            for task, file in zip(tasks, self._files, strict=True)
        ]

    def _tasks(self, start: Start) -> list[Task]:
        """The tasks of a job."""
        job, nodes = self._job, start.count
        if not nodes:
            return []
        shares = separate_nodes(share_devices(nodes, job.devices_per_node, job.platform))
        # Passed in the environment: other users can read a command line.
        # Receivers beside engines know a token that the user has set.
        token = os.environ.get(VARIABLE, "").strip() or (new_token() if nodes == start.size else "")
        shared = ({VARIABLE: token} if token else {}) | self._limit
        if bind := os.environ.get(distributed.BIND_VARIABLE):  # of the launcher
            host, port = bind.rpartition(":")[0], start.coordinator.rpartition(":")[2]
            shared[distributed.BIND_VARIABLE] = f"{host}:{port}"
        tasks = []
        for number, share in enumerate(shares):
            rank = start.first + number
            command, more = _command(job, start.coordinator, rank, start.size)
            env = {**_HUGE_PAGES, **os.environ, **share, **shared, **more}
            tasks.append(Task(f"rank {rank}", command, env))
        return tasks

    def _intervals(self, start: Start) -> Intervals:
        """How often the processes of a start keep their state."""
        job = self._job
        # No host has more nodes, so the node that is so far away, in both directions, is on another host.
        copies = job.copy_seconds and start.size >= 2 * job.nodes
        return Intervals(job.snapshot_seconds, job.copy_seconds, job.nodes if copies else 0)

    def _end_standby(self) -> None:
        _close(process for _, process in self._waiting)
        self._waiting = []

    def close(self) -> None:
        """Free the snapshots' memory, and end the processes beside the job."""
        self._end_standby()
        _close(self._compiling)
        for file in self._files:
            os.close(file)
        self._files = []


def _close(processes: Iterable[Standby]) -> None:
    for process in processes:
        process.close()


def _command(job: Job, coordinator: str, rank: int, nodes: int) -> tuple[list[str], dict[str, str]]:
    """The command of one process, and its environment variables."""
    first, *options = job.train
    place = coordinator, str(rank), str(nodes)
    if is_program(first):
        # Python buffers its output to a pipe.
        variables = dict(zip(distributed.VARIABLES, place, strict=True)) | {"PYTHONUNBUFFERED": "1"}
        return [sys.executable, first, *options], variables
    if first in _ON_CONFIG and options:
        command = [first, options.pop(0)]
    else:
        command = [first] if first in _OTHERS else ["train", first]
    # The job's own options come later and override these.
    mesh = ["--mesh.nodes", str(nodes), "--mesh.local", str(job.devices_per_node)]
    names = "--coordinator", "--process-id", "--num-processes"
    joining = [word for pair in zip(names, place, strict=True) for word in pair]
    return [*job.program, *command, *mesh, *options, *joining], {}


def is_program(name: str) -> bool:
    """Whether the first argument names a Python program, not a config or command."""
    return name.endswith(".py")


def parse(arguments: Sequence[str]) -> Job:
    """Read the command line.

    Raises:
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    parser = argparse.ArgumentParser(
        prog="zerojax launch",
        description="Start `zerojax train CONFIG ...`, or a Python program of your own, in several processes "
        "on this machine, or on several hosts with a launcher on each.",
    )
    add = parser.add_argument
    add("--nodes", type=int, required=True, help="processes of each host; each is a node of the mesh")
    add("--devices-per-node", type=int, required=True, help="GPUs, or emulated CPU devices, of each process")
    add("--platform", choices=get_args(Platform), default=Job.platform, help="default: GPUs if there are any")
    numbers = {
        "restarts": (int, "restart after a failure at most this many times (default: %(default)s)"),
        "min_nodes": (int, "restart without the nodes that failed, down to this many"),
        "grace": (float, "seconds that the others have to end after one has failed (default: %(default)s)"),
        "snapshot_seconds": (
            float,
            "seconds of work that a restart may repeat: so often the state is copied to this machine's "
            "memory; 0 restarts from checkpoints (default: %(default)s)",
        ),
        "copy_seconds": (
            float,
            "with several hosts, seconds of work that a lost host may cost: so often the state of each is "
            "copied to another's memory; 0 uses the last checkpoint (default: %(default)s)",
        ),
    }
    numbers |= {
        "coordinator": (str, "HOST:PORT of the launcher of host 0, if there are several hosts"),
        "host": (int, "index of this host, from 0"),
        "hosts": (int, "their number; without these three the environment or a scheduler may name them"),
    }
    for name, (kind, text) in numbers.items():
        add(f"--{name.replace('_', '-')}", type=kind, default=getattr(Job, name), help=text)
    add(
        "--standby",
        action=argparse.BooleanOptionalAction,
        default=Job.standby,
        help="with --restarts, keep a process for each node that is ready to take over",
    )
    add(
        "--compile-ahead",
        action=argparse.BooleanOptionalAction,
        default=Job.compile_ahead,
        help="with --min-nodes, compile the program of one node less while the job trains",
    )
    add(
        "train",
        nargs=argparse.REMAINDER,
        metavar="CONFIG ...",
        help="arguments of zerojax train; or another command: posttrain CONFIG ..., doctor, links, follow "
        "RUN ...; or a Python program and its arguments, such as my_loop.py --steps 100",
    )
    options = vars(parser.parse_args(arguments))
    if not options["train"]:
        parser.error("name a config or a program: zerojax launch --nodes 2 --devices-per-node 4 CONFIG")
    return Job(**options)


def run(arguments: Sequence[str]) -> None:
    """Launch the job of a command line, and exit with its code."""
    sys.exit(launch(parse(arguments)))
