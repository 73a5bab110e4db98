"""The two-dimensional device mesh ``(node, local)`` that every collective runs over.

``local`` is the fast domain (NVLink within a host), ``node`` the slow one (the network between hosts). The
hpZ secondary partition lives within ``local`` (ZeRO++ section 3.2), so choosing ``local`` chooses the
secondary group's size: it need not be a physical host.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from zerojax.errors import ConfigurationError, RunError
from zerojax.network import nccl

NODE = "node"
LOCAL = "local"
AXES = (NODE, LOCAL)
BY_ROWS = PartitionSpec(AXES)
"""The sharding of a batch: its leading axis over all devices."""
OWNED = (LOCAL, NODE)
"""The order of the owners of a leaf's blocks (``zerojax.sharding.layout``)."""


@dataclass(frozen=True)
class MeshShape:
    """The extents of the mesh as plain numbers.

    Attributes:
        nodes: extent of ``node``.
        local: extent of ``local``.
        size: the number of devices.
        axes: the mesh axes that it spans: only ``local`` if it has one node.
        owners: these axes in the order in which they number the owners of a leaf's blocks.
    """

    nodes: int
    local: int
    size: int = field(init=False, compare=False, repr=False)
    axes: tuple[str, ...] = field(init=False, compare=False, repr=False)
    owners: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        axes, owners = (AXES, OWNED) if self.nodes > 1 else ((LOCAL,), (LOCAL,))
        vars(self).update(size=self.nodes * self.local, axes=axes, owners=owners)

    @staticmethod
    def of(mesh: Mesh) -> "MeshShape":
        """The extents of ``mesh``."""
        return MeshShape(nodes=mesh.shape[NODE], local=mesh.shape[LOCAL])


def make_mesh(
    nodes: int | None = None,
    local: int | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Build the ``("node", "local")`` mesh.

    Args:
        nodes: extent of the slow axis; by default the number of processes, or of devices / ``local``.
        local: extent of the fast axis; by default the number of devices / ``nodes``.
        devices: the devices to use, by default all; they are ordered by process, then by id, so that
            the devices of one process are neighbours on ``local``.

    Returns:
        A mesh of ``nodes x local`` devices, the first ones if one process has more. Each of several
        processes must own a part of the mesh. With GPUs of several processes this sets NCCL's options for
        the network between them (``zerojax.network.nccl``), so make the mesh before the first collective.

    Raises:
        ConfigurationError: the extents are not positive, or ask for more devices than there are.
        RunError: JAX has no device.

    Examples:
        >>> dict(zerojax.make_mesh(2, 4).shape)
        {'node': 2, 'local': 4}
    """
    for name, extent in (("nodes", nodes), ("local", local)):
        if extent is not None and extent < 1:
            raise ConfigurationError(f"make_mesh: {name}={extent} must be at least 1.")
    available = list(all_devices() if devices is None else devices)
    available.sort(key=lambda device: (device.process_index, device.id))
    processes = len({device.process_index for device in available})
    if nodes is None:
        nodes = processes if local is None else len(available) // local
    if local is None:
        local = len(available) // nodes
    wanted = nodes * local
    if wanted > len(available) or wanted == 0:
        each = -(-max(nodes, 1) * max(local, 1) // processes)
        emulate = ""
        if platform_of(available) == "cpu":
            emulate = (
                ", or emulate devices: zerojax's commands do with --mesh.emulate, unless XLA_FLAGS or "
                "JAX_NUM_CPU_DEVICES sets their number; a program of your own does with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={each}"
            )
        raise ConfigurationError(
            f"make_mesh: nodes={nodes} x local={local} does not fit the {len(available)} devices at "
            f"hand. Ask for a smaller mesh, or start more processes{emulate}."
        )
    if wanted < len(available) and processes > 1:
        raise ConfigurationError(
            f"make_mesh: nodes={nodes} x local={local} leaves {len(available) - wanted} of "
            f"{len(available)} devices out, and with {processes} processes each must take part. "
            "Choose extents whose product is the number of devices."
        )
    if processes > 1 and on_gpus(available):
        nccl.apply(nccl.settings_here(processes, len(available), local)[1])
    grid = np.asarray(available[:wanted], dtype=object).reshape(nodes, local)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def all_devices() -> list[jax.Device]:
    """The devices of all processes.

    Raises:
        RunError: JAX cannot use the platform that JAX_PLATFORMS names. It may be a driver that recovers.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it has found a platform
        platforms = jax.config.jax_platforms
        raise RunError(
            f"JAX has no device of JAX_PLATFORMS={platforms}: {str(error) or 'its package is missing'}: "
            "install zerojax's extra for this machine, or unset JAX_PLATFORMS"
        ) from error


def checked_mesh(mesh: Mesh) -> Mesh:
    """A mesh from ``make_mesh``; or one of the same axes, which become automatic (``AxisType.Auto``).

    Raises:
        ConfigurationError: it is no mesh, or has other axes.
    """
    names = tuple(mesh.axis_names) if isinstance(mesh, Mesh | AbstractMesh) else None
    if names != AXES:
        found = f"has axes {names}" if names else f"is a {type(mesh).__name__}"
        raise ConfigurationError(f"the mesh {found}: make it by zerojax.make_mesh().")
    if set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    # jax.make_mesh makes axes that are explicit.
    return Mesh(mesh.devices, AXES, axis_types=(AxisType.Auto,) * 2)


def refuse_another(mesh: Mesh) -> None:
    """Refuse to run where ``jax.set_mesh`` has made another mesh the current one: JAX would not trace.

    Raises:
        ConfigurationError: naming its axes.
    """
    current = jax.sharding.get_abstract_mesh()
    if not current.empty and current != mesh.abstract_mesh:
        raise ConfigurationError(
            f"jax.set_mesh has set a mesh with the axes {current.axis_names}, but this state is on a mesh "
            "from zerojax.make_mesh. Leave the `with` block of jax.set_mesh before calling zerojax, or set "
            "the state's mesh: jax.set_mesh(mesh)."
        )


def platform_of(devices: Iterable[jax.Device]) -> Literal["cpu", "cuda"] | None:
    """ "cuda" if any device is a GPU, real or described (``zerojax.aot``); "cpu" if all are CPUs.

    CPUs can be emulated in any number.
    """
    platforms = {device.platform for device in devices}
    if platforms & {"gpu", "cuda"}:
        return "cuda"
    return "cpu" if platforms <= {"cpu"} else None


def on_gpus(devices: Iterable[jax.Device]) -> bool:
    """Whether any device is a GPU."""
    return platform_of(devices) == "cuda"


def node_leaders(mesh: Mesh) -> list[int]:
    """The process of each node's first device, by node."""
    return [int(devices[0].process_index) for devices in mesh.devices]
