"""Text to tokens: bytes, or a byte-level BPE from the `tokenizers` library."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from jaxtyping import UInt32

from zerojax.run.data.formats import DataError
from zerojax.validation.untrusted import parse_json, short

END_OF_TEXT = "<|endoftext|>"
SETTINGS = "tokenizer_config.json"
"""Beside a tokenizer.json, as Hugging Face has it: says which tokens end and begin a text."""


class Tokenizer(Protocol):
    """What the data pipeline and sampling need of a tokenizer."""

    vocab_size: int
    end_of_text: int
    begin_of_text: int

    def encode(self, text: bytes) -> UInt32[np.ndarray, " n"]:
        """Token ids of a text."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[UInt32[np.ndarray, " n"]]:
        """Token ids of each text, in less time than one by one."""
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
    begin_of_text = 0

    def encode(self, text: bytes) -> UInt32[np.ndarray, " n"]:
        """Token ids of a text: its bytes.

        Raises:
            DataError: byte 0 is among them.
        """
        if b"\0" in text:
            raise DataError(
                "a NUL byte, which is the byte tokenizer's end of a document: clean the text, or use "
                "another data.tokenizer"
            )
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[UInt32[np.ndarray, " n"]]:
        """Token ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token != self.end_of_text).decode(errors="replace")

    def save(self, path: Path) -> None:
        """Nothing to store: a folder without a tokenizer.json holds bytes."""


class BPETokenizer:
    """A tokenizer in the `tokenizers` library's JSON format."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        end_of_text: str | None = None,
        begin_of_text: str | None = None,
    ) -> None:
        """Wrap a tokenizer that has an end-of-text token.

        Args:
            tokenizer: any.
            end_of_text: the token that ends a text; None looks for one of the usual names.
            begin_of_text: the token that a text begins with; None is the one that ended the text before.

        Raises:
            DataError: it has no such token.
        """
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        known = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
        self.end_of_text = self._first_id((end_of_text,) if end_of_text else known)
        self.begin_of_text = self._first_id((begin_of_text,)) if begin_of_text else self.end_of_text

    def _first_id(self, names: Iterable[str]) -> int:
        ids = [i for name in names if (i := self._tokenizer.token_to_id(name)) is not None]
        if not ids:
            raise DataError(f"the tokenizer has no end-of-text token (looked for {tuple(names)})")
        return ids[0]

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

    def encode_batch(self, texts: Sequence[bytes]) -> list[UInt32[np.ndarray, " n"]]:
        """Token ids of each text, by as many threads as there are cores."""
        decoded = [text.decode(errors="replace") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON, and which tokens end and begin a text beside it."""
        self._tokenizer.save(str(path))
        ids = {"eos_token": self.end_of_text, "bos_token": self.begin_of_text}
        settings = {role: self._tokenizer.id_to_token(number) for role, number in ids.items()}
        path.with_name(SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json; where there is none, the tokens are bytes.

    A tokenizer_config.json beside it may name the tokens that end (`eos_token`) and begin (`bos_token`) a
    text.

    Raises:
        DataError: the file is not a tokenizer.
    """
    if not path.exists():
        return ByteTokenizer()
    settings = read_settings(path.with_name(SETTINGS))
    ends = (special_token(settings, role) for role in ("eos_token", "bos_token"))
    inner = read_inner(path)
    try:
        return BPETokenizer(inner, *ends)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def read_inner(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json as the `tokenizers` library has it.

    Raises:
        DataError: the file is not a tokenizer.
    """
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: not a tokenizer file: {error}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON file beside a tokenizer; empty where there is none.

    Raises:
        DataError: no JSON object.
    """
    try:
        settings = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path}: not a JSON object")
    return settings


def special_token(settings: dict[str, Any], role: str) -> str | None:
    """A special token by its role: a text, or a table with one, or none.

    Raises:
        DataError: it is something else.
    """
    token = settings.get(role)
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise DataError(f"{role} = {short(token)} should be a text, or a table with a text for content")
    return token
