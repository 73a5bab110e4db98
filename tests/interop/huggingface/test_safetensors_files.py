"""Safetensors files and indices that break a rule of the format are refused in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_models import FIXTURES
from safetensors import SafetensorError, safe_open

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
    "nothing": (b"", "a header of 0 bytes in a file of 0"),
    "half a length": (b"\x10\0\0", "in a file of 3"),
    "a header longer than the file": (file_of({"a": entry()}, length=10**6), "a header of 1,000,000 bytes"),
    "a header of 2**63 bytes": (
        file_of({"a": entry()}, length=2**63),
        "a header of 9,223,372,036,854,775,808 bytes",
    ),
    "a header of 2**64 - 1 bytes": (b"\xff" * 64, "a header of 18,446,744,073,709,551,615 bytes"),
    "no JSON": (file_of(b"{not json}"), "not a whole safetensors file: Expecting property name"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "can't decode byte 0xff"),
    "no object": (file_of([entry()]), "its header is not a JSON object"),
    "no tensor": (file_of({}, b""), "0 tensors end"),
    "nested without end": (file_of(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"), "nested too deeply"),
    "a key twice": (file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)), "given twice: 'a'"),
    "metadata of numbers": (file_of({"__metadata__": {"x": 1}, "a": entry()}), "__metadata__ ="),
    "no entry": (file_of({"a": 3}), "'a' has no dtype"),
    "no shape": (file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}), "'a' has no dtype, shape"),
    "an unknown dtype": (file_of({"a": entry("F4")}), "'a' is of dtype 'F4': one of F32"),
    "a list for a dtype": (file_of({"a": entry(["F32"])}), r"'a' is of dtype \['F32'\]"),
    "a text for a shape": (file_of({"a": entry(shape="2")}), "'a' has shape '2'"),
    "a fraction in a shape": (file_of({"a": entry(shape=[2.0])}), r"'a' has shape \[2.0\]"),
    "true in a shape": (file_of({"a": entry(shape=[True, 2])}), r"'a' has shape \[True, 2\]"),
    "a negative shape": (file_of({"a": entry(shape=[-1, -2])}), r"'a' has shape \[-1, -2\]"),
    "a shape without end": (file_of({"a": entry(shape=[1] * 33 + [2])}), "'a' has shape"),
    "a huge shape": (file_of({"a": entry(shape=[2**40, 2**40])}), "'a' has 8 bytes, but shape"),
    "a huge shape of nothing": (
        file_of({"a": entry(shape=[2**40, 2**40, 0], offsets=[0, 0]), "b": entry()}),
        "'a' has 0 bytes, but shape",
    ),
    "a shape beyond 64 bits": (file_of({"a": entry(shape=[2**70])}), "'a' has 8 bytes, but shape"),
    "a shape of 5,000 digits": (
        file_of(json.dumps({"a": entry(shape="@")}).replace('"@"', "9" * 5000).encode()),
        "more than 300 digits",
    ),
    "a wrong shape": (file_of({"a": entry(shape=[3])}), r"'a' has 8 bytes, but shape \[3\] of F32"),
    "a wrong dtype": (file_of({"a": entry("F16")}), r"'a' has 8 bytes, but shape \[2\] of F16"),
    "one offset": (file_of({"a": entry(offsets=[8])}), r"'a' has data_offsets \[8\]"),
    "negative offsets": (file_of({"a": entry(offsets=[-8, 0])}), r"'a' has data_offsets \[-8, 0\]"),
    "offsets the wrong way round": (file_of({"a": entry(offsets=[8, 0])}), "'a' has -8 bytes"),
    "an overlap": (
        file_of({"a": entry(), "b": entry()}),
        "'b' begins at byte .* but the tensor before it ends",
    ),
    "an overlap by half": (
        file_of({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        "'b' begins at byte",
    ),
    "a hole": (file_of({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "'b' begins at byte"),
    "a hole at the start": (file_of({"a": entry(offsets=[8, 16])}, bytes(16)), "'a' begins at byte"),
    "bytes that are missing": (file_of({"a": entry()}, bytes(7)), "1 tensors end at byte"),
    "bytes left over": (file_of({"a": entry()}, bytes(9)), "1 tensors end at byte"),
}
STRICTER = {"nothing", "no tensor", "a key twice", "a shape without end", "an unknown dtype"}
"""Damage that the safetensors library accepts (or, for an unknown dtype, refuses differently)."""


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_a_line(name: str, tmp_path: Path):
    data, message = DAMAGED[name]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ZeroError, match=message) as error:
        SafetensorFiles(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "model.safetensors"))
    assert str(error.value).isprintable()
    if name not in STRICTER:
        with pytest.raises(SafetensorError), safe_open(tmp_path / "model.safetensors", framework="numpy"):
            pass


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
def test_what_is_no_index(text: str, tmp_path: Path):
    shards(tmp_path, {})
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ZeroError, match="not an index of safetensors files"):
        SafetensorFiles(tmp_path)


def test_a_tensor_that_the_index_does_not_list(tmp_path: Path):
    shards(tmp_path, {})
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ZeroError, match=r"has 'model.norm.weight', which .* lists nowhere"):
        SafetensorFiles(tmp_path)
