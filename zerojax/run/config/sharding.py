"""Settings of the mesh and of a job of several processes."""

from dataclasses import dataclass

from jax.sharding import Mesh

from zerojax.sharding.mesh import make_mesh
from zerojax.validation.bounds import MAX_DEVICES, MAX_EMULATED, check_numbers, require


@dataclass(frozen=True)
class MeshSection:
    """The (node, local) mesh: `local` is the fast domain, `node` the slow one.

    Attributes:
        nodes: Nodes; 0 is one per process.
        local: Devices per node; 0 is all devices of a node.
        emulate: On CPU, split the host into nodes x local devices that emulate the cluster.
    """

    nodes: int = 0
    local: int = 0
    emulate: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "mesh.{}".format)
        require(self.nodes >= 0, "mesh.nodes must be 0 (from the processes) or more")
        require(self.local >= 0, "mesh.local must be 0 (all the devices of a node) or more")
        require(
            not self.emulate or (self.nodes > 0 and self.local > 0),
            "mesh.emulate needs mesh.nodes and mesh.local, the numbers of devices to emulate",
        )
        most = MAX_EMULATED if self.emulate else MAX_DEVICES
        require(
            max(self.nodes, 1) * max(self.local, 1) <= most,
            f"mesh.nodes {self.nodes} x mesh.local {self.local}: at most {most:,} devices"
            f"{' can be emulated' * self.emulate}",
        )

    def to_mesh(self) -> Mesh:
        """The mesh of this job's devices.

        Raises:
            ConfigurationError: as ``zerojax.make_mesh``.
        """
        return make_mesh(self.nodes or None, self.local or None)


@dataclass(frozen=True)
class ClusterSection:
    """Timeouts of the processes of a run, and their cache; docs/clusters.md says what happens at each.

    Attributes:
        join_timeout: Seconds to wait for all processes at the start.
        peer_timeout: Seconds of silence after which a process counts as lost, and the others end.
        insecure: Run without a token (ZEROJAX_JOB_TOKEN) even if the network can reach process 0.
        step_factor: End the run when a step takes this many times the median of recent ones; 0 turns this
            off.
        step_timeout: Seconds that any step may take, whatever the median.
        phase_timeout: Seconds that compilation, an evaluation or a checkpoint may take; 0 is no limit.
        compilation_cache: Folder that keeps compiled programs for later starts. "auto" is
            JAX_COMPILATION_CACHE_DIR, else zerojax/compiled in the user's cache folder; "off" keeps none.
    """

    join_timeout: float = 300.0
    peer_timeout: float = 60.0
    insecure: bool = False
    step_factor: float = 10.0
    step_timeout: float = 300.0
    phase_timeout: float = 3600.0
    compilation_cache: str = "auto"

    def __post_init__(self) -> None:
        check_numbers(self, "cluster.{}".format)
        for name in ("join_timeout", "peer_timeout"):
            require(getattr(self, name) >= 1, f"cluster.{name} must be at least 1 second")
        for name in ("step_factor", "step_timeout", "phase_timeout"):
            require(getattr(self, name) >= 0, f"cluster.{name} must not be negative")
        require(
            self.compilation_cache != "",
            'cluster.compilation_cache is empty: name a folder, or choose "auto" or "off"',
        )
