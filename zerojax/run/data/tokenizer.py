"""Tokenizers: bytes, or a byte-level BPE of the ``tokenizers`` library."""

import json
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Int64, UInt32

from zerojax.errors import errors_at
from zerojax.run.data.formats import DataError
from zerojax.validation.untrusted import read_json_object, short

END_OF_TEXT = "<|endoftext|>"
SETTINGS = "tokenizer_config.json"
"""The file beside a tokenizer.json, as in Hugging Face's folders, that names its end and begin tokens."""


class Spans(NamedTuple):
    """The tokens of a text with the characters that they come from.

    Attributes:
        tokens: the token ids.
        starts: the index in the text of each token's first character.
        ends: one past the last character; several tokens may come from one character.
    """

    tokens: UInt32[np.ndarray, " n"]
    starts: Int64[np.ndarray, " n"]
    ends: Int64[np.ndarray, " n"]


class ByteTokenizer:
    """One token per byte. Byte 0, which never occurs in text, ends a document."""

    vocab_size = 256
    end_of_text = 0
    begin_of_text = 0
    special_tokens: ClassVar[dict[str, str]] = {}  # byte 0 cannot be written in a text

    def encode(self, text: bytes) -> UInt32[np.ndarray, " n"]:
        """The bytes of a text as token ids. Raises DataError if one is 0, which ends a document."""
        if b"\0" in text:
            raise DataError(
                "a NUL byte, which ends a document for the byte tokenizer: clean the text, or use another "
                "data.tokenizer"
            )
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[UInt32[np.ndarray, " n"]]:
        """Token ids of each text."""
        return [self.encode(text) for text in texts]

    def encode_spans(self, texts: Sequence[str]) -> list[Spans]:
        """Token ids of each text, and the character that each byte belongs to."""
        found = []
        for text in texts:
            tokens = self.encode(text.encode())
            starts = np.cumsum(tokens & 0xC0 != 0x80) - 1  # other bytes continue a character of UTF-8
            found.append(Spans(tokens, starts, starts + 1))
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD; ids that are no token are skipped.

        A model may sample such an id if its vocabulary is larger than the tokenizer's.
        """
        return bytes(t for t in tokens if t != self.end_of_text and t < self.vocab_size).decode(
            errors="replace"
        )

    def save(self, path: Path) -> None:
        """Writes nothing: a folder without a tokenizer.json holds bytes."""


class BPETokenizer:
    """A tokenizer of the ``tokenizers`` library that has an end-of-text token.

    If ``end_of_text`` is not given, it is one of the usual names. If ``begin_of_text`` is not given, the same
    token begins a text.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        end_of_text: str | None = None,
        begin_of_text: str | None = None,
    ) -> None:
        # Many a tokenizer.json has these from the last call of transformers. They would cut or pad documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)  # ids may have gaps
        known = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
        self.end_of_text = self._first_id((end_of_text,) if end_of_text else known)
        self.begin_of_text = self._first_id((begin_of_text,)) if begin_of_text else self.end_of_text
        # If the tokenizer has no token that begins a text, its chat template writes none.
        ends = {"eos_token": self.end_of_text} | ({"bos_token": self.begin_of_text} if begin_of_text else {})
        self.special_tokens = {
            role: token
            for role, number in ends.items()
            if (token := tokenizer.id_to_token(number)) is not None
        }

    @cached_property
    def _with_offsets(self) -> tokenizers.Tokenizer:
        """The tokenizer without its post-processor, which may take blanks out of the offsets."""
        copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        copy.post_processor = None
        return copy

    def _first_id(self, names: Iterable[str]) -> int:
        ids = [i for name in names if (i := self._tokenizer.token_to_id(name)) is not None]
        if not ids:
            raise DataError(f"the tokenizer has no end-of-text token (looked for {tuple(names)})")
        return ids[0]

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> "BPETokenizer":
        """Train a byte-level BPE.

        Bytes that are not UTF-8 become U+FFFD. ``vocab_size`` counts the 256 bytes and the end-of-text token;
        a small corpus may give fewer.
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
        return cls(tokenizer, END_OF_TEXT, END_OF_TEXT)

    def encode(self, text: bytes) -> UInt32[np.ndarray, " n"]:
        """Token ids of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[UInt32[np.ndarray, " n"]]:
        """Token ids of each text, computed on all cores."""
        decoded = [text.decode(errors="replace") for text in texts]
        with tokenizers_errors("the tokenizer cannot encode a text"):
            encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def encode_spans(self, texts: Sequence[str]) -> list[Spans]:
        """Token ids of each text, computed on all cores, and the characters that each token comes from."""
        found = []
        with tokenizers_errors("the tokenizer cannot encode a text"):
            encodings = self._with_offsets.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
            found.append(Spans(np.asarray(encoding.ids, np.uint32), offsets[:, 0], offsets[:, 1]))
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON, and beside it the tokens that end and begin a text."""
        self._tokenizer.save(str(path))
        settings = json.dumps(self.special_tokens, indent=2) + "\n"
        path.with_name(SETTINGS).write_text(settings, encoding="utf-8")


Tokenizer = ByteTokenizer | BPETokenizer
"""Every id is below ``vocab_size``.

``special_tokens`` has the tokens that a chat template may write, by name: "eos_token" and "bos_token".
"""


def same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have the same files, so that their tokens mean the same."""
    return _files(one) == _files(other)


def _files(tokenizer: Tokenizer) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        tokenizer.save(Path(folder) / "tokenizer.json")
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json; if there is none, the tokens are bytes.

    A tokenizer_config.json beside it may name the tokens that end (``eos_token``) and begin (``bos_token``) a
    text.
    """
    if not path.exists():
        return ByteTokenizer()
    settings = read_settings(path.with_name(SETTINGS))
    ends = (special_token(settings, role) for role in ("eos_token", "bos_token"))
    inner = read_inner(path)
    with errors_at(path):
        return BPETokenizer(inner, *ends)


@contextmanager
def tokenizers_errors(what: str) -> Generator[None]:
    """Turn any error of the ``tokenizers`` library into a ``DataError`` that begins with ``what``.

    The library raises bare ``Exception``, and a special ``BaseException`` if its Rust code panics.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {error}") from error


@contextmanager
def _unprinted_panics() -> Generator[None]:
    """Hold back the standard error, and drop it if the body fails: a panic writes four lines."""
    saved = os.dup(2)
    with TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        written.seek(0)
        os.write(2, written.read())


def read_inner(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json with the ``tokenizers`` library."""
    with tokenizers_errors(f"{path}: not a tokenizer file"):
        text = path.read_text(encoding="utf-8")
        with nullcontext() if sys.__stderr__ is None else _unprinted_panics():
            return tokenizers.Tokenizer.from_str(text)


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON file beside a tokenizer; empty if there is none."""
    return read_json_object(path, DataError) if path.is_file() else {}


def special_token(settings: dict[str, Any], role: str) -> str | None:
    """The special token of a role, a string or a table with "content"; None if there is none.

    Raises:
        DataError: it is anything else.
    """
    token = settings.get(role)
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise DataError(f"{role} = {short(token)} should be a string, or a table whose content is a string")
    return token
