"""Compile whole programs for a CUDA cluster on a machine that has no GPU.

XLA compiles ahead of time for a *described* cluster: a number of hosts, of GPUs per host, and a GPU model.
The devices that ``topology`` returns go into an ordinary mesh, and

    mesh = zerojax.make_mesh(64, 8, devices=aot.topology(64, 8, gpu="h100"))
    compiled = jax.jit(step).lower(*shapes_with_shardings).compile(dict(aot.COMPILER_OPTIONS))

yields the scheduled GPU program. ``as_text`` shows its collectives with their dtypes, replica groups and
counts, and ``memory_analysis`` its memory. The program cannot be run. JAX's compilation cache cannot load it
either: it warns and compiles again.

The compiler is not part of a CPU installation of JAX. ``scripts/install_cuda_compiler.sh`` installs it
(240 MB to download, 600 MB on disk) in a separate directory, so that ordinary CPU runs never load it. An
installed ``jax[cuda12]`` or ``jax[cuda13]`` serves as well.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from unittest import mock

import jax
from jax.experimental import topologies
from jax.extend.mlir import ir

from zerojax.analysis.plan.work import backward_workspace
from zerojax.compilation_cache import user_folder

#: Options for compiling without a GPU to time kernels on. The autotuner could only guess, and would take half
#: of the compile time. It would choose Triton's split-K matmuls, whose fp32 partial sums inflate the
#: temporary memory. Training steps on GPUs avoid Triton's matmuls, too (``zerojax.comm.xla_options``).
COMPILER_OPTIONS: Mapping[str, bool | int | str] = MappingProxyType(
    {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
)

_CUDNN_VERSION = 91900  # of the descriptions in zerojax/analysis/gpus
_HOPPER = (9, 0)
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


class CompilerMissingError(RuntimeError):
    """The CUDA compiler is not installed."""


def compiler_dir() -> Path:
    """The directory in which ``scripts/install_cuda_compiler.sh`` installs the compiler.

    ``$ZEROJAX_CUDA_COMPILER`` if set, else one per JAX version under the user's cache directory, since
    compiler and JAX must be of the same version.
    """
    if chosen := os.environ.get("ZEROJAX_CUDA_COMPILER"):
        return Path(chosen)
    return user_folder() / f"cuda-compiler-{jax.__version__}"


def gpus() -> tuple[str, ...]:
    """The names of the GPUs that the package can describe, sorted."""
    files = resources.files("zerojax.analysis.gpus").iterdir()
    return tuple(sorted(f.name.removesuffix(".txtpb") for f in files if f.name.endswith(".txtpb")))


def gpu_description(gpu: str | Path) -> str:
    """XLA's description of a GPU, as the text of its ``GpuTargetConfigProto``.

    Args:
        gpu: a name from ``gpus()``, or the path of a description of another GPU. A machine with that GPU
          writes the file ``*.gpu_target_config.pbtxt`` under ``XLA_FLAGS=--xla_dump_to=DIR``.

    Raises:
        ValueError: the name is not known.
        FileNotFoundError: there is no file at the path.
    """
    if isinstance(gpu, Path):
        return gpu.read_text()
    if gpu not in gpus():
        raise ValueError(
            f"unknown gpu={gpu!r}: choose one of {', '.join(gpus())}, or pass the pathlib.Path of another "
            "GPU's gpu_target_config.pbtxt"
        )
    return resources.files("zerojax.analysis.gpus").joinpath(f"{gpu}.txtpb").read_text()


def topology(nodes: int, local: int, gpu: str | Path = "h100") -> list[jax.Device]:
    """Compile-only devices of a cluster of ``nodes`` hosts with ``local`` GPUs each.

    Args:
        nodes: number of hosts, at least 1. The devices of host n have ``process_index == n``.
        local: GPUs per host, at least 1.
        gpu: see ``gpu_description``.

    Returns:
        ``nodes * local`` devices, host by host, the order of a ("node", "local") mesh.

    Raises:
        ValueError: a count below 1 or an unknown GPU.
        CompilerMissingError: the compiler is not installed. The message says how to install it.
    """
    if nodes < 1 or local < 1:
        raise ValueError(f"a cluster must have at least 1 node and 1 GPU, not nodes={nodes}, local={local}")
    description = gpu_description(gpu)
    # Initialise JAX's backends (usually the CPU) before the compiler is registered, so that the compiler
    # cannot become the default backend of a process without GPUs.
    jax.devices()
    request = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        topology=f"1x{nodes}x{local}",  # slices x hosts x GPUs
        target_config=description,
    )
    try:
        return list(request().devices)
    except jax.errors.JaxRuntimeError:
        raise  # from the compiler itself
    except RuntimeError:  # platform "cuda" is not registered yet
        pass
    _register_compiler()
    return list(request().devices)


def _register_compiler() -> None:
    """Load the CUDA plugin into JAX as a compiler, at most once per process."""
    extra = compiler_dir()
    if extra.is_dir() and str(extra) not in sys.path:
        sys.path.append(str(extra))
        importlib.invalidate_caches()
    for name in _PLUGINS:
        try:
            plugin = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        # The plugin checks for cuDNN, cuBLAS and a driver. Compiling needs none of them.
        with mock.patch.dict(os.environ, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
            plugin.initialize()
        return
    raise CompilerMissingError(
        f"no CUDA compiler for JAX {jax.__version__}: found neither {' nor '.join(_PLUGINS)}, nor one in "
        f"{extra}. Run scripts/install_cuda_compiler.sh (Linux; 240 MB), or set ZEROJAX_CUDA_COMPILER to the "
        "directory that holds one"
    )


@contextmanager
def cudnn_assumed() -> Generator[None]:
    """Lower cuDNN's flash attention for described GPUs, Hopper or newer, on a machine without them.

    JAX checks the local machine for cuDNN and a GPU before it lowers the kernel, although the compiled
    program only calls it by name. Within this context the checks pass. Give the model
    ``attention="cudnn"``, because "auto" also checks the local machine.

    With a GPU, XLA asks cuDNN for the size of a kernel's workspace. Here the backward pass gets
    ``zerojax.analysis.plan.work.backward_workspace``.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused
    from jax._src.interpreters import mlir

    replaced = {
        "mlir": SimpleNamespace(**vars(mlir) | {"custom_call": _with_workspace(mlir.custom_call)}),
        "check_cudnn_version": lambda: _CUDNN_VERSION,
        "check_compute_capability": lambda wanted: _version(wanted) <= _HOPPER,
        "is_cuda_compute_capability_equal": lambda wanted: _version(wanted) == _HOPPER,
    }
    with mock.patch.multiple(fused, **replaced):
        yield


def _with_workspace(custom_call: Callable[..., ir.OpView]) -> Callable[..., ir.OpView]:
    """``mlir.custom_call``, but cuDNN's backward attention gets a workspace as its last result."""

    def call(name: str, *, result_types: Sequence[ir.Type], **kwargs: object) -> ir.OpView:
        if name.endswith("Backward"):
            (rows, heads, tokens, width), (_, shared, *_) = (
                ir.RankedTensorType(t).shape for t in result_types[:2]
            )
            size = rows * tokens * backward_workspace(heads, shared, width)
            space = ir.RankedTensorType.get((size,), ir.IntegerType.get_unsigned(8))
            result_types = [*result_types[:-1], space]
        return custom_call(name, result_types=result_types, **kwargs)

    return call


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
