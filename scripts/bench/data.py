#!/usr/bin/env python3
"""Measure the cost of data: preparing tokens and reading batches.

The text is the source code of Python's standard library, cut into documents and written as JSON lines. Rates
are per second of one core (the process's CPU time), which other programs on the machine disturb little.
docs/data.md has the figures; packed_attention.py measures attention that separates documents.
"""

import json
import tempfile
import time
from pathlib import Path

import harness
import numpy as np

from zerojax.run.config import DataSection
from zerojax.run.data.batches import TrainBatches, make_rows
from zerojax.run.data.dataset import DatasetPart, open_dataset
from zerojax.run.data.packing import PackedRows
from zerojax.run.data.prepare import prepare
from zerojax.run.data.source import TextSource
from zerojax.run.data.tokens import TokenFile

_MEAN_DOCUMENT = 2000
_LENGTH = 2048


def main() -> None:
    """Measure, and print a line for each measurement."""
    parser = harness.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=60, help="of text to prepare")
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
            measure_reading(name, part.train, _LENGTH, options.batch)


def write_documents(path: Path, size: int) -> None:
    """Pieces of source code of log-normal lengths, as JSON lines, `size` bytes of text in all."""
    rng = np.random.default_rng(0)
    whole = b"".join(document.text for document in TextSource("stdlib").documents())
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


if __name__ == "__main__":
    main()
