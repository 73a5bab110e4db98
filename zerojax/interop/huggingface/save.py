"""Gathers shards for Hugging Face files, one layer of one leaf at a time."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.mapping import Tensor, TensorParts, layer_tensors, tensors_of
from zerojax.interop.huggingface.safetensors_files import DTYPES, TensorSpec
from zerojax.sharding.layout import ParamLayout, unflatten
from zerojax.sharding.param_tree import from_tree
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState


def tensor_specs(
    spec: TrainSpec, parts: TensorParts, dtypes: Mapping[str, str], default: str
) -> dict[str, TensorSpec]:
    """The tensors of an export, in the model's order.

    Args:
        spec: of the model.
        parts: of its family.
        dtypes: of tensors by name, if known; the second copy of a tied matrix is written only if it is among
            them.
        default: dtype of the others.
    """
    return {
        tensor.name: TensorSpec(dtypes.get(tensor.name, default), tensor.shape)
        for leaf in spec.leaves
        for tensor in tensors_of(leaf, parts)
        if tensor.part.required or tensor.name in dtypes
    }


def each_tensor(state: TrainState, parts: TensorParts) -> Iterator[tuple[Tensor, Float32[np.ndarray, "..."]]]:
    """Every tensor of a model, fp32, in the layout of a file, each gathered as the iteration reaches it.

    All processes must iterate together.
    """
    params = from_tree(state.params)
    for leaf in state.spec.leaves:
        for layer in range(leaf.layers) if leaf.stack else (None,):
            whole = _gather_layer(state.spec, leaf, params[leaf.path], layer)
            for tensor in layer_tensors(leaf, layer, parts):
                values = whole[..., tensor.part.columns] if whole.ndim else whole
                yield tensor, values.T if tensor.part.transposed else values


def _gather_layer(
    spec: TrainSpec, leaf: ParamLayout, stored: Array, layer: int | None
) -> Float32[np.ndarray, "..."]:
    def gather(stored: Array, layer: Array) -> Array:
        one = stored if not leaf.stack else lax.dynamic_index_in_dim(stored, layer, keepdims=False)
        return unflatten(one, leaf)

    everyone = spec.sharding(PartitionSpec())
    run = spec.once(f"layer of {leaf.name}", lambda: jax.jit(gather, out_shardings=everyone))
    return np.asarray(run(stored, jnp.int32(layer or 0)))


def cast(name: str, values: Float32[np.ndarray, "..."], dtype: str) -> np.ndarray:
    """Values in a file's dtype, rounded to nearest.

    Raises:
        ConfigurationError: a finite value is out of float16's range.
    """
    with np.errstate(over="ignore"):
        out = values.astype(DTYPES[dtype])
    if dtype == "F16" and np.isinf(out).any() and not np.isinf(values).any():
        raise ConfigurationError(
            f"{name} holds {np.abs(values).max():.3g}, too large for float16: use --dtype bfloat16"
        )
    return out
