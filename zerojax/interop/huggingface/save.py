"""Gathers shards for Hugging Face files, one layer of one leaf at a time."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32

from zerojax.errors import ZeroError
from zerojax.interop.huggingface.mapping import Tensor, TensorParts, layer_tensors, tensors_of
from zerojax.interop.huggingface.safetensors_files import DTYPES, TensorSpec
from zerojax.sharding.layout import Leaf, unflatten
from zerojax.sharding.param_tree import from_tree
from zerojax.train.spec import Program
from zerojax.train.state import TrainState


def tensor_specs(
    program: Program, parts: TensorParts, dtypes: Mapping[str, str], default: str
) -> dict[str, TensorSpec]:
    """The tensors of an export, in the model's order.

    Args:
        program: of the model.
        parts: of its family.
        dtypes: of tensors by name, if known; the second copy of a tied matrix is written only if it is among
            them.
        default: dtype of the others.
    """
    return {
        tensor.name: TensorSpec(dtypes.get(tensor.name, default), tensor.shape)
        for leaf in program.leaves
        for tensor in tensors_of(leaf, parts)
        if tensor.part.required or tensor.name in dtypes
    }


def each_tensor(state: TrainState, parts: TensorParts) -> Iterator[tuple[Tensor, Float32[np.ndarray, "..."]]]:
    """Every tensor of a model, fp32, in the layout of a file, each gathered as the iteration reaches it.

    All processes must iterate together.
    """
    params = from_tree(state.params)
    for leaf in state.program.leaves:
        for layer in range(leaf.layers) if leaf.layers is not None else (None,):
            whole = _gather_layer(state.program, leaf, params[leaf.path], layer)
            for tensor in layer_tensors(leaf, layer, parts):
                values = whole[..., tensor.part.columns] if whole.ndim else whole
                yield tensor, values.T if tensor.part.transposed else values


def _gather_layer(
    program: Program, leaf: Leaf, stored: Array, layer: int | None
) -> Float32[np.ndarray, "..."]:
    def gather(stored: Array, layer: Array) -> Array:
        one = stored if leaf.layers is None else lax.dynamic_index_in_dim(stored, layer, keepdims=False)
        return unflatten(one, leaf)

    everyone = program.sharding(PartitionSpec())
    run = program.once(f"layer of {leaf.name}", lambda: jax.jit(gather, out_shardings=everyone))
    return np.asarray(run(stored, jnp.int32(layer or 0)))


def cast(name: str, values: Float32[np.ndarray, "..."], dtype: str) -> np.ndarray:
    """Values in a file's dtype, rounded to nearest.

    Raises:
        ZeroError: a finite value is out of float16's range.
    """
    with np.errstate(over="ignore"):
        out = values.astype(DTYPES[dtype])
    if dtype == "F16" and np.isinf(out).any() and not np.isinf(values).any():
        raise ZeroError(
            f"{name} holds {np.abs(values).max():.3g}, too large for float16: use --dtype bfloat16"
        )
    return out
