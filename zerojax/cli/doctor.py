"""`zerojax doctor`."""

import platform
import shutil
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import tyro
from rich.console import Console
from rich.table import Table

from zerojax.cli.cluster import join_cluster
from zerojax.config import MeshSection
from zerojax.errors import ZeroError

_PACKAGES = ("zerojax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers")
_GPU_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-triton", "triton")


@dataclass(frozen=True)
class Options:
    """Show what zerojax finds on this machine, and what it would choose.

    Attributes:
        mesh: The mesh to try.
    """

    mesh: MeshSection = field(default_factory=MeshSection)


def run(arguments: list[str]) -> None:
    """Look and print."""
    options = tyro.cli(Options, args=arguments, prog="zerojax doctor")
    join_cluster(options.mesh)
    console = Console(soft_wrap=True)
    for title, rows in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("mesh", _mesh(options.mesh)),
        ("kernels", _kernels()),
        ("host", _host()),
    ):
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _versions() -> list[tuple[str, str]]:
    rows = [("python", platform.python_version())]
    for name in (*_PACKAGES, *_GPU_PACKAGES):
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            if name in _PACKAGES:
                rows.append((name, "missing"))
    return rows


def _devices() -> list[tuple[str, str]]:
    import jax

    from zerojax.metrics import peak_flops

    rows = [("processes", str(jax.process_count())), ("devices", str(jax.device_count()))]
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        facts = [device.platform, device.device_kind]
        if limit := stats.get("bytes_limit"):
            facts.append(f"{limit / 2**30:.0f} GiB")
        if peak := peak_flops(device.device_kind):
            facts.append(f"{peak / 1e12:.0f} TFLOP/s bf16")
        rows.append((str(device.id), ", ".join(facts)))
    return rows


def _mesh(settings: MeshSection) -> list[tuple[str, str]]:
    from zerojax import make_mesh

    try:
        mesh = make_mesh(settings.nodes or None, settings.local or None)
    except ZeroError as error:
        return [("refused", str(error))]
    return [("nodes", str(mesh.shape["node"])), ("local", f"{mesh.shape['local']} devices per node")]


def _kernels() -> list[tuple[str, str]]:
    from pallas_kernels import backend_report

    return [(str(name), str(value)) for name, value in backend_report().items()]


def _host() -> list[tuple[str, str]]:
    import psutil

    memory, disk = psutil.virtual_memory(), shutil.disk_usage(".")
    return [
        ("processors", str(psutil.cpu_count())),
        ("memory", f"{memory.available / 2**30:.0f} of {memory.total / 2**30:.0f} GiB free"),
        ("disk here", f"{disk.free / 2**30:.0f} of {disk.total / 2**30:.0f} GiB free"),
    ]
