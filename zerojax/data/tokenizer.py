"""Text to tokens: bytes, or a byte-level BPE from the `tokenizers` library."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from jaxtyping import UInt32

from zerojax.data.source import DataError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What the data pipeline and sampling need of a tokenizer."""

    vocab_size: int
    end_of_text: int

    def encode(self, text: bytes) -> UInt32[np.ndarray, " n"]:
        """Token ids of a text."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def save(self, path: Path) -> None:
        """Store it, for `load_tokenizer`."""
        ...


class ByteTokenizer:
    """One token a byte. Byte 0, which text never holds, ends a document."""

    vocab_size = 256
    end_of_text = 0

    def encode(self, text: bytes) -> UInt32[np.ndarray, " n"]:
        """Token ids of a text: its bytes."""
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token != self.end_of_text).decode(errors="replace")

    def save(self, path: Path) -> None:
        """Nothing to store: a folder without a tokenizer.json holds bytes."""


class BPETokenizer:
    """A tokenizer in the `tokenizers` library's JSON format."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Wrap a tokenizer that has an end-of-text token.

        Raises:
            DataError: it has none.
        """
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        known = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
        ids = [i for name in known if (i := tokenizer.token_to_id(name)) is not None]
        if not ids:
            raise DataError(f"the tokenizer has no end-of-text token (looked for {known})")
        self.end_of_text = ids[0]

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> "BPETokenizer":
        """Train a byte-level BPE.

        Args:
            texts: documents; bytes that are not UTF-8 become U+FFFD.
            vocab_size: tokens to learn, the 256 bytes and the end-of-text token included. A small
                corpus may give fewer.
        """
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((text.decode(errors="replace") for text in texts), trainer)
        return cls(tokenizer)

    def encode(self, text: bytes) -> UInt32[np.ndarray, " n"]:
        """Token ids of a text."""
        encoding = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, np.uint32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        self._tokenizer.save(str(path))


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json; where there is none, the tokens are bytes.

    Raises:
        DataError: the file is not a tokenizer.
    """
    if not path.exists():
        return ByteTokenizer()
    try:
        return BPETokenizer(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: not a tokenizer file: {error}") from error
