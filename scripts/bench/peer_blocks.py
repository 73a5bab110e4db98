"""Common parts of the PyTorch peers of scripts/bench/train.py: the model, the options, timing, the table.

The model is zerojax's stack: the same blocks, initial distributions, data and loss. Its random numbers are
PyTorch's, so after the same steps a peer's loss agrees with ours statistically, not bit for bit.
"""

# PyTorch is not a dependency of zerojax.
import argparse
import faulthandler
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rows import LINEAR, Row, Sizes, add_model_options, document_ends, line, sent_so_far, speed_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

STALL_SECONDS = 120
_BEGUN = time.perf_counter()

RopeTable = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """A model ready to train.

    Attributes:
        step: trains on one batch and returns its loss on this rank, without waiting for it.
        grad_norm: the global norm of the last step's gradients; all ranks call it.
        parameters: of the whole model.
        frozen: whether only adapters are trained.
        sharing: how many ranks share a row.
        close: frees what would outlive the last reference to the model.
    """

    name: str
    micro_batches: int
    step: Callable[[], torch.Tensor]
    grad_norm: Callable[[], float]
    parameters: int
    frozen: bool = False
    sharing: int = 1
    close: Callable[[], None] = lambda: None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of (batch, heads, time, dim), with as many heads of keys or fewer."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])


def attend_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, ends: torch.Tensor) -> torch.Tensor:
    """Causal attention within documents of one row, (1, heads, time, dim); ``ends`` begins with 0."""
    from torch.nn.attention.varlen import varlen_attn

    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    longest = q.shape[0]
    out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
    assert isinstance(out, torch.Tensor)
    return out.transpose(0, 1)[None]


class LinearAttention(nn.Module):
    """flash-linear-attention's Gated DeltaNet with Qwen3.5's heads, outside of compiled code.

    On Hopper fla 0.6 refuses its backward pass with Triton 3.4 to 3.7, which compiles it to wrong results
    (its issue 640). Here it runs nevertheless, for its time only. Triton tunes at most four configurations of
    each of its kernels.
    """

    def __init__(self, sizes: Sizes, ends: torch.Tensor | None):
        """Draw the weights."""
        super().__init__()
        tune_less(4)
        keys, values = LINEAR.heads(sizes.d_model)
        self.ends = ends
        self.layer = import_gated_delta_net()(
            sizes.d_model, expand_v=1, head_dim=LINEAR.width, num_heads=keys, num_v_heads=values
        )

    @torch.compiler.disable
    def forward(self, x: torch.Tensor, rope: RopeTable | None) -> torch.Tensor:
        """Activations (batch, time, d) in and out."""
        return self.layer(x, cu_seqlens=self.ends)[0]


def prepare_fla() -> None:
    """Let fla do without transformers, and its backward pass not look at Triton's version.

    Models of fla need transformers, which some images lack or cannot import.
    """
    sys.modules.setdefault("transformers", None)  # pyrefly: ignore[no-matching-overload]
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True


def import_gated_delta_net() -> Any:
    """fla's layer, without the others."""
    prepare_fla()
    import fla

    layers = ModuleType("fla.layers")
    layers.__path__ = [f"{path}/layers" for path in fla.__path__]
    sys.modules.setdefault("fla.layers", layers)
    return importlib.import_module("fla.layers.gated_deltanet").GatedDeltaNet


