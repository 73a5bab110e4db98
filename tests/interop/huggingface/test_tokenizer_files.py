"""Tokenizers from Hugging Face folders and back."""

import json
from pathlib import Path

import pytest
import tokenizers
from hf_models import FIXTURES

from zerojax.interop.huggingface.tokenizer_files import read_tokenizer, write_tokenizer
from zerojax.run.data.formats import DataError
from zerojax.run.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer

TEXT = "the quick brown fox\n all work and no play"


def library(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def read(folder: Path, **config: object) -> BPETokenizer:
    tokenizer = read_tokenizer(folder, config)
    assert tokenizer is not None
    return tokenizer


def test_a_tokenizer_json_is_read_with_its_special_tokens(tmp_path):
    tokenizer = read(FIXTURES / "llama2")
    assert tokenizer.encode(TEXT.encode()).tolist() == library(FIXTURES / "llama2").encode(TEXT).ids
    assert (tokenizer.end_of_text, tokenizer.begin_of_text) == (0, 0)
    assert tokenizer.decode(tokenizer.encode(TEXT.encode())) == TEXT
    # A run keeps which tokens they are, as the next reader of the same folder sees.
    tokenizer = BPETokenizer(library(FIXTURES / "llama2"), "<pad>", "<|end|>")
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert (again.end_of_text, again.begin_of_text) == (1, 0)


def test_special_tokens_are_named_by_the_tokenizer_or_numbered_by_the_model(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((FIXTURES / "llama2" / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="no end-of-text token"):
        read(tmp_path)
    found = read(tmp_path, eos_token_id=[1, 0], bos_token_id=0)
    assert (found.end_of_text, found.begin_of_text) == (1, 0)
    settings = {"eos_token": {"content": "<|end|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read(tmp_path, eos_token_id=1).end_of_text == 0


def test_vocabulary_and_merges_are_a_tokenizer(tmp_path):
    # OPT's files: no tokenizer.json.
    library(FIXTURES / "opt").model.save(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merges.txt", "vocab.json"]
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    tokenizer = read(tmp_path)
    assert tokenizer.encode(TEXT.encode()).tolist() == library(FIXTURES / "opt").encode(TEXT).ids
    assert tokenizer.end_of_text == 0


ADDED = {"<|im_start|>": 400, "<|im_end|>": 300, "word": 301}


@pytest.mark.parametrize("legacy", [True, False])
def test_added_tokens_of_a_vocabulary_have_their_own_ids(legacy, tmp_path):
    library(FIXTURES / "opt").model.save(str(tmp_path))
    assert max(json.loads((tmp_path / "vocab.json").read_text()).values()) < 300
    settings = {
        "tokenizer_class": "GPT2Tokenizer", "eos_token": {"content": "<|im_end|>"}, "pad_token": "[PAD]",
        "additional_special_tokens": ["<|im_start|>"],
    }  # fmt: skip
    if legacy:
        (tmp_path / "added_tokens.json").write_text(json.dumps(ADDED))
    else:
        tables = {
            str(number): {"content": name, "special": name == "<|im_end|>", "lstrip": name != "<|im_end|>"}
            for name, number in ADDED.items()
        }
        settings |= {"added_tokens_decoder": tables}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read(tmp_path)
    assert (tokenizer.end_of_text, tokenizer.vocab_size) == (300, 402)  # "[PAD]" is in no file
    plain = [tokenizer.encode(text).tolist() for text in (b"the ", b"the")]
    found = tokenizer.encode(b" <|im_start|>the word<|im_end|>[PAD]").tolist()
    assert found[legacy:] == [400, *plain[not legacy], 301, 300, 401]
    assert tokenizer.decode([400, 301, 300, 401]) == "word"
    write_tokenizer(tokenizer, tmp_path)
    assert read(tmp_path).encode(b" <|im_start|>the word<|im_end|>[PAD]").tolist() == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tokenizer_class": "Qwen2Tokenizer"},
            r"'Qwen2Tokenizer' are not supported, only GPT-2's. Write tok",
        ),
        (
            {"added_tokens_decoder": {"1": {"content": "<s>"}}},
            "added token '<s>' = 1 contradicts vocab.json",
        ),
        (
            {"added_tokens_decoder": {"300": {"content": "own"}}},
            "added token 'own' = 300 contradicts vocab.json",
        ),
        ({"added_tokens_decoder": {"-1": {"content": "<s>"}}}, "should be an id and a text"),
        ({"added_tokens_decoder": {str(2**40): {"content": "<s>"}}}, "are not a tokenizer"),
        ({"added_tokens_decoder": [3]}, "should be an id and a text"),
        ({"additional_special_tokens": 3}, "additional_special_tokens = 3 should be a list"),
    ],
)
def test_added_tokens_that_are_not_tokens_are_refused(settings, message, tmp_path):
    library(FIXTURES / "opt").model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=message):
        read_tokenizer(tmp_path, {})


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    assert read_tokenizer(tmp_path, {}) is None
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        DataError, match=r"SentencePiece models are not supported. Write tokenizer\.json with"
    ):
        read_tokenizer(tmp_path, {})
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{")
    with pytest.raises(DataError, match=r"vocab\.json and merges\.txt are not a tokenizer"):
        read_tokenizer(tmp_path, {})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer file"):
        read_tokenizer(tmp_path, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"eos_token": 5}', "eos_token = 5 should be a string"),
        ('{"eos_token": {"content": ["a"]}}', r"eos_token = \['a'\] should be a string"),
        ("[]", "not a JSON object"),
        ("[" * 5000, "nested too deeply|not JSON"),
    ],
)
def test_tokenizer_settings_that_are_not_settings_are_refused(settings, message, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((FIXTURES / "llama2" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match=message):
        read_tokenizer(tmp_path, {})


@pytest.mark.parametrize("number", [-1, 10**26, True, 1.0, "0"])
def test_a_number_that_is_no_token_is_refused(number, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((FIXTURES / "llama2" / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="no end-of-text token"):
        read_tokenizer(tmp_path, {"eos_token_id": number})


def test_bytes_are_written_as_a_tokenizer_of_the_same_ids(tmp_path):
    write_tokenizer(ByteTokenizer(), tmp_path)
    text = bytes(range(1, 256)).decode("latin-1") + "\u00e9\U0001f600 def f(x):\n\treturn  x"
    theirs = library(tmp_path)
    assert theirs.encode(text).ids == ByteTokenizer().encode(text.encode()).tolist()
    assert theirs.decode(theirs.encode(text).ids) == text
    assert theirs.get_vocab_size() == 256
    assert read(tmp_path).end_of_text == ByteTokenizer.end_of_text
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["eos_token"] == "<|endoftext|>"
