#!/usr/bin/env python3
"""PyTorch's sharded training of the block stack that scripts/bench_train.py times.

    torchrun --nproc-per-node 8 scripts/bench_peers.py --local 8 --sequences 4 --peers fsdp2
    scripts/emulate_cluster.py --nodes 2 --gpus-per-node 4 --rate 10gbit -- \\
        sh -c 'torchrun --nnodes 2 --nproc-per-node 4 --node-rank $NODE_RANK \\
            --master-addr $MASTER_ADDR --master-port $MASTER_PORT \\
            scripts/bench_peers.py --local 4 --peers fsdp2 hsdp'

Settings are the documented best: blocks compiled, bf16 parameters and reductions over fp32 masters,
fused AdamW, prefetch as FSDP2 does by itself. Where memory allows there is no activation checkpointing.
"""

# pyright: reportMissingImports=false
# PyTorch is not a dependency: whoever compares has it.
import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

PEERS = {"fsdp2": {}, "hsdp": {"hsdp": True}, "hsdp-x8": {"hsdp": True, "accumulate": 8}}


class Block(nn.Module):
    """The pre-norm GPT block of zerojax.models, without biases."""

    def __init__(self, d: int, heads: int):
        """Draw the weights."""
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(d, bias=False)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.norm_mlp = nn.LayerNorm(d, bias=False)
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations (batch, time, d) in and out."""
        batch, length, d = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, d // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


def main() -> None:
    """Time each peer and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--local", type=int, required=True, help="devices of a node")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--d-model", type=int, default=2048)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch on one device")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block's activations")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["fsdp2", "hsdp"])
    parser.add_argument("--peak-tflops", type=float)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for peer in options.peers:
        measure(peer, options, **PEERS[peer])
    dist.destroy_process_group()


def measure(peer: str, options: argparse.Namespace, *, hsdp: bool = False, accumulate: int = 1) -> None:
    """Build, compile and time one peer."""
    world = dist.get_world_size()
    shape = (world // options.local, options.local) if hsdp else (world,)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("node", "local")[-len(shape) :])
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    blocks = []
    for _ in range(options.layers):
        block = Block(options.d_model, options.d_model // 128).cuda()
        if options.checkpoint:
            block = checkpoint_wrapper(block)
        block.compile()
        blocks.append(fully_shard(block, mesh=mesh, mp_policy=policy))
    model = nn.Sequential(*blocks)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, fused=True)
    batch = (options.sequences, options.seq, options.d_model)
    x, y = (torch.randn(batch, device="cuda", dtype=torch.bfloat16) for _ in "xy")

    def step() -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for micro in range(accumulate):
            last = micro == accumulate - 1
            # HSDP at its best: the sum over nodes waits for the last micro-batch.
            model.set_requires_all_reduce(last)
            loss = F.mse_loss(model(x).float(), y.float()) / accumulate
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    begun = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    warm = time.perf_counter() - begun
    seconds, loss = [], torch.zeros(())
    for _ in range(options.steps):
        begun = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        tokens = world * accumulate * options.sequences * options.seq
        median = statistics.median(seconds)
        parameters = 12 * options.layers * options.d_model**2
        flops = tokens * (6 * parameters + 6 * options.layers * options.d_model * options.seq)
        mfu = (
            f"{flops / median / (options.peak_tflops * 1e12 * world):6.1%}"
            if options.peak_tflops
            else "     -"
        )
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"{peer:12}{1e3 * median:9.1f} ms ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})"
            f"{tokens / median / 1e3:9.1f} ktok/s  MFU {mfu}  peak {peak:6.1f} GiB  loss {loss.item():.5f}"
            f"  warm-up {warm:.1f} s",
            flush=True,
        )
    del model, optimizer, blocks
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
