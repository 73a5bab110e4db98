"""What the GPU compiler is told, per function and never through the environment.

Each option is here for a reason that ``docs/benchmark-notes.md`` gives figures for.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh

from zerojax.sharding.mesh import on_gpus

GPU_OPTIONS: dict[str, Any] = {
    # Runs collectives beside compute; without it every start is followed by its done.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Hops start as soon as their operands are there, all of a layer's at once (zero3's backward pass on
    # several nodes has twelve), and are waited for where their result is read: `prefetch_scan` sees to it
    # that a layer's compute lies between the two. Left to its estimates, which know nothing of the network,
    # the scheduler puts most hops between nodes behind all compute, and those within a node beside a single
    # matmul each.
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 16,
    # Costs of collectives from the chip's bandwidth, which the default guess underestimates.
    "xla_gpu_enable_analytical_sol_latency_estimator": True,
    # The scan carries one layer's weights from iteration to iteration. Two buffers that take turns
    # save a copy of each layer, forward and backward.
    "xla_gpu_enable_while_loop_double_buffering": True,
    # What a loop stacks, layer by layer, starts as memory that nobody has written, for every slot will be.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
    # Matmuls by cuBLAS. Timed alone for a moment, as the compiler does, Triton's are as fast; within a step,
    # where the chip's power is the limit, a step with them takes up to 2% longer. And what is compiled for
    # GPUs that are not there (`zerojax.analysis.aot`) is then what runs.
    "xla_gpu_enable_triton_gemm": False,
    # One collective per unit and hop, in buffers of their own: fewer launches, and nothing is joined.
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 30,
}
ONE_PROCESS_OPTIONS: dict[str, Any] = {
    # All-to-alls by copy engines instead of NCCL's kernels, which take multiprocessors from the matmuls. Not
    # for several processes: seen to work in one.
    "xla_gpu_use_memcpy_local_p2p": True,
}


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """The options for programs on a mesh: those for GPUs, or none."""
    if not on_gpus(mesh.devices.flat):
        return {}
    alone = len({device.process_index for device in mesh.devices.flat}) == 1
    return (ONE_PROCESS_OPTIONS if alone else {}) | GPU_OPTIONS


def on_own_stream(wanted: bool) -> AbstractContextManager[Any]:
    """If ``wanted``, collectives made in this context run on a stream of their own.

    On one stream a hop within a node waits for the hop between nodes before it, and the next one between
    nodes for that. XLA knows two domains of wires with a stream each; this names the one that nothing else is
    in.
    """
    if not wanted:
        return nullcontext()
    return set_xla_metadata(collective_communication_domain="scale_up_fabric")
