"""Gathers shards for Hugging Face files, one layer of one leaf at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.mapping import (
    Tensor,
    TensorParts,
    layers_of,
    place_at,
    tensors_at,
    tensors_of,
    tensors_of_state,
)
from zerojax.interop.huggingface.safetensors_files import DTYPES, TensorSpec
from zerojax.matmul.lora import merged
from zerojax.sharding.layers import layer_at
from zerojax.sharding.layout import ParamLayout, unflatten, without_place
from zerojax.sharding.memory import to_device
from zerojax.sharding.param_tree import from_tree
from zerojax.train.frozen import decode_frozen
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState


def tensor_specs(
    spec: TrainSpec, parts: TensorParts, dtypes: Mapping[str, str], default: str
) -> dict[str, TensorSpec]:
    """The tensors of an export, in the model's order.

    Tensors that ``dtypes`` does not name have the default dtype, or fp32 if they are not weights. The second
    copy of a tied matrix is written only if ``dtypes`` names it.
    """
    weights = {
        tensor.name: TensorSpec(dtypes.get(tensor.name, default), tensor.shape)
        for leaf in spec.weights
        for tensor in tensors_of(leaf, parts)
        if tensor.part.required or tensor.name in dtypes
    }
    kept = tensors_of_state(spec.adapter.abstract_model_state, parts)
    return weights | {
        tensor.name: TensorSpec(dtypes.get(tensor.name, "F32"), tensor.shape) for *_, tensor in kept
    }


def linear_tensors(train_spec: TrainSpec, parts: TensorParts) -> Iterator[Tensor]:
    """The tensors that are quantized: the blocks' matrices, without embeddings and output projection."""
    for leaf in train_spec.weights:
        for tensor in tensors_of(leaf, parts):
            matrix = tensor.part.transposed and not tensor.part.ones
            if matrix or tensor.part.expert is not None:
                yield tensor


def each_tensor(state: TrainState, parts: TensorParts) -> Iterator[tuple[Tensor, Float32[np.ndarray, "..."]]]:
    """Every tensor of a model, fp32, in a file's layout, gathered one at a time.

    Frozen weights are decoded, and their adapters merged into them. All processes must iterate together.
    """
    spec = state.spec
    stored = from_tree(state.params) | from_tree(state.frozen)
    for leaf in spec.weights:
        adapter = spec.adapters.get(leaf.path, ())
        for layer in layers_of(leaf):
            whole, *factors = (
                gather_layer(spec, part, stored[part.path], layer) for part in (leaf, *adapter)
            )
            if factors:
                assert spec.lora is not None
                whole = merged(whole, factors[0], factors[1], spec.lora, leaf.name)
            for tensor in tensors_at(place_at(leaf.path, layer, parts.order), leaf.shape, parts):
                yield tensor, tensor.of(whole)
    for name, layer, tensor in tensors_of_state(state.model_state, parts):
        yield tensor, np.asarray(state.model_state[name])[() if layer is None else layer]


def gather_layer(
    spec: TrainSpec, leaf: ParamLayout, stored: Any, layer: int | None
) -> Float32[np.ndarray, "..."]:
    """One layer of a leaf on every host, decoded if it is frozen; all processes must call it.

    ``stored`` is as in ``TrainState.params`` or ``TrainState.frozen``, and ``layer`` is from ``layers_of``.
    """
    one = replace(without_place(leaf), stack=())  # weights of one layout share a compiled function

    def gather(stored: Any, layer: Array) -> Array:
        picked = jax.tree.map(lambda x: layer_at(x, layer) if leaf.stack else to_device(x), stored)
        return decode_frozen(picked) if one.frozen else unflatten(picked, one)

    everyone = spec.sharding(PartitionSpec())
    run = spec.once_on_mesh(
        f"layer of {one} of {leaf.stack}", lambda: jax.jit(gather, out_shardings=everyone)
    )
    return np.asarray(run(replace(stored, layout=one) if leaf.frozen else stored, jnp.int32(layer or 0)))


def cast(name: str, values: Float32[np.ndarray, "..."], dtype: str) -> np.ndarray:
    """Values in a file's dtype ("F32", "BF16" or "F16"), rounded to nearest.

    Refuse values beyond F16's range.
    """
    with np.errstate(over="ignore"):
        out = values.astype(DTYPES[dtype])
    if dtype == "F16" and np.isinf(out).any() and not np.isinf(values).any():
        raise ConfigurationError(
            f"{name} holds {np.abs(values).max():.3g}, which is too large for float16: use --dtype bfloat16"
        )
    return out
