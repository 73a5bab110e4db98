"""Reads and writes tokenizers of Hugging Face folders: tokenizer.json, or vocab.json with merges.txt."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from zerojax.run.data.formats import DataError
from zerojax.run.data.tokenizer import (
    END_OF_TEXT,
    SETTINGS,
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    read_inner,
    read_settings,
    special_token,
)

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
KEPT = (
    *(TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "tokenizer.model", GENERATION),
)
"""Files of a folder that a run keeps, for an export to write back."""


def read_tokenizer(folder: Path, config: dict[str, Any]) -> BPETokenizer | None:
    """The tokenizer of a Hugging Face folder, or None if there is none.

    The folder's config.json, ``config``, may name the token that ends a text.

    Raises:
        DataError: the tokenizer is of a kind that zerojax does not read; says what to do.
    """
    path = folder / TOKENIZER
    if path.is_file():
        inner = read_inner(path)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        inner = _from_vocabulary(folder)
    elif found := [name for name in ("tokenizer.model", "spiece.model") if (folder / name).is_file()]:
        raise DataError(
            f"{folder / found[0]}: SentencePiece models are not supported: write {TOKENIZER} by "
            f'transformers\' AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
        )
    else:
        return None
    settings = read_settings(folder / "special_tokens_map.json") | read_settings(folder / SETTINGS)
    end = special_token(settings, "eos_token") or _named(inner, config.get("eos_token_id"))
    start = special_token(settings, "bos_token") or _named(inner, config.get("bos_token_id"))
    return BPETokenizer(inner, end_of_text=end, begin_of_text=start)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer for transformers; bytes become a byte-level BPE without merges, with the same ids."""
    if isinstance(tokenizer, ByteTokenizer):
        tokenizer = BPETokenizer(_bytes_as_bpe(), end_of_text=END_OF_TEXT)
    tokenizer.save(folder / TOKENIZER)
    settings = read_settings(folder / SETTINGS) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy the files of a folder that exist."""
    for name in names:
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())


def _from_vocabulary(folder: Path) -> tokenizers.Tokenizer:
    """GPT-2's and OPT's byte-level BPE from the two files of their slow tokenizers."""
    try:
        model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{folder}: vocab.json and merges.txt are not a tokenizer: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    settings = read_settings(folder / "special_tokens_map.json") | read_settings(folder / SETTINGS)
    names = {special_token(settings, f"{role}_token") for role in ("bos", "eos", "pad", "unk")}
    tokenizer.add_special_tokens(sorted(name for name in names if name))
    return tokenizer


def _bytes_as_bpe() -> tokenizers.Tokenizer:
    """``ByteTokenizer`` as a tokenizer.json; byte 0, which never occurs in text, ends a text."""
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # mapped to themselves
    others = [byte for byte in range(256) if byte not in printable]
    of_byte = {byte: chr(byte) for byte in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    assert sorted(of_byte.values()) == characters
    vocabulary = {of_byte[byte]: byte for byte in range(1, 256)} | {END_OF_TEXT: 0}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _named(tokenizer: tokenizers.Tokenizer, ids: Any) -> str | None:
    """The token of an id, or of the first of several."""
    number = ids[0] if isinstance(ids, list) and ids else ids
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return tokenizer.id_to_token(number) if 0 <= number < 2**32 else None
