"""`zerojax launch`: the processes of a training run on this machine, started, watched and restarted.

    zerojax launch --nodes 2 --devices-per-node 4 --restarts 3 gpt-tiny --run-dir runs/a

starts ``zerojax train gpt-tiny --run-dir runs/a`` twice, with four devices each and told about each
other; with ``doctor`` in the place of the config, ``zerojax doctor``. Several machines are started by what
runs them: see ``scripts/slurm`` and ``scripts/k8s``.

Exit codes: 0 all ended well; 2 wrong use or settings, by this command or by ``zerojax train``; 3 the run
diverged; 75 it was asked to stop, and saved; else the highest code of a process that ended by itself, 128 + n
for signal n, leaving out those that only ended because of another one (4). Restarts happen after every
failure but 2 and 3, and not once somebody has asked for the end.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from zerojax.errors import EXIT_OK, EXIT_PEER_LOST, EXIT_STOPPED, NO_RESTART, ZeroError
from zerojax.multihost import supervisor
from zerojax.multihost.devices import Platform, share_devices
from zerojax.multihost.distributed import free_port
from zerojax.multihost.peers.handshake import VARIABLE, new_token

# On one machine, emulated ones included.
_MOST_DEVICES = 4096


@dataclass(frozen=True)
class Job:
    """What to start."""

    train: Sequence[str]  # the arguments of `zerojax train`; or "doctor" and those of `zerojax doctor`
    nodes: int
    devices_per_node: int
    platform: Platform = "auto"
    restarts: int = 0
    min_nodes: int | None = None  # after a failure go on without the failed, down to this many
    grace: float = 15.0  # seconds that the others get to end when one has failed
    program: Sequence[str] = (sys.executable, "-m", "zerojax")


def launch(job: Job) -> int:
    """Run a job to its end, restarting it as often as it may be.

    Returns:
      The exit code, as the module says.

    Raises:
      ZeroError: the job asks for what there is not, before anything is started.
    """
    if job.restarts < 0:
        raise ZeroError(f"restarts is a number of times, not {job.restarts}")
    if not 0 <= job.grace < float("inf"):
        raise ZeroError(f"grace is a number of seconds, not {job.grace}")
    if job.nodes * job.devices_per_node > _MOST_DEVICES:
        raise ZeroError(
            f"{job.nodes} x {job.devices_per_node} devices on one machine? {_MOST_DEVICES} are the most; "
            "scripts/slurm and scripts/k8s start several machines"
        )
    if job.min_nodes is not None and not 1 <= job.min_nodes <= job.nodes:
        raise ZeroError(f"min_nodes is 1 to nodes={job.nodes}, not {job.min_nodes}")
    nodes, left = job.nodes, job.restarts
    while True:
        result = supervisor.run(
            _tasks(job, nodes), grace=job.grace, good=(EXIT_OK, EXIT_STOPPED), follows=EXIT_PEER_LOST
        )
        if result.code in (EXIT_OK, EXIT_STOPPED, *NO_RESTART) or result.signals or left == 0:
            return result.code
        if job.min_nodes is not None:
            nodes = max(job.min_nodes, nodes - len(result.failed))
        _say(f"starting again with {nodes} of {job.nodes} nodes; {left - 1} restarts are left")
        left -= 1


def _tasks(job: Job, nodes: int) -> list[supervisor.Task]:
    shares = share_devices(nodes, job.devices_per_node, job.platform)
    first, *options = job.train
    command = ["doctor"] if first == "doctor" else ["train", first]
    # The options that are given may say otherwise: the last one counts.
    mesh = ["--mesh.nodes", str(nodes), "--mesh.local", str(job.devices_per_node)]
    coordinator = f"127.0.0.1:{free_port()}"
    # In the environment, which other users cannot read, as they can a command line.
    token = {VARIABLE: new_token()}
    return [
        supervisor.Task(
            name=f"rank {rank}",
            command=[
                *job.program, *command, *mesh, *options, "--coordinator", coordinator,
                "--process-id", str(rank), "--num-processes", str(nodes),
            ],
            env=os.environ | share | token,
        )
        for rank, share in enumerate(shares)
    ]  # fmt: skip


def _say(line: str) -> None:
    print(f"zerojax: {line}", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> Job:
    """Read the command line.

    Raises:
      SystemExit: wrong options (code 2), or after --help (code 0).
    """
    parser = argparse.ArgumentParser(
        prog="zerojax launch",
        description="Start `zerojax train CONFIG ...` in several processes on this machine.",
    )
    add = parser.add_argument
    add("--nodes", type=int, required=True, help="processes; each is a node of the mesh")
    add("--devices-per-node", type=int, required=True, help="GPUs, or emulated CPU devices, of each")
    add("--platform", choices=("auto", "cpu", "gpu"), default="auto", help="default: GPUs if there are any")
    add("--restarts", type=int, default=0, help="how often to start again after a failure")
    add("--min-nodes", type=int, help="go on without nodes that failed, down to this many")
    add("--grace", type=float, default=15.0, help="seconds for the others to end when one failed")
    add("train", nargs=argparse.REMAINDER, metavar="CONFIG ...", help="arguments of zerojax train; or doctor")
    options = vars(parser.parse_args(arguments))
    if not options["train"]:
        parser.error("name a config: zerojax launch --nodes 2 --devices-per-node 4 CONFIG")
    return Job(**options)


def run(arguments: Sequence[str]) -> None:
    """The command; it ends the process with the job's exit code."""
    sys.exit(launch(parse(arguments)))
