"""Common parts of the benchmarks of one model under many systems: how a row is counted and printed.

Imports neither JAX nor PyTorch, because either may be missing where the other is measured.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import harness


@dataclass(frozen=True)
class Row:
    """One variant's figures.

    Attributes:
        micro_batches: of a step; all variants with the same number see the same data.
        rate: of the nodes' links, if the run sets it (--rates).
        milliseconds: median, minimum and maximum of a step.
        tokens_per_second: of the world, at the median.
        mfu: model FLOPs (6 per parameter and token, and attention) over the chips' bf16 peak; None
            if the chip's peak is unknown.
        sent_per_node: bytes that a node put on its link in a step, headers included; None without zerojax
            emulate.
        peak_gib: the most memory that device 0 held.
        loss: after the timed steps; the gradient's norm likewise.
        exposed_ms: milliseconds of a step in which device 0 only communicates; None if no step was traced.
        hidden: fraction of device 0's communication beside compute; None likewise.
    """

    variant: str
    micro_batches: int
    rate: str | None
    milliseconds: tuple[float, float, float]
    tokens_per_second: float
    mfu: float | None
    sent_per_node: float | None
    peak_gib: float | None
    loss: float
    grad_norm: float
    compile_seconds: float
    exposed_ms: float | None = None
    hidden: float | None = None


@dataclass(frozen=True)
class Speed:
    """The figures of timed steps; see ``Row``."""

    milliseconds: tuple[float, float, float]
    tokens_per_second: float
    mfu: float | None


def speed_of(
    seconds: Sequence[float], tokens: int, flops_per_token: int, world: int, peak_tflops: float | None
) -> Speed:
    """The figures of steps from their times.

    Args:
        seconds: of every timed step.
        tokens: of a step, of the world.
        flops_per_token: of a forward and a backward pass.
        world: devices.
        peak_tflops: of one of them; None if unknown.
    """
    median, least, most = harness.spread(seconds)
    peak = peak_tflops and peak_tflops * 1e12 * world
    mfu = tokens * flops_per_token / median / peak if peak else None
    return Speed((1e3 * median, 1e3 * least, 1e3 * most), tokens / median, mfu)


HEAD_WIDTH = 128


class LINEAR:
    """Qwen3.5's linear attention: a head of keys and two of values for each 256 of the model's width."""

    width = 128

    @staticmethod
    def heads(d_model: int) -> tuple[int, int]:
        """Of keys and of values."""
        return d_model // 256, d_model // 128

    @classmethod
    def outputs(cls, d_model: int) -> int:
        """Columns of its projections: queries, keys, values, gate, output, decays and betas."""
        keys, values = cls.heads(d_model)
        return (2 * keys + 3 * values) * cls.width + 2 * values


@dataclass(frozen=True)
class Sizes:
    """Of a block, as the options give them.

    Attributes:
        rms: RMS norms, rotary positions and SwiGLU, not GPT-2's blocks.
        qk_norm: whether each head of queries and keys is normed.
        ffn: hidden width of the MLP, or of each expert.
        experts: MLPs of a block; 0 is one for all tokens.
        per_token: of these, how many a token goes to.
        head_width: of attention's heads.
        linear: whether three layers of four have linear attention (``LINEAR``), and attention has a gate.
    """

    rms: bool
    qk_norm: bool
    d_model: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int
    per_token: int
    head_width: int = HEAD_WIDTH
    linear: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Sizes":
        """The options' own sizes, and the family's sizes where they have none."""
        d, mixture = options.d_model, options.qwen3_moe
        if options.qwen35:
            kv_heads = options.kv_heads or max(d // 1024, 1)
            return cls(True, True, d, d // 256, kv_heads, options.ffn or 3 * d, 0, 0, 256, linear=True)
        heads = d // HEAD_WIDTH * (2 if mixture else 1)
        dense = -(-8 * d // 768) * 256 if options.llama else 4 * d
        return cls(
            rms=options.llama or mixture,
            qk_norm=mixture,
            d_model=d,
            heads=heads,
            kv_heads=options.kv_heads or (max(heads // 8, 1) if mixture else heads),
            ffn=options.ffn or (3 * d // 8 if mixture else dense),
            experts=options.experts if mixture else 0,
            per_token=options.experts_per_token if mixture else 0,
        )

    @property
    def active_weights(self) -> int:
        """Elements of the matrices that a token is multiplied with: of the experts, those that it goes to."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_width
        if self.linear:
            attention = (attention + self.heads * self.head_width + 3 * LINEAR.outputs(self.d_model)) // 4
        mlp = (3 if self.rms else 2) * self.ffn * (self.per_token or 1)
        return self.d_model * (attention + mlp + self.experts)

    def flops_per_token(self, layers: int, length: int, *, frozen: bool) -> int:
        """FLOPs of a forward and a backward pass: 6 per weight, 4 if it is frozen; and causal attention's."""
        weights = (4 if frozen else 6) * self.active_weights
        attending = layers // 4 if self.linear else layers
        return layers * weights + attending * 6 * self.heads * self.head_width * length


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of the model and of the output, common to all systems."""
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--d-model", type=int, default=2048)
    family = parser.add_mutually_exclusive_group()
    family.add_argument("--llama", action="store_true", help="LLaMA's blocks: RMSNorm, rope, SwiGLU")
    family.add_argument(
        "--qwen3-moe", action="store_true",
        help="Qwen3-30B-A3B's: LLaMA's with twice as many heads, 8 to a key, normed, and experts as MLPs",
    )  # fmt: skip
    family.add_argument(
        "--qwen3.5", action="store_true", dest="qwen35",
        help="Qwen3.5-9B's at --d-model 4096: three layers of gated linear attention, then a gated one",
    )  # fmt: skip
    parser.add_argument("--documents", type=int, default=1, help="packed in each row (--qwen3.5)")
    parser.add_argument("--experts", type=int, default=128, help="with --qwen3-moe")
    parser.add_argument("--experts-per-token", type=int, default=8, help="likewise")
    parser.add_argument("--ffn", type=int, help="hidden width of the MLP; by default the family's own")
    parser.add_argument("--kv-heads", type=int, help="by default the family's own")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch on one device")
    parser.add_argument("--peak-tflops", type=float, help="of one chip in dense bf16, for the MFU")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument(
        "--rates", nargs="+", default=[None], metavar="RATE",
        help="time with each of these rates of the nodes' links: 10gbit 40gbit. In a cluster of "
        "zerojax emulate, set up with the highest of them",
    )  # fmt: skip


def document_ends(options: argparse.Namespace) -> list[int]:
    """The token after each document of a row; lengths grow in proportion to 1, 2, 3, ..."""
    count = options.documents
    return [options.seq * (n + 1) * n // (count * (count + 1)) for n in range(1, count + 1)]


def sent_so_far() -> int | None:
    """Bytes that this node has put on its link, by the interface's counter; None without a link."""
    try:
        from zerojax.testing.emulated_cluster.network import ClusterError, link_bytes
    except ImportError:  # where PyTorch's peers run alone
        return None
    try:
        return link_bytes().sent
    except ClusterError:
        return None


def line(row: Row) -> str:
    """A row of the table."""
    name = f"{row.variant:12}" if row.rate is None else f"{row.variant:12}{row.rate:>9}"
    median, least, most = row.milliseconds
    mfu = f"{row.mfu:6.1%}" if row.mfu else "     -"
    peak = f"{row.peak_gib:6.1f}" if row.peak_gib else "     -"
    sent = f"{row.sent_per_node / 1e6:7.1f}" if row.sent_per_node else "      -"
    traced = ""
    if row.exposed_ms is not None and row.hidden is not None:
        traced = f"  exposed {row.exposed_ms:6.1f} ms  hidden {row.hidden:6.1%}"
    return (
        f"{name}{median:9.1f} ms ({least:.1f} to {most:.1f})"
        f"{row.tokens_per_second / 1e3:9.1f} ktok/s  MFU {mfu}  sent {sent} MB  peak {peak} GiB{traced}"
        f"  loss {row.loss:.5f}  |g| {row.grad_norm:.5f}  compile {row.compile_seconds:.1f} s"
    )
