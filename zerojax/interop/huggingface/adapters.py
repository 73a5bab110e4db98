"""Moves adapters between train states and the files of PEFT."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.exporting import EXPORT_DTYPES, new_folder
from zerojax.interop.huggingface.families import describe_model
from zerojax.interop.huggingface.mapping import (
    Tensor,
    layer_tensors,
    layers_of,
    place_of,
    tensors_of,
)
from zerojax.interop.huggingface.peft_files import (
    KINDS,
    WEIGHTS,
    PeftAdapter,
    key_of,
    module_of,
    target_modules,
    write_config,
)
from zerojax.interop.huggingface.safetensors_files import SafetensorWriter, TensorSpec
from zerojax.interop.huggingface.save import cast, gather_layer
from zerojax.interop.huggingface.source import is_model
from zerojax.matmul.lora import LoRA
from zerojax.models import GPTConfig
from zerojax.run.build import is_first
from zerojax.run.checkpoints import read_manifest
from zerojax.run.checkpoints.canonical import abstract_weight, with_weights
from zerojax.run.run_dir import RunFolder
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.train.gathering import gather_adapters
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState, check_there
from zerojax.validation.dtypes import dtype_name


def export_adapter(
    state: TrainState, model: GPTConfig, out: Path, *, base: str | None = None, dtype: str = "float32"
) -> list[str]:
    """Write a state's adapters as PEFT's files; all processes must call it, and the first one writes.

    Args:
        state: of a ``zerojax.models.GPT``, filled.
        model: its shape.
        out: the folder to create; it appears when it is complete.
        base: for ``base_model_name_or_path``: the model that the adapters belong to, if it is known.
        dtype: of the tensors: float32, float16 or bfloat16.

    Returns:
        ``target_modules``: the ends of the names of the modules that have adapters.

    Raises:
        ConfigurationError: there are no adapters, or other weights are trained as well, or ``out`` exists, or
            no Hugging Face family fits the model, or a value is out of the dtype's range.
    """
    kind = EXPORT_DTYPES[dtype_name(dtype, "dtype", tuple(EXPORT_DTYPES))]
    spec, lora = state.spec, _only_adapters(state.spec)
    check_there(state)
    family, _ = describe_model(model)
    parts = family.parts(model, family.prefix)
    adapted = _adapted(spec)
    tensors = [tensor for leaf in adapted for tensor in tensors_of(leaf, parts)]
    every = {module_of(tensor.name) for leaf in spec.weights for tensor in tensors_of(leaf, parts)}
    targets = target_modules({module_of(tensor.name) for tensor in tensors}, every)
    specs = {
        name: TensorSpec(kind, shape) for tensor in tensors for name, shape in _shapes(tensor, lora).items()
    }
    params = from_tree(state.params)
    every_layer = [(leaf, layer) for leaf in adapted for layer in layers_of(leaf)]
    with new_folder(out) as draft:
        writer = SafetensorWriter(draft, specs, sys.maxsize, WEIGHTS) if is_first() else None
        for leaf, layer in every_layer:
            a, b = (gather_layer(spec, part, params[part.path], layer) for part in spec.adapters[leaf.path])
            if writer is None:
                continue
            for tensor in layer_tensors(leaf, layer, parts):
                for name, x in zip(_shapes(tensor, lora), (a, b[:, tensor.part.columns]), strict=True):
                    writer.write(name, cast(name, x.T, kind))
        if writer is not None:
            writer.close()
            write_config(draft, lora, family, targets, base)
    return targets


def imported_from(base: Path) -> str | None:
    """The Hugging Face folder that a run's frozen weights are from; None if they are others.

    Args:
        base: that folder, or the checkpoint that holds them.
    """
    if is_model(base):
        return str(base)
    if read_manifest(base).record.position:  # it was trained
        return None
    source = RunFolder(base.parents[1]).read_summary().get("source")
    return source if isinstance(source, str) else None


def adapter_lora(folder: Path, model: GPTConfig) -> LoRA:
    """The settings of adapters that can hold those of PEFT's files: create the state with them.

    zerojax holds query, key and value side by side, so their adapters become one of their joint rank, unless
    they have the same A. ``alpha`` grows with the rank, so that the scale stays the same.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        model: the shape of the model that they belong to.

    Raises:
        ConfigurationError: a file is missing or damaged, has an option that zerojax does not support, or
            belongs to another model; names the key or tensor.
    """
    return PeftAdapter.open(folder, model).lora


def load_adapter(state: TrainState, folder: Path, model: GPTConfig) -> TrainState:
    """A state whose adapters are those of PEFT's files; all processes must call it.

    Where the state's adapters are larger, or the files have none, A keeps the state's values and B is zero.
    The optimizer's state is unchanged. The result shares all other arrays with ``state``, so a step from
    either donates those of both.

    Args:
        state: of a ``zerojax.models.GPT``, filled, created with ``lora=adapter_lora(folder, model)`` or with
            adapters for more weights, or of a larger rank and the same scale.
        folder: holds adapter_config.json and adapter_model.safetensors.
        model: the model's shape.

    Raises:
        ConfigurationError: as ``adapter_lora``, or the state's adapters cannot hold these.
    """
    found = PeftAdapter.open(folder, model)
    _check_fits(state.spec, found)
    check_there(state)
    values = from_tree(gather_adapters(state))
    placed: dict[tuple[str, ...], jax.Array] = {}
    for leaf in _adapted(state.spec):
        adapter = state.spec.adapters[leaf.path]
        a, b = (values[part.path].copy() for part in adapter)
        for layer in layers_of(leaf):
            at = () if layer is None else (layer,)
            _fill(a[at], b[at], found, place_of(leaf, layer))
        placed |= {part.path: _placed(state, part, x) for part, x in zip(adapter, (a, b), strict=True)}
    return with_weights(state, {"params": to_tree(placed)})


def _only_adapters(spec: TrainSpec) -> LoRA:
    """The settings of a state's adapters, which must be all that is trained."""
    if spec.lora is None:
        raise ConfigurationError("there are no adapters to export: the state was created without lora=")
    if others := [leaf.name for leaf in spec.weights if not leaf.frozen]:
        raise ConfigurationError(
            f"{others[0]!r} is trained as well as the adapters, and PEFT's files would lack it: export the "
            "whole model, with its adapters merged"
        )
    return spec.lora


