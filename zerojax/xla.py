"""What the GPU compiler is told, per function and never through the environment.

Each option is here for a reason that ``docs/benchmarks.md`` gives figures for.
"""

from typing import Any

from jax.sharding import Mesh

GPU_OPTIONS: dict[str, Any] = {
    # Runs collectives beside compute; without it every start is followed by its done.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Costs of collectives from the chip's bandwidth: the default guess is too low, so that gathers start
    # too late to be hidden.
    "xla_gpu_enable_analytical_sol_latency_estimator": True,
    # The pipeline carries one layer's weights from iteration to iteration. Two buffers that take turns
    # save a copy of each layer, forward and backward.
    "xla_gpu_enable_while_loop_double_buffering": True,
    # What a loop stacks, layer by layer, starts as memory that nobody has written, for every slot will be.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
    # One collective per unit and hop, in buffers of their own: fewer launches, and nothing is joined.
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 30,
}


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """The options for programs on a mesh: those for GPUs, or none."""
    platforms = {device.platform for device in mesh.devices.flat}
    return dict(GPU_OPTIONS) if platforms & {"gpu", "cuda"} else {}
