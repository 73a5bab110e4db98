"""Common parts of the benchmarks of generation: the model's shape, and what is reported of each system.

Imports neither JAX nor PyTorch, because either may be missing where the other is measured.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness


@dataclass(frozen=True)
class Shape:
    """A decoder in bf16, and what it generates.

    Attributes:
        gpt: whether its blocks are GPT's, with biases and an MLP of two matrices, or LLaMA's with three.
        rows: prompts, decoded together.
        prompt: tokens of each.
        new: tokens of each answer in a long generation.
        short: in a short one.
    """

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    rows: int
    prompt: int
    new: int
    short: int
    gpt: bool

    @staticmethod
    def of(options: argparse.Namespace) -> "Shape":
        """The shape that ``add_options`` describes."""
        heads = options.d_model // 128 or 1
        return Shape(
            options.layers, options.d_model, heads, options.kv_heads or heads, options.ffn, options.vocab,
            options.rows, options.prompt, options.new, options.short, options.gpt,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that each token reads: all but the embedding."""
        d, kv = self.d_model, self.d_model // self.heads * self.kv_heads
        mlp = (2 if self.gpt else 3) * d * self.ffn
        return 2 * (self.layers * (2 * d * d + 2 * d * kv + mlp) + self.vocab * d)

    @property
    def cache_bytes(self) -> float:
        """Bytes of keys and values that a token between the short and the long generation's end reads."""
        columns = self.prompt + (self.short + self.new) / 2
        kv = self.d_model // self.heads * self.kv_heads
        return 2 * 2 * self.layers * kv * self.rows * columns


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the shape and of the output."""
    sizes = {"layers": 32, "d_model": 4096, "ffn": 11008, "vocab": 32000}
    harness.add_numbers(parser, **sizes, rows=64, prompt=128, new=256, short=16, repeats=3)
    parser.add_argument("--kv-heads", type=int, help="by default as many as heads")
    parser.set_defaults(gpt=False)
    parser.add_argument("--json", type=Path, help="write the rows here")


@dataclass(frozen=True)
class Generated:
    """One system's figures.

    Attributes:
        token_ms: median, minimum and maximum of the milliseconds for the next token of all rows.
        short_ms: median milliseconds of a short generation: the weights' copy and the prefill, mostly.
        tokens_per_second: new tokens of all rows in a long generation, everything included.
    """

    system: str
    token_ms: tuple[float, float, float]
    short_ms: float
    tokens_per_second: float

    @staticmethod
    def of(system: str, shape: Shape, seconds: Mapping[int, Sequence[float]]) -> "Generated":
        """The figures from seconds of several short and long generations."""
        short = statistics.median(seconds[shape.short])
        each = [1e3 * (s - short) / (shape.new - shape.short) for s in seconds[shape.new]]
        whole = statistics.median(seconds[shape.new])
        return Generated(system, harness.spread(each), 1e3 * short, shape.rows * shape.new / whole)


def report(rows: Sequence[Generated], shape: Shape, rate: float, path: Path | None) -> None:
    """Print and write the figures beside the least time. ``rate`` is a copy's (bytes/s both ways)."""
    least = 1e3 * (shape.weight_bytes + shape.cache_bytes) / rate
    weights, cache = shape.weight_bytes / 1e9, shape.cache_bytes / 1e9
    print(
        f"a token reads {weights:.1f} GB of weights and {cache:.1f} GB of cache: {least:.2f} ms at least, at "
        f"{rate / 1e12:.2f} TB/s"
    )
    for row in rows:
        median, low, high = row.token_ms
        print(
            f"{row.system:28} {median:7.2f} ms per token ({low:.2f} to {high:.2f}), {least / median:5.1%} "
            f"of the bandwidth; short {row.short_ms:.0f} ms; {row.tokens_per_second:.0f} tokens/s in all"
        )
    harness.write(path, {"shape": shape, "copy_rate": rate, "rows": rows})