def tune_less(most: int) -> None:
    """Make Triton's autotuner try at most so many configurations, of four warps if there are such."""
    from triton.runtime.autotuner import Autotuner

    if hasattr(Autotuner, "original"):
        return
    original = Autotuner.__init__
    setattr(Autotuner, "original", original)  # noqa: B010  (a class without the attribute)

    def init(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **keywords: Any) -> None:
        some = [one for one in configs or () if one.num_warps == 4] or configs
        original(self, fn, arg_names, some and some[:: -(-len(some) // most)], *args, **keywords)

    Autotuner.__init__ = init


class Attention(nn.Module):
    """Causal self-attention, one matmul for queries, keys and values."""

    def __init__(self, sizes: Sizes):
        """Draw the weights."""
        super().__init__()
        d, self.sizes, self.attend = sizes.d_model, sizes, attend
        self.width = width = sizes.head_width
        self.qkv = nn.Linear(d, (sizes.heads + 2 * sizes.kv_heads) * width, bias=False)
        self.out = nn.Linear(sizes.heads * width, d, bias=False)
        self.gate = nn.Linear(d, sizes.heads * width, bias=False) if sizes.linear else None
        self.query_norm, self.key_norm = (
            nn.RMSNorm(width, eps=1e-5) if sizes.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: torch.Tensor, rope: RopeTable | None) -> torch.Tensor:
        """Activations (batch, time, d) in and out."""
        heads, kv = self.sizes.heads, self.sizes.kv_heads
        qkv = self.qkv(x).view(*x.shape[:2], heads + 2 * kv, self.width)
        q, k, v = qkv.split((heads, kv, kv), dim=2)
        q, k, v = (part.transpose(1, 2) for part in (self.query_norm(q), self.key_norm(k), v))
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        out = self.attend(q, k, v).transpose(1, 2).reshape(*x.shape[:2], heads * self.width)
        return self.out(out if self.gate is None else out * self.gate(x).sigmoid())


class GeluMLP(nn.Module):
    """GPT-2's feed-forward network."""

    def __init__(self, d: int, ffn: int):
        """Draw the weights."""
        super().__init__()
        self.up = nn.Linear(d, ffn, bias=False)
        self.down = nn.Linear(ffn, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up, tanh GELU, down."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwigluMLP(GeluMLP):
    """LLaMA's feed-forward network."""

    def __init__(self, d: int, ffn: int):
        """Draw the weights."""
        super().__init__(d, ffn)
        self.gate = nn.Linear(d, ffn, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up, gated, down."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ToRows(torch.autograd.Function):
    """The token of each row. A token's gradient is the sum of its rows' gradients, which are gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Tokens (tokens, d), the token of each row (rows), and the rows of each token (tokens, k)."""
        ctx.save_for_backward(places)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, of_rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of the tokens."""
        (places,) = ctx.saved_tensors
        return of_rows[places].sum(1, dtype=torch.float32).type_as(of_rows), None, None


class ToAssignments(torch.autograd.Function):
    """Rows in the order of assignments, (tokens, k, d); the gradient goes back by a gather."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Rows (rows, d), the assignment of each (rows), and the row of each assignment (tokens, k)."""
        ctx.save_for_backward(order)
        return rows[places]

    @staticmethod
    def backward(ctx: Any, of_assignments: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of the rows."""
        (order,) = ctx.saved_tensors
        return of_assignments.flatten(0, 1)[order], None, None


class Experts(nn.Module):
    """Qwen3-MoE's router and experts, without losses of the router.

    Rows are sorted by expert and multiplied by ``grouped_mm``, as transformers' "grouped_mm" experts are,
    with its layout of weights. The order is taken as torchtitan does, by an index whose gradient adds up
    (plain), or by gathers in both directions (gathers).
    """

    def __init__(self, sizes: Sizes, *, gathers: bool):
        """Allocate the weights."""
        super().__init__()
        d, f, self.per_token, self.gathers = sizes.d_model, sizes.ffn, sizes.per_token, gathers
        self.router = nn.Linear(d, sizes.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(sizes.experts, 2 * f, d))
        self.down = nn.Parameter(torch.empty(sizes.experts, d, f))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations (batch, time, d) in and out."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1, dtype=torch.float32)
        weights, experts = scores.topk(self.per_token)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen, order = experts.flatten().sort(stable=True)
        # PyTorch counts integers on GPUs only.
        numbers = chosen if x.is_cuda else chosen.float()
        count = self.router.out_features
        ends = numbers.histc(count, 0, count - 1).cumsum(0, dtype=torch.int32)
        if self.gathers:
            places = torch.empty_like(order)
            places[order] = torch.arange(len(order), device=x.device)
            places = places.view(experts.shape)
            rows = ToRows.apply(tokens, order // self.per_token, places)
            out = ToAssignments.apply(self.mlp(rows, ends), order, places)
        else:
            rows = self.mlp(tokens[order // self.per_token], ends)
            unsorted = torch.zeros_like(rows)
            unsorted[order] = rows
            out = unsorted.view(*experts.shape, -1)
        return (out * weights[..., None]).sum(1).type_as(x).view(x.shape)

    def mlp(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The experts of rows that are sorted by expert; ends is the row after the last of each."""
        gate, up = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)


class Block(nn.Module):
    """A pre-norm block of zerojax.models without biases: GPT-2's, LLaMA's, Qwen3-MoE's, or Qwen3.5's.

    ``linear`` blocks have linear attention; ``ends`` are a row's packed documents (``attend_packed``).
    """

    def __init__(self, sizes: Sizes, *, layers: int, gathers: bool, linear: bool, ends: torch.Tensor | None):
        """Initialise the weights: normal, narrower for projections into the residual stream."""
        super().__init__()
        d = sizes.d_model
        norm = (
            partial(nn.RMSNorm, d, eps=1e-5) if sizes.rms else partial(nn.LayerNorm, d, eps=1e-5, bias=False)
        )
        self.norm_attention = norm()
        self.attention = LinearAttention(sizes, ends) if linear else Attention(sizes)
        if ends is not None and not linear:
            self.attention.attend = torch.compiler.disable(partial(attend_packed, ends=ends))
        self.norm_mlp = norm()
        if sizes.experts:
            self.mlp: nn.Module = Experts(sizes, gathers=gathers)
        else:
            self.mlp = SwigluMLP(d, sizes.ffn) if sizes.rms else GeluMLP(d, sizes.ffn)
        for name, weight in self.named_parameters():
            if weight.ndim > 1 and "conv1d" not in name:
                residual = name.startswith(("attention.out", "attention.layer.o_proj", "mlp.down"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, x: torch.Tensor, rope: RopeTable | None) -> torch.Tensor:
        """Activations (batch, time, d) in and out."""
        x = x + self.attention(self.norm_attention(x), rope)
        return x + self.mlp(self.norm_mlp(x))


class BlockStack(nn.Module):
    """The model: blocks only."""

    def __init__(self, blocks: list[nn.Module], rope: RopeTable | None):
        """Take the blocks, wrapped as a peer wraps them."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        # No buffer: those follow the model into bf16.
        self.rope = rope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations in, activations out."""
        for block in self.blocks:
            x = block(x, self.rope)
        return x


def rotate(x: torch.Tensor, rope: RopeTable) -> torch.Tensor:
    """Rotate pairs (x[i], x[i + n]) of (batch, heads, time, dim) by their position's angle, in fp32.

    The table has n angles; elements from 2n on stay.
    """
    cos, sin = rope
    low, high, rest = x.float().split((n := cos.shape[1], n, x.shape[-1] - 2 * n), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).type_as(x)


def make_rope(options: argparse.Namespace, device: torch.device) -> RopeTable | None:
    """The cosines and sines of a head of 128, (time, 64) in fp32; None for GPT-2's blocks.

    Qwen3.5 rotates 64 of 256 elements.
    """
    if not (sizes := Sizes.of(options)).rms:
        return None
    width = sizes.head_width // 4 if sizes.linear else sizes.head_width
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(options.seq, device=device), frequencies)
    return angles.cos(), angles.sin()


def make_block(
    options: argparse.Namespace, device: torch.device, number: int = 0, *, gathers: bool = False
) -> Block:
    """Block ``number`` on the device, in fp32; for gathers see ``Experts``."""
    sizes, ends = Sizes.of(options), None
    with device:
        if options.documents > 1:
            ends = torch.tensor([0, *document_ends(options)], dtype=torch.int32)
        linear = sizes.linear and number % 4 != 3
        return Block(sizes, layers=options.layers, gathers=gathers, linear=linear, ends=ends)


def make_batch(
    options: argparse.Namespace,
    device: torch.device,
    micro_batches: int,
    dtype: torch.dtype,
    *,
    shared: bool = False,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random activations and targets of this rank, or shared by all, a pair for each micro-batch."""
    generator = torch.Generator(device).manual_seed(1 if shared else 1 + dist.get_rank())
    shape = (options.sequences, options.seq, options.d_model)
    draw = partial(torch.randn, shape, generator=generator, device=device)
    return [(draw().to(dtype), draw().to(dtype)) for _ in range(micro_batches)]


def loss_fn(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean square distance to the target, in fp32."""
    return F.mse_loss(out.float(), target.float())


def make_parser(description: str, peers: list[str], default: list[str]) -> argparse.ArgumentParser:
    """The options of every peer, named as in scripts/bench/train.py."""
    parser = harness.parser(description)
    add_model_options(parser)
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block's activations")
    parser.add_argument("--attention", choices=("cudnn", "flash"), default="cudnn", help="its kernel")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=3,
        help="untimed steps: the first once, the others again at each of --rates",
    )
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument(
        "--ahead", action="store_true", help="as in train.py: begin a step before the one before it has ended"
    )
    parser.add_argument("--peers", nargs="+", choices=peers, default=default)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line."""
    options = parser.parse_args()
    if options.warm_up < 1:
        parser.error("--warm-up must be at least 1: the first step compiles")
    return options


def pick_device(options: argparse.Namespace) -> torch.device:
    """This rank's device, made the current one."""
    # Compilers' caches name their files by process id, and emulated nodes have the same ids.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"/tmp/inductor-{os.environ.get('GROUP_RANK', 0)}")
    if options.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def say(message: str) -> None:
    """Print progress on rank 0; after a long silence, stacks are dumped."""
    if os.environ.get("RANK", "0") == "0":
        faulthandler.dump_traceback_later(STALL_SECONDS)
        print(f"[{time.perf_counter() - _BEGUN:6.1f} s] {message}", file=sys.stderr, flush=True)


def measure_all(
    options: argparse.Namespace, device: torch.device, build: Callable[..., Peer], peers: dict[str, Any]
) -> None:
    """Build, warm up and time each of --peers; print its line and rewrite the JSON after each.

    At the end the process group is destroyed.

    Args:
        options: of the command line.
        device: of this rank.
        build: makes a peer of its name, ``options``, ``device`` and its own keywords.
        peers: those keywords, by name.
    """
    rows: list[Row] = []
    first = SDPBackend.CUDNN_ATTENTION if options.attention == "cudnn" else SDPBackend.FLASH_ATTENTION
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([first, *others], set_priority=True):
        for name in options.peers:
            say(f"{name}: building")
            forget(device)
            for row in measure(build(name, options, device, **peers[name]), options, device):
                rows.append(row)
                if dist.get_rank() == 0:
                    print(line(row), flush=True)
                    harness.write(options.json, rows)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()  # rank 0 still prints; a rank that leaves early closes its connections
    dist.destroy_process_group()


def forget(device: torch.device) -> None:
    """Free the memory of the last peer (modules and their hooks are cycles) and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(peer: Peer, options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Time one peer's steps with each rate of the links."""
    say(f"{peer.name}: {peer.parameters / 1e6:.1f}M parameters; first step, compiling")
    world = dist.get_world_size()
    tokens = world // peer.sharing * peer.micro_batches * options.sequences * options.seq
    flops = Sizes.of(options).flops_per_token(options.layers, options.seq, frozen=peer.frozen)
    compile_seconds, _ = _timed(peer, device, "first step")
    for rate in options.rates:
        _limit_links(rate)
        for number in range(1, options.warm_up):
            _timed(peer, device, f"untimed step {number}")
        before = _sent()
        if options.ahead:
            timed = _timed_ahead(peer, options.steps)
        else:
            timed = [_timed(peer, device, f"step {number + 1}") for number in range(options.steps)]
        after = _sent()
        # Read before the gradient's norm allocates anything.
        held = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        yield Row(
            variant=peer.name,
            micro_batches=peer.micro_batches,
            rate=rate,
            **vars(speed_of([elapsed for elapsed, _ in timed], tokens, flops, world, options.peak_tflops)),
            sent_per_node=None if before is None or after is None else (after - before) / options.steps,
            peak_gib=held,
            loss=_mean_over_ranks(timed[-1][1]),
            grad_norm=peer.grad_norm(),
            compile_seconds=compile_seconds,
        )
    peer.close()


def _limit_links(rate: str | None) -> None:
    """Set the rate of every node's link."""
    if rate is not None:
        from zerojax.testing.emulated_cluster.network import limit_link

        dist.barrier()
        if os.environ["LOCAL_RANK"] == "0":
            limit_link(rate)
        dist.barrier()


def _timed(peer: Peer, device: torch.device, what: str) -> tuple[float, torch.Tensor]:
    """Seconds that a step took, and its loss."""
    begun = time.perf_counter()
    loss = peer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - begun
    say(f"{peer.name}: {what} took {elapsed:.3f} s")
    return elapsed, loss


def _timed_ahead(peer: Peer, steps: int) -> list[tuple[float, torch.Tensor]]:
    """For each step the seconds between the end of the one before and its own, and its loss."""
    losses, ends = list[torch.Tensor](), list[torch.cuda.Event]()
    for _ in range(steps + 1):
        losses.append(peer.step())
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        ends[-2 if len(ends) > 1 else -1].synchronize()
    torch.cuda.synchronize()
    seconds = [begun.elapsed_time(ended) / 1e3 for begun, ended in pairwise(ends)]
    return [*zip(seconds, losses[1:], strict=True)]


def _sent() -> int | None:
    return sent_so_far() if dist.get_rank() == 0 else None


def _mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
