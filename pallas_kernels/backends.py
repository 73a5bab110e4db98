"""Which implementation runs where."""

from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata, util

from jaxlib import gpu_triton

from pallas_kernels.chips import compute_capability


@cache
def _triton_module():
    """The module of Triton kernels, or None where they can't be lowered."""
    if util.find_spec("jax_triton") is None or util.find_spec("triton") is None:
        return None
    # jax-triton lowers through JAX's CUDA plugin, which a CPU installation lacks.
    if not hasattr(gpu_triton, "TritonKernel"):
        return None
    return import_module("pallas_kernels.cuda.calls")


def cuda_implementation(name: str) -> Callable | None:
    """The CUDA implementation of the public function `name`; None: XLA compiles the reference."""
    module = _triton_module()
    return None if module is None else getattr(module, name)


def backend_report() -> dict[str, str]:
    """What runs on each platform, in words, for people to read."""
    reference = "jax.numpy reference, compiled by XLA"
    if _triton_module() is None:
        missing = "the kernels need jax-triton, and JAX's CUDA plugin"
        return {"cpu": reference, "cuda": f"{reference} ({missing})"}
    versions = " and ".join(f"{name} {metadata.version(name)}" for name in ("jax-triton", "triton"))
    chip = compute_capability()
    report = f"Triton kernels through {versions}, for compute capability {chip / 10}"
    if chip < 89:
        report += "; fp8 by the reference, which this chip has no instructions for"
    report += (
        "; by the reference also: plain formats, fp16 arrays, rows of 2**31 elements or more, and sums over "
        "more than 64 peers"
    )
    return {"cpu": reference, "cuda": report}
