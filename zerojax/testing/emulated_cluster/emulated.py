"""Emulated nodes on one machine, to run and measure distributed programs without a cluster."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, Self

from zerojax.multihost import supervisor
from zerojax.multihost.devices import Platform, share_devices
from zerojax.multihost.peers.handshake import VARIABLE, new_token
from zerojax.network.discovery import VARIABLE as LINK_RATE
from zerojax.network.nccl import CORES
from zerojax.sharding.host_memory import limit_variable
from zerojax.testing.emulated_cluster import inside
from zerojax.testing.emulated_cluster.network import INTERFACE, LinkBytes, Network

COORDINATOR_PORT = 9876
MASTER_PORT = 29500


class EmulatedCluster:
    """A context manager of nodes, each with its own link, host name and devices.

        with EmulatedCluster(nodes=2, devices_per_node=4, rate="10gbit") as cluster:
            result = cluster.run([sys.executable, "train.py"])
            print(result.code, cluster.link_bytes())

    The environment of a command has

    - ``JAX_COORDINATOR_ADDRESS``, ``JAX_PROCESS_ID`` and ``JAX_NUM_PROCESSES`` for one process per node, read
      by ``zerojax.distributed.joined``, and ``ZEROJAX_JOB_TOKEN``, the job's secret;
    - ``MASTER_ADDR``, ``MASTER_PORT``, ``NODE_RANK``, ``NNODES`` for torchrun;
    - ``CUDA_VISIBLE_DEVICES``, or ``JAX_PLATFORMS=cpu`` and the number of emulated CPU devices;
    - ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB``, a GPU's share of this machine's memory, unless it is set;
    - ``NCCL_HOSTID`` and the interface for NCCL and Gloo, so that NCCL uses sockets between the nodes and
      NVLink within them;
    - ``ZEROJAX_LINK_RATE``, because a virtual interface does not know its rate;
    - ``ZEROJAX_NODE_CORES``, because the nodes share this machine's cores.

    Args:
        nodes: number of nodes.
        devices_per_node: GPUs or emulated CPU devices of each node.
        rate: rate of each link in each direction, such as "10gbit" or "400mbit"; None for no limit.
        latency: one-way delay to add between nodes, such as "50us"; None for none.
        mtu: bytes of the largest packet: 1500, or 9000 for jumbo frames.
        platform: "gpu", "cpu", or "auto" for GPUs if this machine has any.

    Raises:
        ConfigurationError: an argument is invalid, or there are too few GPUs.
        ClusterError: this machine cannot emulate a cluster. The message says why.
    """

    def __init__(
        self,
        nodes: int,
        devices_per_node: int = 1,
        *,
        rate: str | None = "10gbit",
        latency: str | None = None,
        mtu: int = 1500,
        platform: Platform = "auto",
    ):
        self.nodes = nodes
        self._rate = rate
        self._devices = share_devices(nodes, devices_per_node, platform)
        self._token = new_token()
        self._locked = limit_variable(nodes * devices_per_node)
        self.network = Network(nodes, rate, latency, mtu)
        names = [f"{self.network.address(i)} node{i}\n" for i in range(nodes)]
        self._hosts = "".join(["127.0.0.1 localhost\n", *names])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the network."""
        self.network.close()

    def environment(self, node: int) -> dict[str, str]:
        """The environment of a command on a node, including this process's variables."""
        # The nodes cannot reach a proxy, and JAX refuses to start if one is configured.
        env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        head = self.network.address(0)
        env |= {
            "JAX_COORDINATOR_ADDRESS": f"{head}:{COORDINATOR_PORT}",
            "JAX_PROCESS_ID": str(node),
            "JAX_NUM_PROCESSES": str(self.nodes),
            VARIABLE: self._token,
            "MASTER_ADDR": head,
            "MASTER_PORT": str(MASTER_PORT),
            "NODE_RANK": str(node),
            "NNODES": str(self.nodes),
            "NCCL_HOSTID": f"node{node}",
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_IB_DISABLE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if self._rate:
            env.setdefault(LINK_RATE, self._rate)
        env.setdefault(CORES, str(max(1, len(os.sched_getaffinity(0)) // self.nodes)))
        return env | self._locked | self._devices[node]

    def run(
        self,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        grace: float = 30.0,
        timeout: float | None = None,
        output: BinaryIO | None = None,
    ) -> supervisor.Result:
        """Run a command on every node; see ``Supervisor`` for signals, failures and output.

        Args:
          command: the command, or a function from a node's number to its command.
          env: variables to add to ``environment``.
          grace: seconds between the signal to end a node and killing it.
          timeout: seconds for the command; None for no limit.
          output: destination of the lines, prefixed with ``[node0]`` and so on; None is standard output.

        Raises:
          TimeoutError: the command took too long. All nodes have been ended.
        """
        tasks = []
        for node, namespace in enumerate(self.network.namespaces):
            inner = command(node) if callable(command) else command
            entry = [sys.executable, inside.__file__, str(namespace), f"node{node}"]
            tasks.append(
                supervisor.Task(
                    name=f"node{node}",
                    command=[*entry, self._hosts, *inner],
                    env=self.environment(node) | dict(env or {}),
                    pass_fds=(namespace,),
                )
            )
        return supervisor.Supervisor(tasks, grace, timeout, output).run()

    def link_bytes(self) -> list[LinkBytes]:
        """The bytes that each node has sent and received over its link so far."""
        return self.network.bytes()
