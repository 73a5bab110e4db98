#!/usr/bin/env python3
"""Time peft's LoRA, and QLoRA on bitsandbytes' nf4, on the block stack of scripts/bench/train.py; one GPU.

    python3 -m torch.distributed.run --nproc-per-node 1 scripts/bench/train_peft.py --llama --layers 32 \\
        --d-model 4096 --ffn 11008 --seq 4096 --sequences 2 --peers lora lora-compiled
    ... --peers qlora --checkpoint

Adapters of rank 16 on every linear layer, in fp32, as peft makes them; the base in bf16, or in nf4 with
double quantization and bf16 compute. Everything runs under autocast to bf16. Without --checkpoint nothing is
recomputed. "compiled": each block by torch.compile.
"""

# PyTorch, peft and bitsandbytes are not dependencies of zerojax.
import argparse
from functools import partial
from typing import Any

import peer_blocks
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from rows import Sizes
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import get_total_norm

PEERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora-compiled": {"compiled": True},
    "qlora": {"nf4": True},
    "qlora-compiled": {"nf4": True, "compiled": True},
}
RANK, ALPHA = 16, 32


def main() -> None:
    """Time each peer and print a line for it."""
    parser = peer_blocks.make_parser(__doc__ or "", list(PEERS), ["lora", "qlora"])
    options = peer_blocks.parse(parser)
    if options.qwen3_moe:
        parser.error("--qwen3-moe: PEFT's adapters are for linear layers")
    device = peer_blocks.pick_device(options)
    dist.init_process_group("gloo")
    peer_blocks.measure_all(options, device, build, PEERS)


def build(
    name: str, options: argparse.Namespace, device: torch.device, *, nf4: bool = False, compiled: bool = False
) -> peer_blocks.Peer:
    """A peer's model with adapters, its optimizer and its step."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(options.layers):
        block: nn.Module = peer_blocks.make_block(options, device).to(torch.bfloat16)
        if nf4:
            quantize(block, device)
        targets = [path for path, module in block.named_modules() if isinstance(module, nn.Linear)]
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
        block = inject_adapter_in_model(config, block)
        for path, weight in block.named_parameters():
            weight.requires_grad_("lora_" in path)
            if "lora_" in path:
                weight.data = weight.data.to(device, torch.float32)
        if options.checkpoint:
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        blocks.append(torch.compile(block) if compiled else block)
    model = peer_blocks.BlockStack(blocks, peer_blocks.make_rope(options, device))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-4, fused=device.type == "cuda")
    ((x, y),) = peer_blocks.make_batch(options, device, 1, torch.bfloat16)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = peer_blocks.loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    weights = options.layers * Sizes.of(options).active_weights  # nf4 packs them into other shapes
    return peer_blocks.Peer(name, 1, step, partial(gradient_norm, trained), weights, frozen=True)


def quantize(block: nn.Module, device: torch.device) -> None:
    """Replace a block's linear layers by bitsandbytes' with nf4 weights, doubly quantized."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                four = Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16,
                    compress_statistics=True, quant_type="nf4",
                )  # fmt: skip
                weight = child.weight.data.cpu()
                four.weight = Params4bit(
                    weight, requires_grad=False, compress_statistics=True, quant_type="nf4"
                )
                setattr(module, name, four.to(device))


def gradient_norm(trained: list[torch.Tensor]) -> float:
    """The norm of the adapters' gradients."""
    return float(get_total_norm([weight.grad for weight in trained if weight.grad is not None]))


if __name__ == "__main__":
    main()
