"""Text, tokens and batches."""

from zerojax.data.batches import (
    Batch,
    Rows,
    TrainBatches,
    Windows,
    make_rows,
    validation_batches,
)
from zerojax.data.dataset import Dataset, Part, is_prepared, open_dataset, open_tokenizer
from zerojax.data.formats import DataError, Document
from zerojax.data.mixture import Shares
from zerojax.data.packing import PackedRows, best_fit
from zerojax.data.prepare import prepare
from zerojax.data.source import Source, open_source
from zerojax.data.split import rank, validation_limit
from zerojax.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from zerojax.data.tokens import Header, TokenFile, TokenWriter, open_tokens

__all__ = [
    "BPETokenizer",
    "Batch",
    "ByteTokenizer",
    "DataError",
    "Dataset",
    "Document",
    "Header",
    "PackedRows",
    "Part",
    "Rows",
    "Shares",
    "Source",
    "TokenFile",
    "TokenWriter",
    "Tokenizer",
    "TrainBatches",
    "Windows",
    "best_fit",
    "is_prepared",
    "load_tokenizer",
    "make_rows",
    "open_dataset",
    "open_source",
    "open_tokenizer",
    "open_tokens",
    "prepare",
    "rank",
    "validation_batches",
    "validation_limit",
]
