"""Loads Hugging Face files directly into shards; each process reads only its devices' parts."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float32, PyTree

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.families import ReadModel, is_left_out, read_model
from zerojax.interop.huggingface.mapping import (
    TensorParts,
    layers_of,
    place_at,
    tensors_at,
    tensors_of,
    tensors_of_state,
)
from zerojax.interop.huggingface.source import CONFIG, ModelFolder, open_files, read_config_json
from zerojax.interop.huggingface.weight_files import WeightFiles
from zerojax.sharding.layout import OWNED, ParamLayout
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.train.frozen import load_frozen
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState, check_there

FLOATS = ("F32", "F16", "BF16")
Index = tuple[slice, ...]
_TILE = 256
"""Rows and columns that are copied at a time: 256 KiB, which fits in a core's cache."""


def load_base(state: TrainState, folder: Path | str, *, new: str | None = None) -> TrainState:
    """The state with its frozen weights from a Hugging Face model; all processes must call it.

    Each process reads and encodes the parts of the tensors that its devices hold, one layer of one weight at
    a time. No more of the model is ever in memory, and nothing is written to disk.

    Args:
        state: the state of a ``zerojax.models.GPT`` of the model's shape, filled or abstract
            (``TrainState.abstract``). The result can be the ``base`` of ``TrainState.create`` for new
            adapters, or ``checkpoints.restore`` can fill in its trained weights.
        folder: holds config.json and safetensors files.
        new: the first name in the paths of trained weights that the model lacks: "head" for a state with
            other outputs.

    Raises:
        ConfigurationError: the folder has no model that zerojax supports, or another model.
    """
    spec = state.spec
    if not spec.frozen:
        return state
    files, parts = _open(spec, Path(folder), new)

    def read(leaf: ParamLayout, layer: int | None) -> jax.Array:
        one = dataclasses.replace(leaf, stack=() if layer is None else (1,))
        return _placed(spec.sharding(one.spec(OWNED)), one, files, parts, layer or 0)

    return state.replace(**load_frozen(spec, read))


def load_weights(state: TrainState, folder: Path | str, *, new: str | None = None) -> TrainState:
    """The state with all weights of a Hugging Face model, frozen and trained; all processes must call it.

    Adapters keep their values, because the model has none.

    Args:
        state: as for ``load_base``, but filled, except perhaps for the weights that are read. Its optimizer
            state, step and seed are kept.
        folder: as for ``load_base``.
        new: as for ``load_base``; these weights also keep their values.

    Raises:
        ConfigurationError: as ``load_base``.
    """
    state = load_base(state, folder, new=new)
    check_there(state)
    files, parts = _open(state.spec, Path(folder), new)
    state = load_state(state, files, parts)
    if all(leaf.frozen for leaf in state.spec.weights):
        return state
    found = from_tree(load_params(state.spec, files, parts, new=new))
    return state.with_params(to_tree(from_tree(state.params) | found))


def _open(train_spec: TrainSpec, folder: Path, new: str | None) -> tuple[WeightFiles, TensorParts]:
    """The checked files of a folder, and the tensors of each leaf."""
    found = read_model(read_config_json(folder), str(folder / CONFIG))
    files = open_files(folder)
    parts = found.family.parts(found.model, files.specs)
    own = _model_weights(train_spec, new)
    places = (
        (leaf.name, place_at(leaf.path, layer, parts.order)) for leaf in own for layer in layers_of(leaf)
    )
    if lacking := [name for name, place in places if not parts.at(place)]:
        raise ConfigurationError(
            f"the model in {folder} has no {lacking[0]!r}, which the state has. Create the state for this "
            "model"
        )
    check_tensors(train_spec, files, found, parts, new)
    return files, parts


def _model_weights(train_spec: TrainSpec, new: str | None) -> list[ParamLayout]:
    """The weights that the files have: all but the new ones."""
    return [leaf for leaf in train_spec.weights if leaf.path[0] != new]


def check_tensors(
    train_spec: TrainSpec,
    files: WeightFiles,
    found: ReadModel | ModelFolder,
    parts: TensorParts,
    new: str | None = None,
) -> None:
    """Refuse files whose headers differ from the model in the tensors' names, shapes or kinds of dtype."""
    leaves = _model_weights(train_spec, new)
    needed = {tensor.name: tensor for leaf in leaves for tensor in tensors_of(leaf, parts)}
    kept = tensors_of_state(train_spec.adapter.abstract_model_state, parts)
    needed |= {tensor.name: tensor for *_, tensor in kept}
    outside = parts.outside.items()
    replaced = {part.name for name, own in outside if name.partition("/")[0] == new for part in own}
    for name, tensor in needed.items():
        if name not in files.specs:
            if tensor.part.required:
                raise ConfigurationError(f"the files lack {name}: give all files of the model")
            continue
        spec = files.specs[name]
        if spec.shape != tensor.shape:
            raise ConfigurationError(
                f"{name} has shape {spec.shape}, but the config needs {tensor.shape}: give files of one model"
            )
        if spec.dtype not in FLOATS:
            raise ConfigurationError(
                f"{name} is of dtype {spec.dtype}: weights are one of {', '.join(FLOATS)}"
            )
    known = needed.keys() | replaced
    unread = (name for name in files.specs if name not in known and not is_left_out(name))
    unknown = [name for name in unread if not found.family.carries(name, found.model)]
    if unknown:
        raise ConfigurationError(
            f"nothing is imported: the model has no {', '.join(sorted(unknown)[:4])}, which the files have"
        )


