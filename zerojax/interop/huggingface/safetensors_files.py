"""Safetensors files: reads parts of tensors, and writes tensors one at a time.

The safetensors library checks the files. It cannot read float8 without PyTorch, and to write a file it needs
all its tensors at once. Therefore this module reads and writes the data; the tests compare both directions
with the library. The format: eight bytes of header length, a JSON header with each tensor's dtype, shape and
offsets, then the data (little-endian, row-major).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped
from safetensors import SafetensorError, safe_open

from zerojax.errors import ConfigurationError, file_errors
from zerojax.validation.untrusted import parse_json, printable, short

SINGLE = "model.safetensors"
"""A model's file. A model in several files has an index named after it with ".index.json"."""
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    **{f"{kind}{8 * size}": np.dtype(f"{kind}{size}".lower()) for kind in "IU" for size in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
}
"""Names in a header -> NumPy dtypes (bfloat16 and float8 are from ml_dtypes)."""
_FILE_NAME = re.compile(r"\w[\w. =+-]{0,200}\.safetensors")


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor.

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


Specs = dict[str, TensorSpec]
"""Dtypes and shapes of tensors, by name."""


class SafetensorFiles:
    """The tensors of a folder, read on demand.

    The folder holds one file, named ``single``, or several files and an index.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self.specs: Specs = {}
        index = folder / _index_of(single)
        listed = _listed(folder / single, index)
        for file in sorted(set(listed.values())) or [single]:
            path = folder / file
            for name, (spec, values) in _mapped(path).items():
                self.specs[name], self._arrays[name] = spec, values
                if listed and listed.get(name) != file:
                    where = f"in {listed[name]}" if name in listed else "nowhere"
                    raise ConfigurationError(f"{path} has {short(name)}, which {index.name} lists {where}")
        if absent := sorted(listed.keys() - self.specs.keys()):
            raise ConfigurationError(
                f"{index} lists {short(absent[0])}, which {listed[absent[0]]} does not have"
            )

    def read(self, name: str, *ranges: slice) -> Shaped[np.ndarray, "..."]:
        """Read a part of a tensor in its dtype: one range per dimension, or none for all of it."""
        return np.array(self._arrays[name][ranges])

    def read_repeated(
        self, name: str, block: Sequence[int], shape: Sequence[int], ranges: Sequence[slice]
    ) -> Float32[np.ndarray, "..."]:
        """Read a tensor of one number per block, and repeat each number for the elements of its block, fp32.

        ``block`` is the size of a block in a larger tensor of this ``shape``; the last blocks may be smaller.
        ``ranges`` are a part of the larger tensor, one non-empty range per dimension.
        """
        places = [np.arange(n)[own] // size for n, own, size in zip(shape, ranges, block, strict=True)]
        numbers = self.read(name, *(slice(own[0], own[-1] + 1) for own in places)).astype(np.float32)
        return numbers[np.ix_(*(own - own[0] for own in places))]


def _mapped(path: Path) -> dict[str, tuple[TensorSpec, np.ndarray]]:
    """The tensors of a file, as memory-mapped views of it.

    The library checks the rules of the format. It does not return where the tensors begin, and keeps only the
    last of two tensors with the same name.
    """
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length).decode())
        header.pop("__metadata__", None)
        if not header:
            raise ValueError("it has no tensors")
        data = np.memmap(path, np.uint8, "r", 8 + length).view(np.ndarray)
        found = dict[str, tuple[TensorSpec, np.ndarray]]()
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise ValueError(
                    f"{short(name)} has dtype {entry['dtype']}, which is none of {', '.join(DTYPES)}"
                )
            spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
            values = data[slice(*entry["data_offsets"])].view(DTYPES[spec.dtype]).reshape(spec.shape)
            found[name] = spec, values
        return found
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: not a whole safetensors file: {printable(str(error))[:200]}"
        ) from error


def _index_of(single: str) -> str:
    return f"{single}.index.json"


def _listed(single: Path, index: Path) -> dict[str, str]:
    """The index's map from tensor to file; empty if there is a single file."""
    folder = single.parent
    if index.is_file():
        with file_errors(index, content="not an index of safetensors files"):
            return _check_index(parse_json(index.read_text(encoding="utf-8")))
    if single.is_file():
        return {}
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ConfigurationError(
            f"{folder} has PyTorch pickles, which run code when they are read. Save the model again with "
            "transformers' save_pretrained, which writes safetensors"
        )
    raise ConfigurationError(f"{folder} has no {single.name} and no {index.name}: name a folder with one")


