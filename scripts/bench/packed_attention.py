#!/usr/bin/env python3
"""Measure causal attention within packed documents, forward and backward, on one GPU.

    python3 scripts/bench/packed_attention.py            # about 80 s on an H100
    python3 scripts/bench/packed_attention.py --small    # what runs on a CPU, in small

Rows of 8k to 128k tokens hold documents of 512 to 8192 tokens (log-uniform). TFLOP/s count the pairs of
tokens that attend to each other, 14 FLOPs for each pair, head and dimension (4 forward, 10 backward). "of
row" is relative to cuDNN's causal attention over one document as long as the row, "of equal" to cuDNN's over
a batch of equal documents with about as many pairs. ``--steps`` times training steps of a small model with
FlashAttention-4 and with cuDNN's mask, and compares their losses. What fails prints its error, and the rest
goes on. Tests compare the kernels with fp32 (``tests/models/test_packed.py``).
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import attempt, milliseconds
from jax import Array

import zerojax
from zerojax.models import GPT, GPTConfig, flash_attention, lm_loss
from zerojax.models.attention import causal_attention
from zerojax.models.flash_attention import Documents, document_offsets
from zerojax.models.options import AttentionKernel

SHORTEST, LONGEST = 512, 8192
"""Of the documents, in tokens."""

ROW_FLOPS = 14
"""Of a pair of tokens, forward and backward, per head and dimension."""

SECONDS = 0.25
"""Of runs of each measurement."""

ON_GPU = jax.default_backend() == "gpu"
PLAIN: AttentionKernel = "cudnn" if ON_GPU else "xla"
MASK = "cuDNN with a mask"


@dataclass(frozen=True)
class Case:
    """A shape to measure.

    Attributes:
        lengths: of the documents of each row; all rows have the same.
        width: dimensions of a head.
        window: positions that one attends to, itself included; None for all of its document.
    """

    lengths: tuple[int, ...]
    width: int
    heads: int
    kv_heads: int
    window: int | None = None
    rows: int = 1

    @property
    def tokens(self) -> int:
        """Of a row."""
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Pairs of tokens that attend to each other, in all rows."""
        return self.rows * sum(causal_pairs(n, self.window) for n in self.lengths)

    @property
    def segments(self) -> Array:
        """The document of each position, int32 [rows, tokens]."""
        row = np.repeat(np.arange(1, len(self.lengths) + 1, dtype=np.int32), self.lengths)
        return jnp.asarray(np.tile(row, (self.rows, 1)))

    @property
    def documents(self) -> Documents:
        """Those of all rows."""
        return document_offsets(self.segments)

    def describe(self) -> str:
        """One line."""
        window = "" if self.window is None else f", window {self.window}"
        return (
            f"{self.rows} x {self.tokens} tokens, {len(self.lengths)} documents of {min(self.lengths)} to "
            f"{max(self.lengths)}, {self.heads} heads ({self.kv_heads} of keys) of {self.width}{window}"
        )


def causal_pairs(length: int, window: int | None) -> int:
    """Pairs of a position and one that it attends to, in one document."""
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def random_lengths(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths that fill a row, log-uniform; the last is cut."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        lengths.append(min(length, left))
    return tuple(lengths)


Attend = Callable[[Array, Array, Array, Documents], Array]
"""Attention of queries, keys, values [rows, tokens, heads, width], in documents that a step finds once."""


def one_document(case: Case) -> Attend:
    """A document as long as the row."""

    def attend(q: Array, k: Array, v: Array, documents: Documents) -> Array:
        del documents
        return causal_attention(q, k, v, PLAIN, window=case.window)

    return attend


def equal_documents(case: Case) -> tuple[Attend, int]:
    """A batch of equal documents; also their length, at which they have about as many pairs."""
    mean = sum(n * n for n in case.lengths) / case.tokens
    length = min(2 ** round(math.log2(mean)), case.tokens)
    while case.tokens % length:
        length //= 2

    def attend(q: Array, k: Array, v: Array, documents: Documents) -> Array:
        del documents
        split = [x.reshape(-1, length, *x.shape[2:]) for x in (q, k, v)]
        return causal_attention(split[0], split[1], split[2], PLAIN, window=case.window).reshape(q.shape)

    return attend, length


def packed(case: Case, kernel: AttentionKernel, *, bounded: bool = False) -> Attend:
    """Documents in one row; ``bounded`` says that one pass takes all, which saves a branch on the device."""

    def attend(q: Array, k: Array, v: Array, documents: Documents) -> Array:
        documents = documents._replace(numbers=None) if bounded else documents
        return causal_attention(q, k, v, kernel, documents, window=case.window)

    return attend


def candidates(case: Case) -> Iterator[tuple[str, Attend]]:
    """What is compared, by name."""
    yield "FlashAttention-4", packed(case, "flash_attention_4")
    if case.rows * len(case.lengths) <= case.documents.lengths.size:
        yield "the same, bounded", packed(case, "flash_attention_4", bounded=True)
    yield MASK, packed(case, PLAIN)


def arrays(case: Case, seed: int = 1) -> tuple[Array, Array, Array, Array]:
    """Queries, keys, values, and the gradient of the output; bf16, normal."""
    keys = jax.random.split(jax.random.key(seed), 4)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, g = (
        jax.random.normal(key, (case.rows, case.tokens, n, case.width), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )
    return q, k, v, g


Step = Callable[[Array, Array, Array, Array, Documents], tuple[Array, Array, Array, Array]]


def step_of(attend: Attend) -> Step:
    """Output and the gradients of q, k and v, of (q, k, v, gradient of the output, documents)."""

    def step(
        q: Array, k: Array, v: Array, g: Array, documents: Documents
    ) -> tuple[Array, Array, Array, Array]:
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, documents), q, k, v)
        dq, dk, dv = pullback(g)
        return out, dq, dk, dv

    return step


