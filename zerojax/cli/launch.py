"""``zerojax launch``: start, supervise and restart the processes of a training run on this machine.

    zerojax launch --nodes 2 --devices-per-node 4 --restarts 3 gpt-tiny --run-dir runs/a

starts ``zerojax train gpt-tiny --run-dir runs/a`` twice, as one job, with four devices each. ``doctor``,
``links`` or ``follow`` in place of the config starts that command. ``posttrain`` before the config starts
``zerojax posttrain``, and ``train`` may be there. With a Python program,

    zerojax launch --nodes 2 --devices-per-node 4 --restarts 3 my_loop.py --steps 100

it starts ``python my_loop.py --steps 100``, which joins the job by ``zerojax.distributed.joined()``. For
several machines, see ``scripts/slurm`` and ``scripts/k8s``.

Exit codes: 0, success. 2, wrong use or settings, of this command or of ``zerojax train``. 3, the run
diverged. 75, the run stopped on request and saved. Otherwise it is the highest code of the processes that
failed by themselves, 128 + n for signal n; processes that ended because another did (4) do not count. The job
is restarted after every failure except 2 and 3, unless a signal has asked it to stop.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import get_args

from zerojax.cli import COMMANDS
from zerojax.errors import EXIT_OK, EXIT_PEER_LOST, EXIT_STOPPED, NO_RESTART, ConfigurationError
from zerojax.log import logger
from zerojax.multihost import snapshot_memory
from zerojax.multihost.devices import Platform, separate_nodes, share_devices
from zerojax.multihost.distributed import VARIABLES, free_port
from zerojax.multihost.peers.handshake import VARIABLE, new_token
from zerojax.multihost.standby import Standby
from zerojax.multihost.supervisor import Supervisor, Task
from zerojax.run import recovery
from zerojax.sharding.host_memory import limit_variable

# Per machine, emulated devices included.
_MAX_DEVICES = 4096

# Commands that a job can run: before a config, and without one.
_ON_CONFIG = ("train", "posttrain")
_OTHERS = ("doctor", "links", "follow")

_ZEROJAX = (sys.executable, "-m", "zerojax")
# The C library takes memory in huge pages, where Linux leaves them to programs. Before its first array XLA
# fills 8 bytes of it for each 256 of the GPU's memory: 3.5 GB, which take 1.7 s in pages of 4 KiB.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Seconds before standby processes start, because the job starts at the same time.
_STANDBY_AFTER = 10.0


@dataclass(frozen=True)
class Job:
    """The processes to start, and how to restart them."""

    # Arguments of `zerojax train`; or another command, or a Python program, and its arguments.
    train: Sequence[str]
    nodes: int
    devices_per_node: int
    platform: Platform = "auto"
    restarts: int = 0
    min_nodes: int | None = None  # After a failure continue without failed nodes, down to this many.
    grace: float = 15.0  # Seconds for the others to end after one has failed.
    # Seconds of work that a restart may repeat; 0 keeps no snapshots.
    snapshot_seconds: float = 3.0 if snapshot_memory.SUPPORTED else 0.0
    standby: bool = True  # Keep a process for each node that is ready to take over.
    program: Sequence[str] = _ZEROJAX


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
    if not 0 <= job.grace < float("inf"):
        raise ConfigurationError(f"grace must be a number of seconds, not {job.grace}")
    if job.nodes * job.devices_per_node > _MAX_DEVICES:
        raise ConfigurationError(
            f"{job.nodes} x {job.devices_per_node} devices are more than {_MAX_DEVICES} on one machine: for "
            "several machines, use scripts/slurm or scripts/k8s"
        )
    if job.min_nodes is not None and not 1 <= job.min_nodes <= job.nodes:
        raise ConfigurationError(f"min_nodes must be from 1 to nodes={job.nodes}, not {job.min_nodes}")
    if not 0 <= job.snapshot_seconds < float("inf"):
        raise ConfigurationError(f"snapshot_seconds must be a number of seconds, not {job.snapshot_seconds}")
    nodes, left, restart = job.nodes, job.restarts, dict[str, str]()
    kept = _Kept(job)
    try:
        while True:
            tasks, good = kept.tasks(nodes, restart), (EXIT_OK, EXIT_STOPPED)
            result = Supervisor(
                tasks,
                job.grace,
                good=good,
                follows=EXIT_PEER_LOST,
                started=partial(kept.stand_by, nodes if left else 0),
                lost=kept.prepare,
            ).run()
            if result.code in (EXIT_OK, EXIT_STOPPED, *NO_RESTART) or result.signals or left == 0:
                return result.code
            if job.min_nodes is not None:
                nodes = max(job.min_nodes, nodes - len(result.failed))
            who = ", ".join(result.failed) or "a process"
            restart = {recovery.VARIABLE: f"{result.lost} {time.monotonic()} {who}"}
            logger.warning(f"restarting with {nodes} of {job.nodes} nodes; {left - 1} restarts left")
            left -= 1
    finally:
        kept.close()


class _Kept:
    """The launcher's snapshots and standby processes, which it keeps from one start of a job to the next.

    The commands that train use them, if there are restarts.
    """

    def __init__(self, job: Job) -> None:
        trains = not is_program(job.train[0]) and job.train[0] not in _OTHERS
        self._job = job
        self._snapshots = bool(trains and job.restarts and job.snapshot_seconds)
        self._standby = bool(trains and job.restarts and job.standby) and job.program == _ZEROJAX
        self._files: list[int] = []
        self._waiting: list[tuple[Task, Standby]] = []

    def stand_by(self, nodes: int) -> None:
        """Start processes that wait for the next start."""
        tasks = self._new(nodes) if self._standby and nodes else []
        self._waiting = [
            (task, Standby(task.command, task.env, task.pass_fds, _STANDBY_AFTER)) for task in tasks
        ]

    def prepare(self) -> None:
        """Let the processes that stand by do what they can while the job's processes end."""
        for _, process in self._waiting:
            process.prepare()

    def tasks(self, nodes: int, restart: Mapping[str, str]) -> list[Task]:
        """The tasks of a start: those that stand by, if all of them do."""
        waiting = self._waiting if len(self._waiting) == nodes else []
        if waiting and all(process.waits for _, process in waiting):
            self._waiting = []
            begins = [(task, partial(process.begin, restart)) for task, process in waiting]
        else:
            if waiting:
                logger.warning("a process that stood by has ended: starting new ones")
            self._end_standby()
            begins = [(task, task.standby) for task in self._new(nodes)]
        return [replace(task, env={**task.env, **restart}, standby=begin) for task, begin in begins]

    @cached_property
    def _limit(self) -> dict[str, str]:
        """The limit of locked memory. A later start would find less that is free: the job before has it."""
        return limit_variable(self._job.nodes * self._job.devices_per_node)

    def _new(self, nodes: int) -> list[Task]:
        """The tasks of a new job."""
        job = self._job
        for file in self._files[nodes:]:
            os.close(file)
        missing = (nodes - len(self._files)) * self._snapshots
        self._files = self._files[:nodes] + [snapshot_memory.create() for _ in range(missing)]
        shares = separate_nodes(share_devices(nodes, job.devices_per_node, job.platform))
        coordinator = f"127.0.0.1:{free_port()}"
        # Passed in the environment: other users can read a command line.
        # Receivers beside engines know a token that the user has set.
        token = os.environ.get(VARIABLE, "").strip() or new_token()
        shared = {VARIABLE: token} | self._limit
        tasks = []
        for rank, share in enumerate(shares):
            command, more = _command(job, coordinator, rank, nodes)
            files = tuple(self._files[rank : rank + 1])
            if files:
                more[snapshot_memory.VARIABLE] = f"{files[0]} {job.snapshot_seconds}"
            env = {**_HUGE_PAGES, **os.environ, **share, **shared, **more}
            tasks.append(Task(f"rank {rank}", command, env, files))
        return tasks

    def _end_standby(self) -> None:
        for _, process in self._waiting:
            process.close()
        self._waiting = []

    def close(self) -> None:
        """Free the snapshots' memory, and end the standby processes."""
        self._end_standby()
        for file in self._files:
            os.close(file)
        self._files = []


def _command(job: Job, coordinator: str, rank: int, nodes: int) -> tuple[list[str], dict[str, str]]:
    """The command of one process, and its environment variables."""
    first, *options = job.train
    place = coordinator, str(rank), str(nodes)
    if is_program(first):
        # Python buffers its output to a pipe.
        variables = dict(zip(VARIABLES, place, strict=True)) | {"PYTHONUNBUFFERED": "1"}
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
        "on this machine.",
    )
    add = parser.add_argument
    add("--nodes", type=int, required=True, help="processes to start; each is a node of the mesh")
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