def load_state(state: TrainState, files: WeightFiles, parts: TensorParts) -> TrainState:
    """A copy of the state with the model's other state (not weights) from checked files that have some."""
    found: dict[str, np.ndarray] = {}
    for name, layer, tensor in tensors_of_state(state.model_state, parts):
        whole = found.setdefault(name, np.zeros(state.model_state[name].shape, np.float32))
        whole[() if layer is None else layer] = files.read(tensor.name)
    placed = {
        name: jax.make_array_from_callback(x.shape, state.model_state[name].sharding, x.__getitem__)
        for name, x in found.items()
    }
    return state.replace(model_state=state.model_state | placed)


def load_params(
    train_spec: TrainSpec, files: WeightFiles, parts: TensorParts, *, new: str | None = None
) -> PyTree:
    """Load master weights from checked files; each process reads its devices' ranges.

    Leaves are placed one after the other. A host needs memory for its shards and for one device's part of one
    layer's leaf.

    Returns:
        fp32 arrays as in ``TrainState.params``, nested by path: the model's trained weights, without new
        ones.
    """
    placed = {}
    for leaf in (leaf for leaf in _model_weights(train_spec, new) if not leaf.frozen):
        sharding = train_spec.param_sharding(leaf)
        placed[leaf.path] = jax.block_until_ready(_placed(sharding, leaf, files, parts))
    return to_tree(placed)


def _placed(
    sharding: NamedSharding, leaf: ParamLayout, files: WeightFiles, parts: TensorParts, first: int = 0
) -> Float32[Array, "..."]:
    """A leaf's stored array (``ParamLayout.stored_shape``), from the files' layers from ``first`` on."""

    def read(index: Index | None) -> Float32[np.ndarray, "..."]:
        assert index is not None  # None only for shardings without indices
        start, stop, _ = index[len(leaf.stack)].indices(leaf.padded)
        layers = range(first, first + leaf.layers)[index[0]] if leaf.stack else (None,)
        flat = np.zeros((len(layers), stop - start), np.float32)
        for row, layer in zip(flat, layers, strict=True):
            for place, one, end in leaf.runs(start, stop):
                row[place - start :][: end - one] = _elements(leaf, layer, one, end, files, parts)
        shape = flat.shape if leaf.stack else flat.shape[1:]
        return flat.reshape(*shape, *(1,) * (len(leaf.stored_shape) - len(shape)))

    return jax.make_array_from_callback(leaf.stored_shape, sharding, read)


def _elements(
    leaf: ParamLayout, layer: int | None, start: int, stop: int, files: WeightFiles, parts: TensorParts
) -> Float32[np.ndarray, " n"]:
    """Elements [start, stop) of one layer, cut from whole rows."""
    width = leaf.shape[-1]
    first, last = start // width, -(-stop // width)
    rows = np.empty((last - first, width), np.float32)
    for tensor in tensors_at(place_at(leaf.path, layer, parts.order), leaf.shape, parts):
        own = slice(max(first, tensor.inputs.start), min(last, tensor.inputs.stop))
        if tensor.name not in files.specs or own.stop <= own.start:
            continue
        inputs = slice(own.start - tensor.inputs.start, own.stop - tensor.inputs.start)
        if tensor.axes < 2:  # a vector is one row
            values = files.read(tensor.name, *tensor.region()).reshape(1, -1)
        else:
            values = tensor.turned(files.read(tensor.name, *tensor.region(inputs)))
        values = values.astype(np.float32)
        out = rows[own.start - first : own.stop - first, tensor.columns]
        if not tensor.part.required and not np.array_equal(values, out):
            raise ConfigurationError(
                f"{tensor.name} differs from the token embedding, but the config ties them. Set "
                "tie_word_embeddings = false in config.json"
            )
        _copy(values, out)
    return rows.reshape(-1)[start - first * width : stop - first * width]


def _copy(values: Float32[np.ndarray, "rows columns"], out: Float32[np.ndarray, "rows columns"]) -> None:
    """Copy a matrix that may be transposed in memory, in tiles, on all cores.

    A copy row by row would fetch each cache line again for each of its elements.
    """

    def rows(start: int) -> None:
        for first in range(0, values.shape[1], _TILE):
            tile = slice(start, start + _TILE), slice(first, first + _TILE)
            out[tile] = values[tile]

    if len(values) <= _TILE:  # threads take longer to start than to copy so little
        rows(0)
        return
    with ThreadPoolExecutor() as threads:
        list(threads.map(rows, range(0, len(values), _TILE)))
