"""Files that are no tokenizers, and texts that a tokenizer cannot encode."""

import json
from pathlib import Path
from typing import Any

import pytest

from zerojax.run.data.formats import DataError
from zerojax.run.data.tokenizer import END_OF_TEXT, BPETokenizer, load_tokenizer


def tokenizer_json(path: Path, **parts: Any) -> Path:
    """A tokenizer.json of two words, with other parts."""
    added = {"id": 0, "content": END_OF_TEXT, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {END_OF_TEXT: 0, "a": 1}}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    whole = {
        "version": "1.0",
        "added_tokens": [added | flags],
        "model": model,
        **dict.fromkeys(names),
        **parts,
    }
    path.write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize(
    "normalizer",
    [{"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "unknown"}],  # the former panics
)
def test_a_file_that_is_no_tokenizer_is_refused_in_one_line(
    tmp_path: Path, normalizer: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tokenizer_json(tmp_path / "tokenizer.json", normalizer=normalizer)
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer file: \w"):
        load_tokenizer(path)
    assert capfd.readouterr().err == ""


def test_a_text_that_a_tokenizer_cannot_encode_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_json(tmp_path / "tokenizer.json"))
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.encode(b"a").tolist() == [1]
    message = "the tokenizer cannot encode a text: .*UNK"
    with pytest.raises(DataError, match=message):
        tokenizer.encode(b"b")
    with pytest.raises(DataError, match=message):
        tokenizer.encode_batch([b"a", b"b"])
    with pytest.raises(DataError, match=message):
        tokenizer.encode_spans(["b"])
