#!/usr/bin/env python3
"""Time PyTorch's FSDP2 and HSDP on the block stack of scripts/bench/train.py.

    python3 -m torch.distributed.run --nproc-per-node 8 scripts/bench/train_fsdp2.py \\
        --sequences 4 --peers fsdp2
    zerojax emulate --nodes 2 --gpus-per-node 4 --rate 10gbit -- \\
        sh -c 'python3 -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --node-rank $NODE_RANK \\
            --master-addr $MASTER_ADDR --master-port $MASTER_PORT \\
            scripts/bench/train_fsdp2.py --peers fsdp2 hsdp hsdp-x8'

Settings are the documented best: blocks compiled, bf16 parameters and reductions over fp32 masters,
fused AdamW, FSDP2's default prefetching. Without --checkpoint nothing is recomputed. "fsdp2-fp8" needs
torchao, and gathers weights in fp8 by tensor-wise scales. The peers that end in "-gathers" are for
--qwen3-moe: tokens get to rows and back by gathers in both passes, not by an index whose gradient adds up.
With --qwen3.5 linear attention is flash-linear-attention's layer (``peer_blocks.LinearAttention``).
In "fsdp2-cp" all ranks share each row, by PyTorch's context parallelism: keys and values are gathered,
queries stay. Attention is then outside of the compiled code.
"""

# PyTorch is not a dependency of zerojax.
import argparse
import os
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import peer_blocks
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.utils import get_total_norm

PEERS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "hsdp": {"hsdp": True},
    "hsdp-x8": {"hsdp": True, "micro_batches": 8},
    "fsdp2-gathers": {"gathers": True},
    "hsdp-gathers": {"hsdp": True, "gathers": True},
    "fsdp2-cp": {"shared": True},
    "fsdp2-fp8": {"fp8": True},
}


def main() -> None:
    """Time each peer and print a line for it."""
    options = peer_blocks.parse(peer_blocks.make_parser(__doc__ or "", list(PEERS), ["fsdp2", "hsdp"]))
    device = peer_blocks.pick_device(options)
    peer_blocks.say("connecting")
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    peer_blocks.measure_all(options, device, build, PEERS)


def build(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    *,
    hsdp: bool = False,
    micro_batches: int = 1,
    fp8: bool = False,
    gathers: bool = False,
    shared: bool = False,
) -> peer_blocks.Peer:
    """A peer's sharded model, its optimizer and its step."""
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (world // local, local) if hsdp else (world,)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "local")[-len(shape) :])
    model = shard(options, device, mesh, fp8=fp8, gathers=gathers, shared=shared)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, fused=True)
    batch = peer_blocks.make_batch(options, device, micro_batches, torch.bfloat16, shared=shared)
    sharing = ExitStack()
    if shared:
        set_rotate_method("allgather")
        sharing.enter_context(share(mesh, batch, model.rope))

    def step() -> torch.Tensor:
        # Not after the update: the last step's gradients are measured later.
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for number, (x, y) in enumerate(batch, 1):
            # HSDP at its best: the sum over nodes waits for the last micro-batch.
            model.set_requires_all_reduce(number == micro_batches)
            loss = peer_blocks.loss_fn(model(x), y) / micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        if fp8:
            precompute_scales(model)
        return total

    return peer_blocks.Peer(
        name,
        micro_batches,
        step,
        partial(gradient_norm, model),
        parameters=sum(weight.numel() for weight in model.parameters()),
        sharing=world if shared else 1,
        close=sharing.close,
    )


def share(
    mesh: DeviceMesh, batch: list[tuple[torch.Tensor, torch.Tensor]], rope: peer_blocks.RopeTable | None
) -> AbstractContextManager[None]:
    """Cut rows and the rotary table in place, and attend to all of a row while the context lasts."""
    rows = [x for pair in batch for x in pair]
    table = list(rope or ())
    return context_parallel(
        mesh,
        buffers=[*rows, *table],
        buffer_seq_dims=[1] * len(rows) + [0] * len(table),
        no_restore_buffers={*rows, *table},
    )


def shard(
    options: argparse.Namespace,
    device: torch.device,
    mesh: DeviceMesh,
    *,
    fp8: bool,
    gathers: bool,
    shared: bool,
) -> Any:
    """The stack, each block checkpointed if asked for, compiled, and sharded, in this order.

    So FSDP's hooks stay outside of the compiled code, which has no graph breaks and is shared by all blocks.
    (It is compiled twice: the first block's input needs no gradient.) With shared rows attention exchanges
    keys and values outside of compiled code: each block is compiled around it, then checkpointed.
    """
    torch.manual_seed(0)  # every rank draws all weights and keeps its shards
    # Inputs are bf16 already; a cast would round the table of rotary angles.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, cast_forward_inputs=False)
    blocks = []
    for number in range(options.layers):
        block = peer_blocks.make_block(options, device, number, gathers=gathers)
        if fp8:
            convert(block)
        if shared:
            block.attention.attend = torch.compiler.disable(peer_blocks.attend)
            block = torch.compile(block)
        if options.checkpoint:
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        if not shared:
            block = torch.compile(block, fullgraph=not options.qwen35)
        blocks.append(fully_shard(block, mesh=mesh, mp_policy=policy))
    model = fully_shard(
        peer_blocks.BlockStack(blocks, peer_blocks.make_rope(options, device)), mesh=mesh, mp_policy=policy
    )
    assert isinstance(model, FSDPModule)
    if device.type == "cpu":
        for block in model.blocks:
            block.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return model


def convert(block: torch.nn.Module) -> None:
    """Turn a block's linear layers into torchao's, in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(block, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))


def precompute_scales(model: torch.nn.Module) -> None:
    """All weights' scales in one reduction, as torchao advises after each step."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def gradient_norm(model: torch.nn.Module) -> float:
    """The norm of the gradients that the parameters hold, over all ranks."""
    norm: Any = get_total_norm([weight.grad for weight in model.parameters() if weight.grad is not None])
    return norm.full_tensor().item()


if __name__ == "__main__":
    main()
