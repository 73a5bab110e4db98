"""Options for XLA's GPU compiler, set per function and never through the environment.

``docs/benchmark-notes.md`` has the measurements behind each of them.
"""

from jax.sharding import Mesh

from zerojax.sharding.mesh import on_gpus

CompilerOptions = dict[str, bool | int | str]
"""XLA's options by name, as ``jax.jit`` takes them."""
_ASYNC_SLICES = "dynamic-slice-copy-fusion-async-wrapper"
"""A pass of XLA that makes copies of slices within the device asynchronous. Beside a loop that has some, such
as a layer's over micro-batches or tiles, the scheduler runs no collective and no copy from or to the host."""
GPU_OPTIONS: CompilerOptions = {
    # Overlaps collectives with compute; without it every start is followed at once by its done.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Hops start as soon as their operands are ready, all of a layer's at once (zero3's backward pass on
    # several nodes has twelve). They are awaited where their result is read: `prefetch_scan` puts a layer's
    # compute between the two. The scheduler's estimates do not include the network. By them it puts most
    # hops between nodes behind all compute, and each hop within a node over a single matmul.
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 16,
    # Only heads of rows that devices share are permuted (`zerojax.models.shared_rows`), and attention needs
    # them at once. Beside compute they would queue behind the hops between nodes, and the scheduler would
    # await those in the middle of a layer to have something to do.
    "xla_gpu_disable_async_collectives": "COLLECTIVEPERMUTE",
    # Estimates collectives' costs from the chip's bandwidth, which the default guess underestimates.
    "xla_gpu_enable_analytical_sol_latency_estimator": True,
    # The scan carries one layer's weights from iteration to iteration. Alternating between two buffers
    # saves a copy of each layer, forward and backward.
    "xla_gpu_enable_while_loop_double_buffering": True,
    # Stacks that a loop fills layer by layer start uninitialised, since every slot is written.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
    # Matmuls by cuBLAS. Timed alone for a moment, as the compiler does, Triton's are as fast; in a step,
    # where the chip's power is the limit, they take up to 2% longer. Without them, a program compiled for
    # absent GPUs (`zerojax.analysis.aot`) is also the one that runs.
    "xla_gpu_enable_triton_gemm": False,
    # One collective per unit and hop, on separate buffers: fewer launches, and nothing is joined.
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 30,
    "xla_disable_hlo_passes": _ASYNC_SLICES,
}
ONE_PROCESS_OPTIONS: CompilerOptions = {
    # All-to-alls by copy engines instead of NCCL's kernels, which take multiprocessors from the matmuls. For
    # one process only, where it has been seen to work.
    "xla_gpu_use_memcpy_local_p2p": True,
}
SEPARATE_PRODUCTS: CompilerOptions = {
    # Small products that read the same array (a layer's queries, keys and values) are not merged. In fp8 the
    # merged product would be in bf16, of decoded weights; and where tokens are made, its weights are joined
    # first, a copy for every token.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
KEPT_PRODUCTS: CompilerOptions = {
    # A loop stacks the result of a product for the backward pass, and the layer reads it as well. XLA would
    # then compute it twice: once in a fusion that writes into the stack. Without such fusions, matmuls that
    # read a slice of a stack copy it first.
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
HOST_MEMORY: CompilerOptions = {
    # No CUDA graphs: in a graph copies from and to host memory do not run beside kernels.
    "xla_gpu_graph_min_graph_size": 1 << 30,
    # XLA counts copies outside loops as computations, and runs two at a time by default. The copies of the
    # layers before and after a loop would be awaited one by one, with nothing running beside them.
    "xla_gpu_experimental_parallel_async_compute_limit": 256,
    # XLA's own rematerialisation counts arrays in host memory as the device's. With 32 layers' activations
    # there it computes parts of layers and of the loss a second time, and saves nothing.
    "xla_disable_hlo_passes": f"rematerialization,{_ASYNC_SLICES}",
}
UPDATES_IN_BACKWARD: CompilerOptions = {
    # A turn of such a loop is two layers, and alternates between two buffers as it is. If turns were doubled,
    # an odd one would be outside the loop, where copies of the state are kernels, for which layers wait.
    "xla_gpu_enable_while_loop_double_buffering": False,
}


def compiler_options(
    mesh: Mesh,
    *,
    separate_products: bool = False,
    kept_products: bool = False,
    host_memory: bool = False,
    updates_in_backward: bool = False,
) -> CompilerOptions:
    """The compiler options for programs on a mesh; none unless it has GPUs.

    Args:
        mesh: the mesh.
        separate_products: whether matmuls are in fp8, or the program makes tokens.
        kept_products: whether the backward pass reads results of matmuls.
        host_memory: whether layers are copied from or to host memory.
        updates_in_backward: whether the backward pass updates layers in host memory.
    """
    if not on_gpus(mesh.devices.flat):
        return {}
    more = (SEPARATE_PRODUCTS if separate_products else {}) | (KEPT_PRODUCTS if kept_products else {})
    more |= HOST_MEMORY if host_memory else {}
    more |= UPDATES_IN_BACKWARD if updates_in_backward else {}
    alone = len({device.process_index for device in mesh.devices.flat}) == 1
    return (ONE_PROCESS_OPTIONS if alone else {}) | GPU_OPTIONS | more