def _check_index(values: Any) -> dict[str, str]:
    listed = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ValueError("it has no weight_map")
    for name, file in listed.items():
        # Only a bare name, never a path.
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise ValueError(f"{short(name)} is listed in {short(file)}, which is not a file of this folder")
    return listed


def plan_shards(specs: Mapping[str, TensorSpec], most: float, single: str) -> dict[str, list[str]]:
    """The tensors of each file, in order. A file has at most ``most`` bytes, or a single larger tensor."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, spec in specs.items():
        if shards[-1] and used + spec.nbytes > most:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += spec.nbytes
    if len(shards) == 1:
        return {single: shards[0]}
    total, stem = len(shards), single.removesuffix(".safetensors")
    return {f"{stem}-{i:05}-of-{total:05}.safetensors": names for i, names in enumerate(shards, 1)}


class SafetensorWriter:
    """Writes headers and index, then tensors or parts of tensors in any order.

    Args:
        folder: the folder of the files.
        specs: every tensor that will be written.
        most: most bytes of tensors in a file, except for a single larger tensor.
        single: the file's name, if there is only one.
    """

    def __init__(
        self, folder: Path, specs: Mapping[str, TensorSpec], most: float, single: str = SINGLE
    ) -> None:
        self._specs = specs
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._missing = {name: spec.nbytes for name, spec in specs.items()}
        self._files: list[BinaryIO] = []
        shards = plan_shards(specs, most, single)
        for file_name, names in shards.items():
            self._open(folder / file_name, names)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
                "weight_map": {name: file for file, names in shards.items() for name in names},
            }
            (folder / _index_of(single)).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _open(self, path: Path, names: Iterable[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            spec, start = self._specs[name], end
            end += spec.nbytes
            header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format aligns the data
        file = path.open("w+b")
        self._files.append(file)
        file.write(len(text).to_bytes(8, "little") + text)
        start = 8 + len(text)
        file.truncate(start + end)
        for name in names:
            self._places[name] = (file, start + header[name]["data_offsets"][0])

    def write(self, name: str, values: Shaped[np.ndarray, "..."], *region: slice) -> None:
        """Write one tensor, or a part of it.

        Args:
            name: the tensor.
            values: in the tensor's dtype; not written yet.
            *region: where the values lie: ranges of the first axes, the first with step 1; none for all.
        """
        spec, size = self._specs[name], values.nbytes
        rows, *rest = region or (slice(None),)
        first, stop, step = rows.indices((*spec.shape, 1)[0])
        block = TensorSpec(spec.dtype, (stop - first, *spec.shape[1:]) if spec.shape else ())
        assert (values.ndim, values.dtype, step) == (len(spec.shape), DTYPES[spec.dtype], 1), name
        self._missing[name] -= size
        file, offset = self._places[name]
        offset += first * math.prod(spec.shape[1:]) * values.itemsize
        if values.shape != block.shape:  # keep the rows' other values
            file.seek(offset)
            whole = np.frombuffer(file.read(block.nbytes), values.dtype).reshape(block.shape).copy()
            assert whole[:, *rest].shape == values.shape, name
            whole[:, *rest] = values
            values = whole
        file.seek(offset)
        file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Close the files; every tensor must have been written."""
        for file in self._files:
            file.close()
        missing = sorted(name for name, size in self._missing.items() if size)
        assert not missing, f"never written: {missing}"
