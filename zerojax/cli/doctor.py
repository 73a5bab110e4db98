"""``zerojax doctor``: versions, devices, kernels, links, and a suitable mesh and preset."""

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import jax
import psutil

from pallas_kernels import backend_report
from zerojax import compilation_cache
from zerojax.analysis import links
from zerojax.cli.cluster import JobOptions, joined_cluster
from zerojax.cli.options import read_options
from zerojax.errors import ConfigurationError
from zerojax.formatting import size
from zerojax.matmul.fp8 import has_fp8
from zerojax.models import flash_attention
from zerojax.network import nccl
from zerojax.run.config import ClusterSection, MeshSection
from zerojax.run.metrics.log import peak_flops
from zerojax.sharding.host_memory import LIMIT, free_host_memory, host_limit
from zerojax.sharding.mesh import all_devices, on_gpus
from zerojax.versions import JAX_TESTED, installed

_PACKAGES = ("zerojax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers")
_GPU_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-triton", "triton", flash_attention.PACKAGE)

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Options(JobOptions):
    """Show this machine's versions, devices and kernels, measure its links, and suggest a mesh and preset.

    Under `zerojax launch`, or on several hosts with the options and variables of `zerojax train`, it also
    measures the links between the processes.

    Attributes:
        mesh: The mesh to measure; by default processes x devices.
        run_dir: Folder for runs, to check its disk.
    """

    mesh: MeshSection = field(default_factory=MeshSection)
    run_dir: Path = Path("runs")


def run(arguments: list[str]) -> None:
    """Inspect this machine, measure its links, and print what was found."""
    options = read_options(Options, "doctor", arguments)
    with joined_cluster(options.mesh, ClusterSection(), options):
        sections = {
            "versions": _versions(),
            "devices": _devices(),
            "kernels": _kernels(),
            "host": _host(options.run_dir),
            "network": _network(options.mesh),
            "links and choice": _choice(options.mesh),
        }
        if jax.process_index() == 0:
            _print(sections)


def _print(sections: dict[str, Rows]) -> None:
    for title, rows in sections.items():
        print(title)
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            print(f"  {name:<{width}}  {text}")


def _versions() -> Rows:
    rows = [("python", platform.python_version())]
    for name in (*_PACKAGES, *_GPU_PACKAGES):
        found = installed(name)
        if found or name in _PACKAGES:
            rows.append((name, found or "missing"))
    if not jax.__version__.startswith(tuple(f"{tested}." for tested in JAX_TESTED)):
        rows.append(("note", f"zerojax is tested with JAX {' and '.join(JAX_TESTED)}"))
    return rows


def _devices() -> Rows:
    devices = str(len(all_devices()))
    rows = [("processes", str(jax.process_count())), ("devices", devices)]
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        facts = [device.platform, device.device_kind]
        if limit := stats.get("bytes_limit"):
            facts.append(f"{limit / 2**30:.0f} GiB")
        if peak := peak_flops(device.device_kind):
            facts.append(f"{peak / 1e12:.0f} TFLOP/s bf16")
        rows.append((str(device.id), ", ".join(facts)))
    fp8 = 'no: matmul_dtype = "fp8" would compute the same numbers on a slow reference path'
    if has_fp8(device := jax.local_devices()[0]):
        fp8 = f"yes, compute capability {device.compute_capability}"
    return [*rows, ("fp8 matmuls", fp8)]


def _kernels() -> Rows:
    lacking = flash_attention.missing()
    packed = "FlashAttention-4" if lacking is None else f"with a mask: FlashAttention-4 needs {lacking}"
    return [*backend_report().items(), ("packed documents", packed)]


def _network(settings: MeshSection) -> Rows:
    """The network between the processes, and the NCCL variables for it."""
    processes, devices = jax.process_count(), jax.devices()
    if processes == 1:
        return [("nodes", "one process: nothing crosses a network")]
    network, chosen = nccl.settings_here(processes, len(devices), settings.local)
    rate = "rate not known" if network.rate is None else f"{8 * network.rate / 1e9:g} Gb/s"
    by_whom = "set by zerojax" if on_gpus(devices) else "not set here, without GPUs"
    rows = [("interface", f"{network.interface}, {rate}"), ("NCCL uses", network.rdma or "TCP sockets")]
    for setting in chosen:
        value = "left alone" if setting.value is None else f"{setting.value} ({by_whom})"
        rows.append((setting.name, f"{value}: {setting.reason}"))
    return [*rows, ("other programs", "; ".join(nccl.exports(chosen)) or "nothing to set")]


def _choice(settings: MeshSection) -> Rows:
    """The mesh, its measured links, and a preset to begin with."""
    try:
        mesh = settings.to_mesh()
    except ConfigurationError as error:
        return [("refused", str(error))]
    found, rates = links.links_of(mesh), links.measure_matmul()
    local = mesh.shape["local"]
    why_mesh = "a node for each process, whose devices share a host and its links"
    if settings.nodes or settings.local:
        why_mesh = "as requested"
    preset, why = links.advise(found["node"], local, min(rates))
    return [
        ("in a node", _link(found["local"], "one device per node")),
        ("between nodes", _link(found["node"], "one node") + _shared(found["node"], local)),
        ("matrix products", _rates(rates)),
        ("mesh", f"{mesh.shape['node']} nodes x {local} devices per node: {why_mesh}"),
        ("preset", f"{preset}: {why}"),
    ]


def _link(link: links.Link | None, absent: str) -> str:
    if link is None:
        return f"{absent}: no link"
    return f"{size(link.bytes_per_second)}/s a device, {link.seconds * 1e6:.0f} us for a few bytes"


def _shared(link: links.Link | None, local: int) -> str:
    return "" if link is None or local == 1 else f"; {size(link.bytes_per_second * local)}/s a node"


def _rates(rates: list[float]) -> str:
    """The speed of the processes' first devices, and which processes are slow."""
    text = f"{max(rates) / 1e12:.3g} TFLOP/s"
    slow = [f"rank {i} {rate / 1e12:.3g}" for i, rate in enumerate(rates) if rate < 0.8 * max(rates)]
    return text + (f"; slower, and all wait for the slowest: {', '.join(slow)}" if slow else "")


def _host(runs: Path) -> Rows:
    places = (runs.absolute(), *runs.absolute().parents)
    place = next(path for path in places if os.access(path, os.F_OK))
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(place)
    rows = [
        ("processors", str(psutil.cpu_count())),
        ("memory", f"{free_host_memory() / 2**30:.0f} of {memory.total / 2**30:.0f} GiB free"),
        ("disk", f"{disk.free / 2**30:.0f} of {disk.total / 2**30:.0f} GiB free for {runs}"),
    ]
    rows.append(("compiled programs", compilation_cache.describe()))
    if on_gpus(jax.devices()):
        rows.append(("page-locked", f"at most {host_limit() / 2**30:.0f} GiB a GPU ({LIMIT})"))
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"zerojax")
            file.flush()
        rows.append(("permissions", f"{runs} can be written to"))
    except OSError as error:
        rows.append(("permissions", f"{runs} cannot be written to ({place}: {error.strerror})"))
    return rows
