"""The pieces of a train state, and where their elements are in the tensors of an export.

A device's shard is a range of a parameter's elements, row by row. A tensor of Hugging Face is a rectangle of
the parameter, perhaps transposed or interleaved with others. So a tensor's element is an affine function of
row and column. The manifest has these functions, and nothing is gathered or transposed before it is sent.
"""

import base64
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import jax
from jaxlib.xla_client import Device

from zerojax.errors import ConfigurationError
from zerojax.interop.engines.encoder import LARGEST, Cut
from zerojax.interop.engines.receiver.manifest import Strip
from zerojax.interop.huggingface.exporting import Target, write_settings
from zerojax.interop.huggingface.mapping import (
    Tensor,
    TensorParts,
    layers_of,
    place_of,
    tensors_at,
    tensors_of_state,
)
from zerojax.interop.huggingface.safetensors_files import DTYPES
from zerojax.run.config import RunConfig
from zerojax.run.run_dir import RunFolder
from zerojax.sharding.param_tree import from_tree
from zerojax.train.state import TrainState

Key = tuple[str, ...]
"""A parameter's path; of other state ("", name)."""


@dataclass(frozen=True)
class Part:
    """A shard that one device of this process sends.

    Attributes:
        key: the parameter.
        device: the device.
        layers: of the shard.
        cut: of each layer.
        dtype: the engine's, as a NumPy name.
        first: the number of its first piece; the others follow, layer by layer.
    """

    key: Key
    device: Device  # pyright: ignore[reportInvalidTypeForm]
    layers: int
    cut: Cut
    dtype: str
    first: int

    @property
    def numbers(self) -> range:
        """The numbers of its pieces."""
        return range(self.first, self.first + self.layers * self.cut.pieces)


def arrays_of(state: TrainState) -> dict[Key, jax.Array]:
    """The arrays that are sent, by key: parameters as they are stored, and the model's other state."""
    return from_tree(state.params) | {("", name): x for name, x in state.model_state.items()}


def pieces_of(
    state: TrainState, target: Target, files: Mapping[str, str], *, largest: int = LARGEST
) -> tuple[bytes, list[Part]]:
    """The manifest of a state, equal in all processes, and this process's parts.

    Args:
        state: the state, filled or abstract.
        target: the engine's tensors, from ``plan_export``.
        files: the model's other files, in base 64, by name.
        largest: most elements of a piece.

    Raises:
        ConfigurationError: the state has frozen weights, or tensors of different dtypes in one weight.
    """
    numbers = {name: i for i, name in enumerate(target.specs)}
    matrices: list[tuple[int, list[tuple[int, ...]]]] = []
    pieces: list[tuple[int, int, list[tuple[int, int, int]]]] = []
    parts: list[Part] = []
    for stored in _stored(state, target.parts):
        own = [[t for t in tensors if t.name in numbers] for tensors in stored.layers]
        dtypes = {target.specs[t.name].dtype for tensors in own for t in tensors}
        if len(dtypes) != 1:
            raise ConfigurationError(
                f"{'/'.join(stored.key)} is in tensors of dtypes {', '.join(sorted(dtypes))}: engines need "
                "one. Choose a dtype for all"
            )
        first = len(matrices)
        matrices += [
            (stored.width, [astuple(strip_of(t, numbers[t.name])) for t in tensors]) for tensors in own
        ]
        for (start, stop), device in stored.shards().items():
            cut = Cut.of(stop - start, largest)
            if device.process_index == jax.process_index():
                dtype = DTYPES[next(iter(dtypes))].name
                parts.append(Part(stored.key, device, len(own), cut, dtype, len(pieces)))
            begins = [start + i * cut.size for i in range(cut.pieces)]
            runs = [
                [(x - begin, one, end) for x, one, end in stored.runs(begin, min(begin + cut.size, stop))]
                for begin in begins
            ]
            pieces += [(first + layer, cut.size, run) for layer in range(len(own)) for run in runs]
    tensors = [(name, spec.dtype, spec.shape) for name, spec in target.specs.items()]
    manifest = {"files": files, "tensors": tensors, "matrices": matrices, "pieces": pieces}
    return json.dumps(manifest, separators=(",", ":")).encode(), parts


def files_of(target: Target, config: RunConfig, folder: RunFolder) -> dict[str, str]:
    """The files of an export besides its tensors, in base 64, by name."""
    with tempfile.TemporaryDirectory() as draft:
        write_settings(target, None, config, folder, Path(draft))
        return {
            path.name: base64.b64encode(path.read_bytes()).decode() for path in sorted(Path(draft).iterdir())
        }


@dataclass(frozen=True)
class _Stored:
    """An array of the state.

    Attributes:
        key: as in ``arrays_of``.
        array: it, or its description.
        stack: axes of layers, which come first.
        width: columns of a layer's matrix.
        layers: the tensors of each layer.
        runs: as ``ParamLayout.runs``.
    """

    key: Key
    array: jax.Array | jax.ShapeDtypeStruct
    stack: int
    width: int
    layers: list[list[Tensor]]
    runs: Callable[[int, int], Iterator[tuple[int, int, int]]]

    def shards(self) -> dict[tuple[int, int], Device]:  # pyright: ignore[reportInvalidTypeForm]
        """The ranges of a layer's stored elements, and the first device that has each."""
        sizes, found = self.array.shape[self.stack :], dict[tuple[int, int], Device]()
        rest = math.prod(sizes[1:])
        for device, index in self.array.sharding.devices_indices_map(self.array.shape).items():
            start, stop, _ = index[self.stack].indices(sizes[0]) if sizes else (0, 1, 1)
            found.setdefault((start * rest, stop * rest), device)
        return found


def _stored(state: TrainState, parts: TensorParts) -> Iterator[_Stored]:
    spec = state.spec
    if spec.frozen:
        raise ConfigurationError(
            f"engines get trained weights only, and {spec.frozen[0].name!r} is frozen: leave zero.frozen and "
            "[lora] out, or export the adapters by zerojax export --adapter"
        )
    arrays = arrays_of(state)
    for leaf in spec.weights:
        layers = [
            list(tensors_at(place_of(leaf, layer, parts.order), leaf.shape, parts))
            for layer in layers_of(leaf)
        ]
        width = leaf.shape[-1] if leaf.shape else 1
        yield _Stored(leaf.path, arrays[leaf.path], len(leaf.stack), width, layers, leaf.runs)
    others: dict[str, list[list[Tensor]]] = {}
    for name, _, tensor in tensors_of_state(state.model_state, parts):
        others.setdefault(name, []).append([tensor])
    for name, layers in others.items():
        x = state.model_state[name]
        shape = layers[0][0].weight
        yield _Stored(("", name), x, x.ndim - len(shape), shape[-1], layers, _whole)


def _whole(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    yield start, start, stop


def strip_of(tensor: Tensor, number: int) -> Strip:
    """A tensor as a rectangle of its weight's matrix; ``number`` is its place in the manifest."""
    part, columns, rows = tensor.part, tensor.columns, tensor.inputs
    height = rows.stop - rows.start
    offset = part.expert * height * tensor.outputs if part.experts and part.expert is not None else 0
    if part.transposed:
        steps = offset + part.first * height, 1, part.step * height
    else:
        steps = offset + part.first, tensor.outputs, part.step
    return Strip(number, rows.start, rows.stop, columns.start, columns.stop, *steps)
