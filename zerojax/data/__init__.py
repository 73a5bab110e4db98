"""Text, tokens and batches."""

from zerojax.data.batches import Batch, TrainBatches, Windows, validation_batches
from zerojax.data.prepare import Dataset, is_prepared, open_dataset, open_tokenizer, prepare
from zerojax.data.source import DataError, Source, held_out, open_source
from zerojax.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from zerojax.data.tokens import Header, TokenFile, open_tokens, write_tokens

__all__ = [
    "BPETokenizer",
    "Batch",
    "ByteTokenizer",
    "DataError",
    "Dataset",
    "Header",
    "Source",
    "TokenFile",
    "Tokenizer",
    "TrainBatches",
    "Windows",
    "held_out",
    "is_prepared",
    "load_tokenizer",
    "open_dataset",
    "open_source",
    "open_tokenizer",
    "open_tokens",
    "prepare",
    "validation_batches",
    "write_tokens",
]
