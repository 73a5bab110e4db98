"""Safetensors files and indices that break a rule of the format are refused in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_models import FIXTURES
from safetensors import safe_open

from zerojax.errors import ZeroError
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles

LLAMA = FIXTURES / "llama2"
INDEX = "model.safetensors.index.json"


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


DAMAGED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "header too small"),
    "a header longer than the file": (file_of({"a": entry()}, length=10**6), "invalid header length"),
    "a header of 2**64 - 1 bytes": (b"\xff" * 64, "header too large"),
    "no JSON": (file_of(b"{not json}"), "invalid JSON"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "invalid UTF-8"),
    "no tensor": (file_of({}, b""), "it has no tensors"),
    "nested without end": (file_of(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"), "recursion limit"),
    "a key twice": (file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)), "given twice: 'a'"),
    "metadata of numbers": (file_of({"__metadata__": {"x": 1}, "a": entry()}), "expected a string"),
    "a dtype that JAX lacks": (
        file_of({"a": entry("C64", [1])}),
        "'a' has dtype C64, which is none of F32",
    ),
    "a negative shape": (file_of({"a": entry(shape=[-1, -2])}), "invalid value: integer `-1`"),
    "too many dimensions": (file_of({"a": entry(shape=[1] * 70 + [2])}), "maximum supported dimension"),
    "a huge shape": (file_of({"a": entry(shape=[2**40, 2**40])}), "overflow"),
    "a huge shape of nothing": (
        file_of({"a": entry(shape=[2**62, 0], offsets=[0, 0]), "b": entry()}),
        "array is too big",
    ),
    "a wrong shape": (file_of({"a": entry(shape=[3])}), "invalid shape"),
    "offsets the wrong way round": (file_of({"a": entry(offsets=[8, 0])}), "invalid offset for tensor `a`"),
    "an overlap": (file_of({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "offset for tensor `b`"),
    "a hole": (file_of({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "offset for tensor `b`"),
    "bytes that are missing": (file_of({"a": entry()}, bytes(7)), "file not fully covered"),
    "bytes left over": (file_of({"a": entry()}, bytes(9)), "file not fully covered"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_a_line(name: str, tmp_path: Path):
    data, message = DAMAGED[name]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ZeroError, match=f"not a whole safetensors file: .*{message}") as error:
        SafetensorFiles(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "model.safetensors"))
    assert str(error.value).isprintable()


def test_what_the_format_allows_is_read(tmp_path: Path):
    """A scalar, a tensor of nothing, any order of names, blanks after the header."""
    header = {
        "__metadata__": {"format": "pt"},
        "z": entry("I16", [], [0, 2]),
        "nothing": entry("F32", [0, 3], [2, 2]),
        "a": entry("BF16", [1, 3], [2, 8]),
    }
    (tmp_path / "model.safetensors").write_bytes(
        file_of(json.dumps(header).encode() + b"   ", bytes(range(8)))
    )
    files = SafetensorFiles(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as library:
        assert set(library.keys()) == files.specs.keys()
        for name in library.keys():  # noqa: SIM118  (no mapping)
            np.testing.assert_array_equal(files.read(name), library.get_tensor(name))


def shards(folder: Path, change: dict[str, Any]) -> Path:
    """llama2's five files, with an index of which some entries are changed."""
    for file in LLAMA.glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    index = json.loads((LLAMA / INDEX).read_text())
    index["weight_map"] |= change
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"a": "../secret.safetensors"},
            "'a' is listed in '../secret.safetensors', which is not a file of this",
        ),
        ({"a": "/etc/secret.safetensors"}, "'a' is listed in '/etc/secret.safetensors'"),
        ({"a": ".."}, "'a' is listed in '..'"),
        ({"a": ""}, "'a' is listed in ''"),
        ({"a": "config.json"}, "'a' is listed in 'config.json'"),
        ({"a": 3}, "'a' is listed in 3"),
        ({"a": ["x.safetensors"]}, "'a' is listed in "),
        ({"a": "none.safetensors"}, "none.safetensors: No such file"),
        ({"a": "x\0.safetensors"}, r"'a' is listed in 'x\\x00"),
        ({"a": "-" * 300 + ".safetensors"}, "'a' is listed in"),
        ({"a": "model-00001-of-00005.safetensors"}, "lists 'a', which model-00001-of-00005.*does not have"),
        (
            {"model.norm.weight": "model-00001-of-00005.safetensors"},
            "'model.norm.weight', which .* lists in model-00001",
        ),
    ],
)
def test_an_index_that_the_files_do_not_bear_out(change: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ZeroError, match=message):
        SafetensorFiles(shards(tmp_path, change))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [["a", "b"]]}', "[" * 5000, "\xff"]
)
def test_a_file_that_is_no_index_is_refused(text: str, tmp_path: Path):
    shards(tmp_path, {})
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ZeroError, match="not an index of safetensors files"):
        SafetensorFiles(tmp_path)


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path):
    shards(tmp_path, {})
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ZeroError, match=r"has 'model.norm.weight', which .* lists nowhere"):
        SafetensorFiles(tmp_path)
