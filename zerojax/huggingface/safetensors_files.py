"""Safetensors files: parts of tensors read without the rest, tensors written one after the other.

The safetensors library writes a file only from all of its tensors at once, and reads no float8 without
PyTorch; the tests hold both ways against it. The format: eight bytes of header length, a JSON header with
each tensor's dtype, shape and offsets, then the bytes (little-endian, row-major).
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from zerojax.errors import ZeroError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""Names in a header, and the dtypes of numpy (bfloat16 and float8 are those that JAX uses)."""
_LONGEST_HEADER = 100_000_000  # the library's own limit


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of a tensor.

    Attributes:
        dtype: "F32", "BF16", ...
        shape: its dimensions.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class SafetensorFiles:
    """The tensors of a model's folder; bytes are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Args:
            folder: holds model.safetensors, or several files and model.safetensors.index.json.

        Raises:
            ZeroError: there are none, one is damaged, or the index names what is not there.
        """
        self._arrays: dict[str, np.ndarray] = {}
        self.specs: dict[str, TensorSpec] = {}
        listed = _listed(folder)
        for path in sorted({folder / name for name in listed.values()} or {folder / SINGLE}):
            for name, spec, start in _read_header(path):
                self.specs[name] = spec
                self._arrays[name] = _mapped(path, spec, start)
        if absent := sorted(listed.keys() - self.specs.keys()):
            raise ZeroError(f"{folder / INDEX} lists {absent[0]}, which {listed[absent[0]]} does not have")

    def read(self, name: str, *ranges: slice) -> Shaped[np.ndarray, "..."]:
        """A part of a tensor, in its own dtype: one range for each dimension; without any, all of it."""
        return np.array(self._arrays[name][ranges])


def _read_header(path: Path) -> list[tuple[str, TensorSpec, int]]:
    """Each tensor of a file, and where its bytes begin."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length)) if length <= _LONGEST_HEADER else {}
            size = file.seek(0, 2)
    except OSError as error:
        raise ZeroError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ZeroError(f"{path}: not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    found = []
    end = 8 + length
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ZeroError(f"{path}: {name} is of dtype {entry['dtype']}: one of {', '.join(DTYPES)}")
        spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        if stop - start != spec.nbytes:
            raise ZeroError(f"{path}: damaged: {name} has {stop - start} bytes, not {spec.nbytes}")
        end = max(end, stop)
        found.append((name, spec, start))
    if not found or end != size:
        raise ZeroError(f"{path}: not a whole safetensors file: {size} bytes, and its header says {end}")
    return found


def _mapped(path: Path, spec: TensorSpec, start: int) -> np.ndarray:
    """A tensor as a view of its file: only what is read of it comes into memory."""
    if 0 in spec.shape:
        return np.zeros(spec.shape, DTYPES[spec.dtype])
    raw = np.memmap(path, np.uint8, "r", start, (spec.nbytes,))
    return raw.view(np.ndarray).view(DTYPES[spec.dtype]).reshape(spec.shape)


def _listed(folder: Path) -> dict[str, str]:
    """The index's map from tensor to file; empty where there is one file alone."""
    index = folder / INDEX
    if index.is_file():
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ZeroError(f"{index}: not an index of safetensors files: {error!r}") from error
    if (folder / SINGLE).is_file():
        return {}
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ZeroError(
            f"{folder} has PyTorch pickles, which run code when they are read: save the model again by "
            "transformers' save_pretrained, which writes safetensors"
        )
    raise ZeroError(f"{folder} has no {SINGLE} and no {INDEX}")


def plan_shards(specs: Mapping[str, TensorSpec], most: int) -> dict[str, list[str]]:
    """Which tensors go to which file, in the order given, files of at most `most` bytes where that can be."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, spec in specs.items():
        if shards[-1] and used + spec.nbytes > most:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += spec.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    total = len(shards)
    return {f"model-{i:05}-of-{total:05}.safetensors": names for i, names in enumerate(shards, 1)}


class SafetensorWriter:
    """Files whose tensors are written in any order, one at a time."""

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], most: int) -> None:
        """Write headers and index, and make room.

        Args:
            folder: where to; there already.
            specs: every tensor that will be written.
            most: bytes of tensors in a file; one larger than that gets a file of its own.
        """
        self._specs = specs
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._files: list[BinaryIO] = []
        shards = plan_shards(specs, most)
        for file_name, names in shards.items():
            self._open(folder / file_name, names)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
                "weight_map": {name: file for file, names in shards.items() for name in names},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _open(self, path: Path, names: Iterable[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            spec = self._specs[name]
            offsets = [end, end + spec.nbytes]
            header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
            end = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format aligns the data
        file = path.open("wb")
        self._files.append(file)
        file.write(len(text).to_bytes(8, "little") + text)
        start = 8 + len(text)
        file.truncate(start + end)
        for name in names:
            self._places[name] = (file, start + header[name]["data_offsets"][0])

    def write(self, name: str, values: Shaped[np.ndarray, "..."]) -> None:
        """Write one tensor.

        Args:
            name: one of those announced, not written yet.
            values: of the shape and dtype announced.
        """
        spec = self._specs[name]
        assert (values.shape, values.dtype) == (spec.shape, DTYPES[spec.dtype]), name  # our own arithmetic
        file, offset = self._places.pop(name)
        file.seek(offset)
        file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Finish the files; every tensor must have been written."""
        for file in self._files:
            file.close()
        assert not self._places, f"never written: {sorted(self._places)}"