def measure(case: Case) -> None:
    """Print a table of one case."""
    print(f"\n{case.describe()}: {case.pairs / 1e6:.1f} M pairs")
    columns = ("ms", 8), ("TFLOP/s", 8), ("of row", 7), ("of equal", 8), ("temp GB", 8)
    print(" " * 24, *(f"{title:>{width}}" for title, width in columns), "compile s")
    documents = case.documents
    given = arrays(case)
    equal, length = equal_documents(case)
    row = replace(case, lengths=(case.tokens,)).pairs
    batch = replace(case, lengths=(length,) * (case.tokens // length)).pairs
    bases: dict[str, float] = {}
    base_rows = [("cuDNN, one document", one_document(case), row), (f"cuDNN, equal ({length})", equal, batch)]

    def rate_of(name: str, attend: Attend, pairs: int) -> None:
        start = time.monotonic()
        compiled = jax.jit(step_of(attend)).lower(*given, documents).compile()
        took = time.monotonic() - start
        ms = milliseconds(lambda: compiled(*given, documents), SECONDS)
        rate = ROW_FLOPS * pairs * case.heads * case.width / ms / 1e9
        if name in bases:
            bases[name] = rate
        shares = [f"{rate / base:.0%}" for base in bases.values()] + [""] * (2 - len(bases))
        memory = compiled.memory_analysis()
        temp = 0 if memory is None else memory.temp_size_in_bytes / 1e9
        print(
            f"  {name:<22} {ms:8.2f} {rate:8.1f} {shares[0]:>7} {shares[1]:>8} {temp:8.2f} {took:9.1f}",
            flush=True,
        )

    for name, attend, pairs in base_rows:
        bases[name] = math.nan
        attempt(name, partial(rate_of, name, attend, pairs))
    for name, attend in candidates(case):
        bias = 2 * case.rows * case.tokens**2
        if name == MASK and bias > 1 << 33:
            print(f"  {name:<22} not measured: its mask has {bias / 1e9:.0f} GB")
        else:
            attempt(name, partial(rate_of, name, attend, case.pairs))


def measure_steps(tokens: int, heads: int, kv_heads: int) -> None:
    """Print the time of training steps of a small model, and that the losses agree."""
    config = GPTConfig(
        vocab_size=1024, layers=4, d_model=64 * heads, heads=heads, kv_heads=kv_heads, max_seq_len=tokens,
        norm="rms", positions="rope", mlp="swiglu", biases=False,
        sliding_window=100, sliding_window_pattern=2,
    )  # fmt: skip
    print(f"\ntraining steps, {config.layers} layers of {config.d_model}, {tokens} tokens")
    segments = Case(random_lengths(tokens + 1), 1, 1, 1).segments
    ids = jax.random.randint(jax.random.key(0), segments.shape, 0, config.vocab_size)
    batch = {"tokens": np.asarray(ids), "segments": np.asarray(segments)}
    kernels: tuple[AttentionKernel, ...] = ("auto" if ON_GPU else "flash_attention_4", PLAIN)

    def train(kernel: AttentionKernel) -> None:
        state = zerojax.TrainState.create(
            lambda rngs: GPT(replace(config, attention=kernel), rngs=rngs),
            optax.sgd(0.1),
            lm_loss,
            mesh=zerojax.make_mesh(1, 1, devices=jax.devices()[:1]),
            zero=zerojax.ZeroConfig(remat="attention"),
        )
        losses: list[Array] = []

        def step() -> Array:
            nonlocal state
            state, metrics = zerojax.train_step(state, batch)
            losses.append(metrics["loss"])
            return losses[-1]

        ms = milliseconds(step, SECONDS)
        first = ", ".join(f"{float(x):.4f}" for x in losses[:3])
        print(f"  {kernel:<22} {ms:8.2f} ms, losses {first}", flush=True)

    for kernel in kernels:
        attempt(kernel, partial(train, kernel))


def main() -> None:
    """Check, measure and print."""
    begin = time.monotonic()
    parser = harness.parser(__doc__, heads=16, kv_heads=4)
    parser.add_argument("--small", action="store_true", help="short rows")
    parser.add_argument("--budget", type=float, default=80, help="seconds after which no case begins")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases to measure, from 0 on")
    parser.add_argument("--steps", action="store_true", help="time steps of a model as well")
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}")
    if not ON_GPU:
        flash_attention._BACKEND = "reference"
    case = partial(Case, heads=options.heads, kv_heads=options.kv_heads)
    k = 1024
    cases = [
        case(random_lengths(32 * k), 128),
        case(random_lengths(8 * k), 128),
        case(random_lengths(128 * k), 128),
        case(random_lengths(32 * k), 128, window=k),
        case(random_lengths(32 * k), 64),
        # Many short documents, in one pass and in several, and one that fills the row.
        case((256,) * 128, 128),
        case((128,) * 256, 128),
        case((32 * k,), 128),
        case((8 * k,), 128),
        case((128 * k,), 128),
        # Of several rows a branch on the device takes a smaller part.
        case(random_lengths(8 * k), 128, rows=4),
    ]
    if options.small:
        cases = [case(random_lengths(k), 64), case(random_lengths(k), 64, window=100)]
    chosen = range(len(cases)) if options.cases is None else options.cases
    work: list[Callable[[], None]] = []
    if options.steps:
        shape = k if options.small else 16 * k, options.heads, options.kv_heads
        work.append(partial(measure_steps, *shape))
    work += [partial(measure, cases[number]) for number in chosen]
    for number, part in enumerate(work):
        if time.monotonic() - begin > options.budget:
            print(f"\nno time left for the last {len(work) - number}")
            break
        part()
    print(f"\n{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
