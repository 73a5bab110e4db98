#!/usr/bin/env python3
"""Measure other libraries' block quantizers on this GPU, as scripts/bench/kernels.py does.

    python3 scripts/bench/kernel_peers.py --megabytes 256

Needs PyTorch; measures bitsandbytes, torchao and torch.compile, and reports which of them are not installed.
They use fp32 scales, one per block. GB/s count the bytes that must move once. Calls follow each other without
waiting and rotate among inputs that no cache holds. From 64 MB on Python's launch time hides behind the
previous call; below, it would dominate.
"""

# PyTorch and these libraries are not dependencies of zerojax.
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch

BLOCK = 256
FP8_BLOCK = 128
"""The block size of torchao's kernel."""


@dataclass(frozen=True)
class Case:
    """A function of one or more tensors, how to make these, and the bytes that must move."""

    library: str
    kernel: str
    fmt: str
    run: Callable[..., Any]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    bytes_moved: int


@dataclass(frozen=True)
class Result:
    """A measured case; the spread is relative to the median."""

    library: str
    kernel: str
    fmt: str
    megabytes: int
    gb_per_s: float
    of_copy: float
    spread: float


def numbers(n: int, device: str) -> torch.Tensor:
    """bf16[1, n], normal."""
    return torch.randn(1, n, dtype=torch.bfloat16, device=device)


def bitsandbytes_cases(n: int, device: str) -> list[Case]:
    """8 bits by a table of 256 values, 4 bits by one of 16."""
    from bitsandbytes import functional

    def encode8(x):
        return functional.quantize_blockwise(x, blocksize=BLOCK)

    def encode4(x):
        return functional.quantize_4bit(x, blocksize=BLOCK, quant_type="nf4")

    def add(fmt, encode, decode, width):
        _, state = encode(numbers(n, device))

        def coded():
            codes, scales = encode(numbers(n, device))
            return codes, scales.absmax

        def decode_again(codes, absmax):
            state.absmax = absmax
            return decode(codes, state)

        moved = 2 * n + width + 4 * n // BLOCK
        return [
            Case("bitsandbytes", "encode", fmt, encode, lambda: (numbers(n, device),), moved),
            Case("bitsandbytes", "decode to bfloat16", fmt, decode_again, coded, moved),
        ]

    return [
        *add("8 bits", encode8, functional.dequantize_blockwise, n),
        *add("nf4", encode4, functional.dequantize_4bit, n // 2),
    ]


def torchao_cases(n: int, device: str) -> list[Case]:
    """int8 by its primitives, compiled, and fp8 by its Triton kernel."""
    from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    shape = (1, BLOCK)

    @torch.compile
    def encode(x):
        scale, zero = choose_qparams_affine(x, MappingType.SYMMETRIC, shape, torch.int8, keepdim=True)
        return quantize_affine(x, shape, scale, zero, torch.int8), scale, zero

    @torch.compile
    def decode(codes, scale, zero):
        return dequantize_affine(codes, shape, scale, zero, torch.int8, output_dtype=torch.bfloat16)

    def encode8(x):
        return fp8_blockwise_act_quant(x, FP8_BLOCK)

    def source():
        return (numbers(n, device),)

    # Scales have the dtype of the numbers here, and integers also have zero points.
    moved = 3 * n + 6 * n // BLOCK
    cases = [
        Case("torchao", "encode", "int8", encode, source, moved),
        Case("torchao", "decode to bfloat16", "int8", decode, lambda: encode(*source()), moved),
    ]
    if device == "cuda":  # Triton's
        cases.append(Case("torchao", "encode", "fp8", encode8, source, 3 * n + 4 * n // FP8_BLOCK))
    return cases


def compiled_cases(n: int, device: str) -> list[Case]:
    """torch.compile of plain code for int8: encode, and decode + sum + encode."""

    def encode(x):
        blocks = x.float().view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        return torch.round(blocks / scale).to(torch.int8), scale

    def reduce(codes, scales):
        return encode((codes.float() * scales).sum(0))

    def payload(peers):
        blocks = (peers, 2 * n // peers // BLOCK)
        codes = torch.randint(-127, 128, (*blocks, BLOCK), dtype=torch.int8, device=device)
        return codes, torch.rand(*blocks, 1, device=device)

    moved = 3 * n + 4 * n // BLOCK
    cases = [
        Case("torch.compile", "encode", "int8", torch.compile(encode), lambda: (numbers(n, device),), moved)
    ]
    for peers in (4, 8):
        m = 2 * n // peers
        moved = (peers + 1) * (m + 4 * m // BLOCK)
        name = f"decode + sum of {peers} + encode"
        run = torch.compile(reduce)
        cases.append(Case("torch.compile", name, "int8", run, lambda peers=peers: payload(peers), moved))
    return cases


def seconds(run: Callable[..., Any], sets: list[tuple[torch.Tensor, ...]]) -> tuple[float, float]:
    """Median time of one call on the GPU, and (max - min) / median.

    Not from a CUDA graph: bitsandbytes launches on the default stream, which none captures.
    """
    for _ in range(3):  # compiles
        run(*sets[0])
    calls = 10 * len(sets)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for i in range(calls):
            run(*sets[i % len(sets)])
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return harness.relative_spread(times[1:])


def measure(case: Case, n: int, megabytes: int) -> Result:
    """Time a case, and a copy of n bf16 elements before and after it."""
    count = 3
    sources = [(numbers(n, "cuda"),) for _ in range(count)]

    def copy_rate():
        return 4 * n / seconds(torch.clone, sources)[0]

    before = copy_rate()
    spent, spread = seconds(case.run, [case.inputs() for _ in range(count)])
    rate, copy = case.bytes_moved / spent, (before + copy_rate()) / 2
    return Result(case.library, case.kernel, case.fmt, megabytes, rate / 1e9, rate / copy, spread)


def main() -> None:
    """Measure the installed peers and print a report."""
    parser = harness.parser(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[256], help="bf16 bytes of the data")
    parser.add_argument("--out", type=Path, default=Path("bench_kernel_peers.json"))
    options = parser.parse_args()
    if min(options.megabytes) < 64:
        raise SystemExit("below 64 MB this would measure launches: give --megabytes 64 or more")
    if not torch.cuda.is_available():
        raise SystemExit("this measures CUDA kernels: run it on a machine with a GPU")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    results = []
    for megabytes in options.megabytes:
        n = megabytes << 19
        for cases in (bitsandbytes_cases, torchao_cases, compiled_cases):
            try:
                found = cases(n, "cuda")
            except ImportError as error:
                print(f"not installed: {error.name}")
                continue
            for case in found:
                result = measure(case, n, megabytes)
                results.append(result)
                print(
                    f"{megabytes:5d} MB  {result.library:14s} {result.kernel:28s} {result.fmt:7s}"
                    f" {result.gb_per_s:6.0f} GB/s  {100 * result.of_copy:5.1f}% of copy"
                    f"  spread {100 * result.spread:.1f}%",
                    flush=True,
                )
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    harness.write(options.out, report | {"results": results})


if __name__ == "__main__":
    main()
