"""The choice of an implementation: for the platform that a program is lowered for, and for its chip."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module, metadata, util
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib import gpu_triton

from pallas_kernels import reference
from pallas_kernels.formats import AnyArray
from pallas_kernels.lowered import lowered

PALLAS_FIRST = (
    "encode",
    "encode_reordered",
    "grouped_rows",
    "grouped_rows_fp8",
    "grouped_sums",
    "grouped_sums_fp8",
)
"""Functions with faster kernels in Pallas than in Triton, wherever Pallas has a kernel (docs/kernels.md)."""

FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
"""The dtypes of fp8 matmuls."""

_KINDS = {
    **{"A100": 80, "A10": 86, "A40": 86, "L4": 89, "L40S": 89},
    **{"H100": 90, "H200": 90, "H800": 90, "GH200": 90, "B200": 100, "5090": 120},
}
"""Ten times the compute capability by the last word of a GPU's name."""
_DEFAULT = 90

_platform: ContextVar[str | None] = ContextVar("platform", default=None)


@contextmanager
def for_platform(name: str | None) -> Generator[None]:
    """Within this context programs are traced for one platform, "cpu" or "cuda", or for any (None).

    Tracing is then faster, because only that platform's implementations are traced.
    """
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)


def dispatch(
    name: str, *arrays: AnyArray | None, specification: ModuleType = reference, **static: Any
) -> Any:
    """Call the implementation of ``name`` for the platform that the program is lowered for.

    JAX lowers no other one. Within ``for_platform`` it traces no other one.

    Args:
        name: a public function of ``pallas_kernels``.
        arrays: its array arguments, or None for absent ones.
        specification: the module with the reference implementation.
        static: its other arguments, which are hashable.
    """
    settings, platform = tuple(sorted(static.items())), _platform.get()
    capability = 0 if platform == "cpu" else compute_capability()
    return _implementation(name, specification, settings, platform, capability)(*arrays)


@cache
def _implementation(
    name: str,
    specification: ModuleType,
    settings: tuple[tuple[str, Any], ...],
    platform: str | None,
    capability: int,
) -> Callable[..., Any]:
    """The compiled function from arrays to the results of ``name``; other chips may have other kernels."""
    static = dict(settings)
    default = partial(by_specification, name, specification, **static)

    def run(*arrays: jax.Array | None) -> Any:
        if platform == "cpu" or not cuda_kernels(name):
            return default(*arrays)
        kernel = on_cuda(name, specification)
        if platform == "cuda":
            return lowered(name, kernel, static, arrays, capability)(*arrays)
        branches: dict[str, Callable[..., Any]] = {"cuda": partial(kernel, **static), "default": default}
        return lax.platform_dependent(*arrays, **branches)

    run.__name__ = name
    return jax.jit(run)


def by_specification(name: str, specification: ModuleType, *arrays: jax.Array | None, **static: Any) -> Any:
    """Run the reference implementation of the public function ``name``."""
    # The caller's setting for ranks is meant for the caller's own code.
    with jax.numpy_rank_promotion("allow"):
        return getattr(specification, name)(*arrays, **static)


def on_cuda(name: str, specification: ModuleType = reference) -> Callable[..., Any]:
    """The public function ``name`` on CUDA: by the first kernel that supports the arguments.

    If there is none, XLA compiles the specification.
    """

    def run(*arrays: jax.Array | None, **static: Any) -> Any:
        for kernel in cuda_kernels(name):
            if (found := kernel(*arrays, **static)) is not None:
                return found
        return by_specification(name, specification, *arrays, **static)

    return run


def cuda_kernels(name: str) -> list[Callable[..., Any]]:
    """The CUDA implementations of the public function ``name``, in the order in which they are tried.

    They have the arguments of the specification, and return None if they do not support them.
    """
    modules = [module for module in (_pallas_module(), _triton_module()) if module is not None]
    found = [getattr(module, name) for module in modules if hasattr(module, name)]
    others = [import_module("pallas_kernels.composed")] if modules else []
    first = found if name in PALLAS_FIRST else found[-1:]
    return first + [getattr(module, name) for module in others if hasattr(module, name)]


@cache
def _triton_module() -> ModuleType | None:
    """The module of Triton kernels, or None if they cannot be lowered."""
    if util.find_spec("jax_triton") is None or util.find_spec("triton") is None or not _has_plugin():
        return None
    return import_module("pallas_kernels.triton.calls")


def _pallas_module() -> ModuleType | None:
    """The module of Pallas kernels, or None before Hopper."""
    if compute_capability() < 90 or not _has_plugin():
        return None
    return import_module("pallas_kernels.mosaic.calls")


def _has_plugin() -> bool:
    """Whether JAX found its CUDA plugin at start-up. It lowers kernels and contains their runtime."""
    return hasattr(gpu_triton, "TritonKernel")


def compute_capability() -> int:
    """Ten times the compute capability, such as 90 for an H100.

    It describes a GPU of this process. A process without GPUs, such as one that compiles for a cluster, takes
    the abstract device in context, or else Hopper.
    """
    try:
        gpu: Any = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        kind = abstract.device_kind if abstract is not None else ""
        return _KINDS.get(kind.split(" ")[-1], _DEFAULT)
    major, minor = gpu.compute_capability.split(".")  # only devices of GPU clients have it
    return 10 * int(major) + int(minor)


def backend_report() -> dict[str, str]:
    """For each platform, "cpu" and "cuda", a sentence about the implementation that runs there."""
    reference = "jax.numpy reference, compiled by XLA"
    pallas = (
        "int8, int4 and fp8, neither stochastic nor rotated nor summed, by Pallas kernels through Mosaic GPU"
    )
    if compute_capability() == 90:
        pallas += "; also grouped matmuls with sides that are multiples of 64 in bf16 and of 128 in fp8"
    if _triton_module() is None:
        missing = "the Triton kernels need jax-triton and JAX's CUDA plugin"
        rest = f"{reference} ({missing})"
        return {"cpu": reference, "cuda": rest if _pallas_module() is None else f"{pallas}; else the {rest}"}
    versions = " and ".join(f"{name} {metadata.version(name)}" for name in ("jax-triton", "triton"))
    chip = compute_capability()
    report = f"Triton kernels through {versions}, for compute capability {chip / 10}"
    if chip < 89:
        report += "; fp8 by the reference, because this chip has no instructions for it"
    report += (
        "; the reference also computes plain formats, fp16 arrays, rows of 2**31 elements or more, and sums "
        "over more than 64 peers"
    )
    if _pallas_module() is not None:
        report += f"; encoding to {pallas}"
    return {"cpu": reference, "cuda": report}
