"""The pieces of a train state, and where their elements are in the tensors of an export.

A device's shard is a range of a parameter's elements, row by row. A tensor of Hugging Face is a rectangle of
the parameter, perhaps transposed or interleaved with others. So a tensor's element is an affine function of
row and column. The manifest has these functions, and nothing is gathered or transposed before it is sent.

The scales of fp8 weights are a matrix too, with a row for each block of the weight's rows, and a column for
each block of columns.
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
from zerojax.interop.engines.encoder import Cut
from zerojax.interop.engines.receiver.manifest import Strip
from zerojax.interop.engines.scales import Blocks
from zerojax.interop.huggingface.exporting import Target, quantized_specs, write_settings
from zerojax.interop.huggingface.fp8_blocks import SCALES, FP8Blocks
from zerojax.interop.huggingface.mapping import (
    Tensor,
    TensorParts,
    layers_of,
    place_at,
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
        start: the first element of a layer, as it is stored.
        blocks: of fp8 weights, which share scales; otherwise None.
        scales: whether the part is the scales of the parameter ``key``.
    """

    key: Key
    device: Device
    layers: int
    cut: Cut
    dtype: str
    first: int
    start: int = 0
    blocks: Blocks | None = None
    scales: bool = False

    @property
    def numbers(self) -> range:
        """The numbers of its pieces."""
        return range(self.first, self.first + self.layers * self.cut.pieces)


def arrays_of(state: TrainState) -> dict[Key, jax.Array]:
    """The arrays that are sent, by key: parameters as they are stored, and the model's other state."""
    return from_tree(state.params) | {("", name): x for name, x in state.model_state.items()}


def pieces_of(
    state: TrainState,
    target: Target,
    files: Mapping[str, str],
    how: FP8Blocks | None = None,
) -> tuple[bytes, list[Part], dict[Key, Blocks]]:
    """The manifest of a state, equal in all processes; this process's parts; the blocks of fp8 weights.

    Args:
        state: the state, filled or abstract.
        target: the engine's tensors, from ``plan_export``.
        files: the model's other files, in base 64, by name.
        how: the quantization of the linear layers, checked by ``check_quantizable``; None for none.

    Raises:
        ConfigurationError: the state has frozen weights, or tensors of different dtypes in one weight.
    """
    quantized, specs = quantized_specs(state, target, how)
    numbers = {name: i for i, name in enumerate(specs)}
    matrices: list[tuple[int, list[tuple[int, ...]]]] = []
    pieces: list[tuple[int, int, list[tuple[int, int, int]]]] = []
    parts: list[Part] = []
    scaled: dict[Key, Blocks] = {}
    for stored in _stored(state, target.parts):
        own = [[t for t in tensors if t.name in numbers] for tensors in stored.layers]
        dtypes = {specs[t.name].dtype for tensors in own for t in tensors}
        if len(dtypes) != 1:
            raise ConfigurationError(
                f"{'/'.join(stored.key)} is in tensors of dtypes {', '.join(sorted(dtypes))}: engines need "
                "one. Choose a dtype for all"
            )
        blocks = None
        if how is not None and own[0][0].name in quantized:
            blocks = scaled[stored.key] = Blocks.of(own[0], how)
        first = len(matrices)
        matrices += [
            (stored.width, [astuple(strip_of(t, numbers[t.name])) for t in tensors]) for tensors in own
        ]
        for (start, stop), device in stored.shards().items():
            cut = Cut.of(stop - start)
            if device.process_index == jax.process_index():
                dtype = DTYPES[next(iter(dtypes))].name
                parts.append(Part(stored.key, device, len(own), cut, dtype, len(pieces), start, blocks))
            begins = [start + i * cut.size for i in range(cut.pieces)]
            runs = [
                [(x - begin, one, end) for x, one, end in stored.runs(begin, min(begin + cut.size, stop))]
                for begin in begins
            ]
            pieces += [(first + layer, cut.size, run) for layer in range(len(own)) for run in runs]
        if how is not None and blocks is not None:
            cut, device = Cut.of(blocks.rows * blocks.columns), next(iter(stored.shards().values()))
            if device.process_index == jax.process_index():
                part = Part(stored.key, device, len(own), cut, "float32", len(pieces), 0, blocks, scales=True)
                parts.append(part)
            for tensors in own:
                strips = [astuple(blocks.strip_of(t, numbers[t.name + SCALES], how)) for t in tensors]
                for begin in range(0, blocks.rows * blocks.columns, cut.size):
                    end = min(begin + cut.size, blocks.rows * blocks.columns)
                    pieces.append((len(matrices), cut.size, [(0, begin, end)]))
                matrices.append((blocks.columns, strips))
    tensors = [(name, spec.dtype, spec.shape) for name, spec in specs.items()]
    manifest = {"files": files, "tensors": tensors, "matrices": matrices, "pieces": pieces}
    return json.dumps(manifest, separators=(",", ":")).encode(), parts, scaled


def files_of(target: Target, how: FP8Blocks | None, config: RunConfig, folder: RunFolder) -> dict[str, str]:
    """The files of an export besides its tensors, in base 64, by name."""
    with tempfile.TemporaryDirectory() as draft:
        write_settings(target, how, config, folder, Path(draft))
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

    def shards(self) -> dict[tuple[int, int], Device]:
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
            list(tensors_at(place_at(leaf.path, layer, parts.order), leaf.shape, parts))
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
        stack, whole = x.ndim - len(shape), lambda start, stop: iter([(start, start, stop)])
        yield _Stored(("", name), x, stack, shape[-1], layers, whole)


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
