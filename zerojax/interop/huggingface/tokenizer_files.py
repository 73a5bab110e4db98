"""Reads and writes tokenizers of Hugging Face folders: tokenizer.json, or vocab.json with merges.txt."""

import json
import re
from collections.abc import Collection
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
    tokenizers_errors,
)
from zerojax.validation.untrusted import short

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
KEPT = (
    *(TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "tokenizer.model", GENERATION, "chat_template.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
"""Files of a folder that a run keeps, so that an export can write them back."""
_LIKE_GPT2 = (None, "GPT2Tokenizer", "GPT2TokenizerFast")
"""Values of tokenizer_class that cut text as GPT-2 does; None is a missing key."""
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in transformers' order


def read_tokenizer(folder: Path, config: dict[str, Any]) -> BPETokenizer | None:
    """The tokenizer of a Hugging Face folder, or None if it has none.

    ``config`` is the folder's config.json, which may name the tokens that begin and end a text.
    """
    path = folder / TOKENIZER
    if path.is_file():
        inner = read_inner(path)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        inner = _from_vocabulary(folder)
    elif found := [name for name in ("tokenizer.model", "spiece.model") if (folder / name).is_file()]:
        raise DataError(f"{folder / found[0]}: SentencePiece models are not supported. {_way_out(folder)}")
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


def _way_out(folder: Path) -> str:
    return (
        f"Write {TOKENIZER} with transformers' "
        f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
    )


def _from_vocabulary(folder: Path) -> tokenizers.Tokenizer:
    """GPT-2's and OPT's byte-level BPE, from the files of their slow tokenizers."""
    settings = read_settings(folder / "special_tokens_map.json") | read_settings(folder / SETTINGS)
    if (kind := settings.get("tokenizer_class")) not in _LIKE_GPT2:
        raise DataError(
            f"{folder}: vocab.json and merges.txt of tokenizer_class = {short(kind)} are not supported, only "
            f"GPT-2's. {_way_out(folder)}"
        )
    special = _special_tokens(settings)
    added = _added_tokens(folder, settings, special)
    with tokenizers_errors(f"{folder}: vocab.json and merges.txt are not a tokenizer"):
        files = str(folder / "vocab.json"), str(folder / "merges.txt")
        vocabulary, merges = tokenizers.models.BPE.read_file(*files)
        names = {number: name for name, number in vocabulary.items()}
        for number, token in added.items():
            name = token.content
            if vocabulary.setdefault(name, number) != number or names.setdefault(number, name) != name:
                raise ValueError(f"added token {short(name)} = {number} contradicts vocab.json")
        for name in special:
            vocabulary.setdefault(name, 1 + max(vocabulary.values()))
        # In the vocabulary they keep these ids; otherwise the library would assign new ones.
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        known = [token.content for token in added.values()]
        tokenizer.add_tokens(list(added.values()))
        tokenizer.add_special_tokens([name for name in special if name not in known])
    blank = settings.get("add_prefix_space") is True
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=blank)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _special_tokens(settings: dict[str, Any]) -> list[str]:
    """The special tokens that the settings name."""
    names = [special_token(settings, f"{role}_token") for role in _ROLES]
    key = "additional_special_tokens"
    others = settings.get(key) or []
    if not isinstance(others, list):
        raise DataError(f"{key} = {short(others)} should be a list")
    names += [special_token({key: one}, key) for one in others]
    return list(dict.fromkeys(name for name in names if name))


def _added_tokens(
    folder: Path, settings: dict[str, Any], special: Collection[str]
) -> dict[int, tokenizers.AddedToken]:
    """A slow tokenizer's tokens outside its vocabulary, by id.

    tokenizer_config.json lists them with rules for finding them in text. Older versions of transformers wrote
    added_tokens.json instead.
    """
    tables = settings.get("added_tokens_decoder")
    if tables is None:
        numbers = read_settings(folder / "added_tokens.json")
        tables = {number: {"content": content} for content, number in numbers.items()}
    found: dict[int, tokenizers.AddedToken] = {}
    for number, table in tables.items() if isinstance(tables, dict) else [("", tables)]:
        content = table.get("content") if isinstance(table, dict) else None
        if not (isinstance(content, str) and content and re.fullmatch(r"\d{1,18}", str(number), re.ASCII)):
            raise DataError(
                f"{folder}: added token {short(number)} = {short(table)} should be an id and a text"
            )
        flags = {name: table.get(name) is True for name in ("lstrip", "rstrip", "single_word", "special")}
        flags["special"] |= content in special
        normalized = table.get("normalized", not flags["special"]) is True
        found[int(number)] = tokenizers.AddedToken(content, normalized=normalized, **flags)
    return dict(sorted(found.items()))


def _bytes_as_bpe() -> tokenizers.Tokenizer:
    """``ByteTokenizer`` as a tokenizer.json; byte 0, which never occurs in text, ends a text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # A printable byte is its own character. The other bytes have the characters behind these.
    order = sorted(range(256), key=lambda byte: (chr(byte) not in alphabet, byte))
    of_byte = dict(zip(order, alphabet, strict=True))
    vocabulary = {of_byte[byte]: byte for byte in range(1, 256)} | {END_OF_TEXT: 0}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _named(tokenizer: tokenizers.Tokenizer, ids: Any) -> str | None:
    """The token with an id, or with the first of several ids."""
    number = ids[0] if isinstance(ids, list) and ids else ids
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return tokenizer.id_to_token(number) if 0 <= number < 2**32 else None
