"""Text, tokens and batches."""

from zerojax.run.data.batches import (
    Batch,
    Rows,
    TrainBatches,
    Windows,
    make_rows,
    validation_batches,
)
from zerojax.run.data.chat_template import ChatTemplate, find_template
from zerojax.run.data.dataset import (
    Dataset,
    DatasetPart,
    is_prepared,
    names_kept_tokenizer,
    open_dataset,
    open_template,
    open_tokenizer,
    perplexity,
    tokenizer_file,
)
from zerojax.run.data.formats import DataError, Document
from zerojax.run.data.mixture import Shares
from zerojax.run.data.packing import PackedRows, best_fit
from zerojax.run.data.prepare import keep_tokenizer, prepare
from zerojax.run.data.source import TextSource, check_source_exists, open_source
from zerojax.run.data.split import evenly_spread, hold_out, rank, validation_limit
from zerojax.run.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, same_tokenizer
from zerojax.run.data.tokens import Header, TokenFile, TokenWriter, open_tokens

__all__ = [
    "BPETokenizer",
    "Batch",
    "ByteTokenizer",
    "ChatTemplate",
    "DataError",
    "Dataset",
    "DatasetPart",
    "Document",
    "Header",
    "PackedRows",
    "Rows",
    "Shares",
    "TextSource",
    "TokenFile",
    "TokenWriter",
    "Tokenizer",
    "TrainBatches",
    "Windows",
    "best_fit",
    "check_source_exists",
    "evenly_spread",
    "find_template",
    "hold_out",
    "is_prepared",
    "keep_tokenizer",
    "load_tokenizer",
    "make_rows",
    "names_kept_tokenizer",
    "open_dataset",
    "open_source",
    "open_template",
    "open_tokenizer",
    "open_tokens",
    "perplexity",
    "prepare",
    "rank",
    "same_tokenizer",
    "tokenizer_file",
    "validation_batches",
    "validation_limit",
]