def _shapes(tensor: Tensor, lora: LoRA) -> dict[str, tuple[int, int]]:
    """The names and shapes of A and B in a file for a tensor of a model."""
    inputs, outputs = tensor.shape[::-1] if tensor.part.transposed else tensor.shape
    shapes = (lora.rank, inputs), (outputs, lora.rank)
    return dict(zip((key_of(module_of(tensor.name), kind) for kind in KINDS), shapes, strict=True))


def _check_fits(spec: TrainSpec, found: PeftAdapter) -> None:
    """Refuse a state whose adapters cannot hold those of a file."""
    wanted, lora = found.lora, spec.lora
    way_out = f"create the state with lora=huggingface.adapter_lora({str(found.origin)!r}, model)"
    if lora is None:
        raise ConfigurationError(f"the state has no adapters: {way_out}")
    if lora.rank < wanted.rank or not math.isclose(lora.scale, wanted.scale, rel_tol=1e-6):
        raise ConfigurationError(
            f"the state's adapters have rank {lora.rank} and scale {lora.scale:g}, and those of "
            f"{found.origin} need rank {wanted.rank} and scale {wanted.scale:g}: {way_out}"
        )
    for leaf in spec.weights:
        name, _ = place_of(leaf, None if not leaf.stack else 0)
        if name in found.shapes and leaf.shape != found.shapes[name]:
            raise ConfigurationError(
                f"{leaf.name!r} of the state has shape {leaf.shape}, and {found.shapes[name]} by model="
            )
    adapted = set(_places(spec))
    if lacking := sorted(place for place in found.factors if place not in adapted):
        name, layer = lacking[0]
        raise ConfigurationError(
            f"{found.origin} has an adapter for {name!r} of block {layer}, and the state has none: {way_out}"
        )


def _adapted(spec: TrainSpec) -> list[ParamLayout]:
    """The weights that have adapters."""
    return [leaf for leaf in spec.frozen if leaf.path in spec.adapters]


def _places(spec: TrainSpec) -> Iterator[tuple[str, int | None]]:
    """The name in ``TensorParts`` and the block of each weight that has an adapter."""
    for leaf in _adapted(spec):
        yield from (place_of(leaf, layer) for layer in layers_of(leaf))


def _fill(a: np.ndarray, b: np.ndarray, found: PeftAdapter, place: tuple[Any, Any]) -> None:
    """Put the factors of one weight side by side, each with its own columns of B."""
    b[...] = 0
    rank = found.own.rank
    for number, factor in enumerate(found.factors.get(place, ())):
        ranks = slice(number * rank, (number + 1) * rank)
        a[:, ranks] = factor.a
        for columns, values in factor.b:
            b[ranks, columns] = values


def _placed(state: TrainState, leaf: ParamLayout, values: np.ndarray) -> jax.Array:
    """A parameter in canonical form, spread over the devices."""
    like = abstract_weight(state, leaf)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])
