#!/usr/bin/env python3
"""Time DeepSpeed's ZeRO-3 and ZeRO++ on the block stack of scripts/bench/train.py.

    zerojax emulate --nodes 2 --gpus-per-node 4 --rate 10gbit -- \\
        sh -c 'python3 -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --node-rank $NODE_RANK \\
            --master-addr $MASTER_ADDR --master-port $MASTER_PORT scripts/bench/train_deepspeed.py'

Bucket sizes are DeepSpeed's defaults for ZeRO-3 and its ZeRO++ tutorial's for ZeRO++; overlap_comm is on,
and the optimizer is PyTorch's fused AdamW, which needs no build. ZeRO++'s kernels are compiled at first use,
which needs nvcc, ninja and perhaps CUDA_HOME, and takes minutes without MAX_JOBS=32 TORCH_CUDA_ARCH_LIST=9.0.
On a CPU (DS_ACCELERATOR=cpu, --device cpu) ZeRO++ does not run.

"ds-offload-x8" keeps masters and moments in host memory and updates them there with DeepSpeedCPUAdam, which
is compiled at first use with g++ and ninja. Its 8 micro-batches are summed in bf16, DeepSpeed's default. The
host needs 18 bytes for each parameter, more where PyTorch rounds pinned buffers up to powers of two; with
PYTORCH_CUDA_ALLOC_CONF=pinned_max_round_threshold_mb:1 a PyTorch that knows it does not.
"""

# PyTorch and DeepSpeed are not dependencies of zerojax.
import argparse
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import peer_blocks
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

FusedAdamW = partial(torch.optim.AdamW, fused=True)
ZERO3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
ZERO_PLUS_PLUS = {
    **ZERO3,
    "reduce_bucket_size": 10_000_000,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}
OFFLOAD = {**ZERO3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
PEERS: dict[str, dict[str, Any]] = {
    "ds-zero3": {"zero": ZERO3},
    "ds-zero++": {"zero": ZERO_PLUS_PLUS},
    "ds-offload-x8": {"zero": OFFLOAD, "adamw": DeepSpeedCPUAdam, "micro_batches": 8},
}


def main() -> None:
    """Time each peer and print a line for it."""
    options = peer_blocks.parse(
        peer_blocks.make_parser(__doc__ or "", list(PEERS), ["ds-zero3", "ds-zero++"])
    )
    device = peer_blocks.pick_device(options)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    peer_blocks.say("connecting")
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    if "ds-zero++" in options.peers:
        build_quantizer()
    peer_blocks.measure_all(options, device, build, PEERS)


def build_quantizer() -> None:
    """Compile ZeRO++'s kernels on one rank first, for all."""
    from deepspeed.ops.op_builder import QuantizerBuilder

    peer_blocks.say("compiling DeepSpeed's quantizer")
    if dist.get_rank() == 0:
        QuantizerBuilder().load(verbose=False)
    dist.barrier()
    QuantizerBuilder().load(verbose=False)
    peer_blocks.say("compiled")


def build(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    *,
    zero: dict[str, Any],
    adamw: Callable[..., torch.optim.Optimizer] = FusedAdamW,
    micro_batches: int = 1,
) -> peer_blocks.Peer:
    """A peer's engine and its step."""
    torch.manual_seed(0)
    blocks = [peer_blocks.make_block(options, device).to(torch.bfloat16) for _ in range(options.layers)]
    if options.checkpoint:
        blocks = [checkpoint_wrapper(block, preserve_rng_state=False) for block in blocks]
    model = peer_blocks.BlockStack(blocks, peer_blocks.make_rope(options, device))
    parameters = sum(weight.numel() for weight in model.parameters())
    optimizer = adamw(model.parameters(), lr=1e-4, weight_decay=1e-4)
    config = make_config(options, zero, micro_batches)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = peer_blocks.make_batch(options, device, micro_batches, torch.bfloat16)

    def step() -> torch.Tensor:
        total = torch.zeros((), device=device)
        for x, y in batch:
            loss = peer_blocks.loss_fn(engine(x), y)
            engine.backward(loss)  # divides by the micro-batches
            engine.step()  # updates after the last one
            total += loss.detach() / micro_batches
        return total

    def norm() -> float:
        return float(engine.get_global_grad_norm())

    return peer_blocks.Peer(name, micro_batches, step, norm, parameters, close=engine.destroy)


def make_config(options: argparse.Namespace, zero: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    if "zero_quantized_weights" in zero:
        zero = {**zero, "zero_hpz_partition_size": int(os.environ["LOCAL_WORLD_SIZE"])}
    return {
        "train_micro_batch_size_per_gpu": options.sequences,
        "gradient_accumulation_steps": micro_batches,
        # PyTorch's AdamW may update on the host.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


if __name__ == "__main__":
    main()
