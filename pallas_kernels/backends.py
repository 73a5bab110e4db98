"""The choice of an implementation per platform."""

from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata, util
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib import gpu_triton

from pallas_kernels import reference
from pallas_kernels.chips import compute_capability

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


def _has_plugin() -> bool:
    """Whether JAX found its CUDA plugin at start-up. It lowers kernels and contains their runtime."""
    return hasattr(gpu_triton, "TritonKernel")


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


def cuda_kernels(name: str) -> list[Callable[..., Any]]:
    """The CUDA implementations of the public function ``name``, in the order in which they are tried.

    They have the arguments of the specification, and return None if they do not support them.
    """
    modules = [module for module in (_pallas_module(), _triton_module()) if module is not None]
    found = [getattr(module, name) for module in modules if hasattr(module, name)]
    others = [import_module("pallas_kernels.composed")] if modules else []
    first = found if name in PALLAS_FIRST else found[-1:]
    return first + [getattr(module, name) for module in others if hasattr(module, name)]


def on_cuda(name: str, specification: ModuleType = reference) -> Callable[..., Any]:
    """The public function ``name`` on CUDA: by the first kernel that supports the arguments.

    If there is none, XLA compiles the specification.
    """

    def run(*arrays: jax.Array | None, **static: Any) -> Any:
        for kernel in cuda_kernels(name):
            if (found := kernel(*arrays, **static)) is not None:
                return found
        return by_specification(name, specification)(*arrays, **static)

    return run


def by_specification(name: str, specification: ModuleType) -> Callable[..., Any]:
    """The reference implementation of the public function ``name``."""

    def run(*arrays: jax.Array | None, **static: Any) -> Any:
        # The caller's setting for ranks is meant for the caller's own code.
        with jax.numpy_rank_promotion("allow"):
            return getattr(specification, name)(*arrays, **static)

    return run


def backend_report() -> dict[str, str]:
    """For each platform, "cpu" and "cuda", a sentence about the implementation that runs there."""
    reference = "jax.numpy reference, compiled by XLA"
    pallas = "int8, int4 and fp8, neither stochastic nor rotated, by Pallas kernels through Mosaic GPU"
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
