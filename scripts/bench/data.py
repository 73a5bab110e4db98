#!/usr/bin/env python3
"""Measure the cost of data: preparing tokens, reading batches, and attention that separates documents.

The text is the source code of Python's standard library, cut into documents and written as JSON lines. Rates
are per second of one core (the process's CPU time), which other programs on the machine disturb little.
Attention is measured on GPUs only. docs/data.md has the figures.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from generation_rows import timed

from zerojax.models.attention import causal_attention
from zerojax.run.config import DataSection
from zerojax.run.data.batches import TrainBatches, make_rows
from zerojax.run.data.dataset import DatasetPart, open_dataset
from zerojax.run.data.packing import PackedRows
from zerojax.run.data.prepare import prepare
from zerojax.run.data.source import open_source
from zerojax.run.data.tokens import TokenFile

_MEAN_DOCUMENT = 2000


def main() -> None:
    """Measure, and print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=60, help="of text to prepare")
    parser.add_argument("--length", type=int, default=2048, help="of a sequence")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        write_documents(text, options.megabytes * 1_000_000)
        learned = Path(folder) / "bpe"
        measure("bpe, learning included", DataSection(source=str(text), tokenizer="bpe"), learned)
        settings = {"byte": "byte", "bpe": str(learned / "tokenizer.json")}
        for name, tokenizer in settings.items():
            part = measure(
                name, DataSection(source=str(text), tokenizer=tokenizer), Path(folder) / name[::-1]
            )
            measure_reading(name, part.train, options.length, options.batch)
    if jax.default_backend() == "gpu":
        measure_attention()


def write_documents(path: Path, size: int) -> None:
    """Pieces of source code of log-normal lengths, as JSON lines, `size` bytes of text in all."""
    rng = np.random.default_rng(0)
    whole = b"".join(document.text for document in open_source("stdlib").documents())
    with path.open("w") as file:
        while size > 0:
            length = int(rng.lognormal(np.log(_MEAN_DOCUMENT) - 0.5, 1.0)) + 1
            start = int(rng.integers(0, len(whole) - length))
            file.write(json.dumps({"text": whole[start : start + length].decode(errors="ignore")}) + "\n")
            size -= length


def measure(name: str, settings: DataSection, folder: Path) -> DatasetPart:
    """Prepare and open."""
    start = time.process_time()
    prepare(settings, folder)
    seconds = time.process_time() - start
    (part,) = open_dataset(settings, folder).parts
    header = part.train.header
    print(
        f"{name}: prepared {header.text_bytes / seconds / 1e6:.1f} MB/s, "
        f"{header.tokens / seconds / 1e6:.2f} M tokens/s "
        f"({header.tokens:,} tokens of {header.documents:,} documents in {seconds:.1f} s)"
    )
    return part


def measure_reading(name: str, file: TokenFile, length: int, batch: int) -> None:
    """Plan the rows and read batches for five seconds."""
    start = time.process_time()
    packed = PackedRows(file, length)
    seconds = time.process_time() - start
    filled = file.header.tokens / (len(packed) * (length + 1))
    print(f"{name}: planned {len(packed):,} rows in {seconds:.3f} s, {filled:.2%} full")
    for packing in ("none", "documents"):
        batches = TrainBatches([make_rows(file, length, packing)], batch_size=batch, seed=0)
        begin, start, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begin < 5:
            next(batches)
            count += 1
        seconds = time.process_time() - start
        batches.close()
        print(f"{name}: read {count * batch * length / seconds / 1e6:.1f} M tokens/s, packing {packing!r}")


def measure_attention(batch: int = 8, heads: int = 16, width: int = 128) -> None:
    """Forward and backward of one layer's attention, with and without segments, bf16."""
    rng = np.random.default_rng(0)
    for time_ in (2048, 4096, 8192):
        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (jax.random.normal(key, (batch, time_, heads, width), jnp.bfloat16) for key in keys)
        # Documents of 500 tokens on average.
        segments = jnp.asarray(np.cumsum(rng.random((batch, time_)) < 1 / 500, axis=1), jnp.int32)
        for name, kernel, given in (
            ("one document, cuDNN", "cudnn", None),
            ("segments, cuDNN", "cudnn", segments),
            ("segments, XLA", "xla", segments),
        ):
            if kernel == "xla" and time_ > 4096:
                continue
            milliseconds = time_attention(kernel, q, k, v, given)
            print(f"attention {batch} x {time_}, {heads} heads of {width}: {name}: {milliseconds:.2f} ms")


def time_attention(kernel: Any, *given: Any) -> float:
    """Median of ten, in ms."""

    @jax.jit
    def step(q: Any, k: Any, v: Any, segments: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            return jnp.sum(causal_attention(q, k, v, kernel, segments).astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    return 1e3 * statistics.median(timed(lambda: jax.block_until_ready(step(*given)), 10, untimed=3))


if __name__ == "__main__":
    main()
