"""``zerojax launch``: start, supervise and restart the processes of a training run on this machine.

    zerojax launch --nodes 2 --devices-per-node 4 --restarts 3 gpt-tiny --run-dir runs/a

starts ``zerojax train gpt-tiny --run-dir runs/a`` twice, as one job, with four devices each. ``doctor`` or
``links`` in place of the config starts that command. ``posttrain`` before the config starts
``zerojax posttrain``. With a Python program,

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from zerojax.errors import EXIT_OK, EXIT_PEER_LOST, EXIT_STOPPED, NO_RESTART, ConfigurationError
from zerojax.log import logger
from zerojax.multihost.devices import Platform, share_devices
from zerojax.multihost.distributed import VARIABLES, free_port
from zerojax.multihost.peers.handshake import VARIABLE, new_token
from zerojax.multihost.supervisor import Supervisor, Task
from zerojax.run import recovery
from zerojax.sharding.host_memory import limit_variable

# Per machine, emulated devices included.
_MAX_DEVICES = 4096

# Commands besides `train` that a job can run.
_OTHERS = ("doctor", "links")


@dataclass(frozen=True)
class Job:
    """The processes to start, and how to restart them."""

    # Arguments of `zerojax train`; or another command, or a Python program, and its arguments.
    train: Sequence[str]
    nodes: int
    devices_per_node: int
    platform: Platform = "auto"
    restarts: int = 0
    min_nodes: int | None = None  # after a failure continue without failed nodes, down to this many
    grace: float = 15.0  # seconds for the others to end after one has failed
    program: Sequence[str] = (sys.executable, "-m", "zerojax")


def launch(job: Job) -> int:
    """Run a job to its end, restarting it after failures.

    Returns:
        The exit code; see the module.
    """
    if is_program(job.train[0]) and not Path(job.train[0]).is_file():
        raise ConfigurationError(f"{job.train[0]}: there is no such program; check the path")
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
        raise ConfigurationError(f"min_nodes is 1 to nodes={job.nodes}, not {job.min_nodes}")
    nodes, left = job.nodes, job.restarts
    restart = dict[str, str]()
    while True:
        tasks, good = _tasks(job, nodes, restart), (EXIT_OK, EXIT_STOPPED)
        result = Supervisor(tasks, job.grace, good=good, follows=EXIT_PEER_LOST).run()
        if result.code in (EXIT_OK, EXIT_STOPPED, *NO_RESTART) or result.signals or left == 0:
            return result.code
        if job.min_nodes is not None:
            nodes = max(job.min_nodes, nodes - len(result.failed))
        restart = {recovery.VARIABLE: f"{result.lost} {time.monotonic()}"}
        logger.warning(f"restarting with {nodes} of {job.nodes} nodes; {left - 1} restarts left")
        left -= 1


def _tasks(job: Job, nodes: int, restart: dict[str, str]) -> list[Task]:
    shares = share_devices(nodes, job.devices_per_node, job.platform)
    coordinator = f"127.0.0.1:{free_port()}"
    # Passed in the environment: other users can read a command line.
    shared = {VARIABLE: new_token()} | limit_variable(nodes * job.devices_per_node)
    return [
        Task(f"rank {rank}", command, os.environ | share | shared | restart | more)
        for rank, share in enumerate(shares)
        for command, more in [_command(job, coordinator, rank, nodes)]
    ]


def _command(job: Job, coordinator: str, rank: int, nodes: int) -> tuple[list[str], dict[str, str]]:
    """The command of one process, and its environment variables."""
    first, *options = job.train
    place = coordinator, str(rank), str(nodes)
    if is_program(first):
        # Python buffers its output to a pipe.
        variables = dict(zip(VARIABLES, place, strict=True)) | {"PYTHONUNBUFFERED": "1"}
        return [sys.executable, first, *options], variables
    if first == "posttrain" and options:
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
    add(
        "--restarts",
        type=int,
        default=Job.restarts,
        help="restart after a failure at most this many times (default: %(default)s)",
    )
    add("--min-nodes", type=int, help="restart without the nodes that failed, down to this many")
    add(
        "--grace",
        type=float,
        default=Job.grace,
        help="seconds that the others have to end after one has failed (default: %(default)s)",
    )
    add(
        "train",
        nargs=argparse.REMAINDER,
        metavar="CONFIG ...",
        help="arguments of zerojax train; or another command: posttrain CONFIG ..., doctor, links; or a "
        "Python program and its arguments, such as my_loop.py --steps 100",
    )
    options = vars(parser.parse_args(arguments))
    if not options["train"]:
        parser.error("name a config or a program: zerojax launch --nodes 2 --devices-per-node 4 CONFIG")
    return Job(**options)


def run(arguments: Sequence[str]) -> None:
    """Launch the job of a command line, and exit with its code."""
    sys.exit(launch(parse(arguments)))
