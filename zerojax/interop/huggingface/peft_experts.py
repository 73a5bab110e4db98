"""Adapters of experts in PEFT's files, its ``target_parameters``.

transformers holds a layer's experts in two parameters of one module, whatever the files have:
``gate_up_proj``, with the outputs of gate and up (``up_proj`` if there is no gate), and ``down_proj``. PEFT
wraps the module once for each adapted parameter. If both are adapted, the tensors of the first are named
after its ``base_layer``. A is ``[experts x rank, inputs]``, expert by expert. B is
``[outputs, rank x experts]``, rank by rank.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from jaxtyping import Float32

from zerojax.interop.huggingface.families import Family
from zerojax.interop.huggingface.mapping import Source, Tensor, TensorPart, alternating
from zerojax.models.config import GPTConfig

PARAMETERS = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}
"""transformers' parameters -> the names of our weights."""
MODULE = "experts"
"""The last word in the name of a layer's experts."""


def parameters(family: Family, model: GPTConfig) -> dict[tuple[str, str], list[Tensor]]:
    """The weights in each parameter of a model's experts, by its module and its name."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    absent = "up_proj" if model.gated else "gate_up_proj"
    for layer in model.expert_layers:
        own = model.of_layer(layer)
        module = family.prefix + family.names.layers.format(layer=layer) + family.names.experts
        for parameter, names in PARAMETERS.items():
            if parameter == absent:
                continue
            sizes = (
                (own.ffn_width, own.expert_width)
                if parameter == "down_proj"
                else (own.expert_width, own.ffn_width)
            )
            whole = TensorPart(parameter, outputs=len(names) * sizes[1])
            found[module, parameter] = [
                Tensor(
                    parameter,
                    (f"block/mlp/{name}", layer),
                    (own.experts, *sizes),
                    replace(whole, first=number * sizes[1]),
                )
                for number, name in enumerate(names)
            ]
    return found


def wrapped(module: str, parameter: str, adapted: Collection[str]) -> str:
    """The name of the module with a parameter's A and B; ``adapted`` are all parameters with adapters."""
    later = list(PARAMETERS)[list(PARAMETERS).index(parameter) + 1 :]
    return ".".join([module, *("base_layer" for other in later if other in adapted)])


def interleaves(parameter: str, family: Family) -> bool:
    """Whether the outputs of gate and up alternate in a parameter, as in gpt-oss."""
    gate, several = family.names.bare.get("mlp/gate"), len(PARAMETERS[parameter]) > 1
    return several and isinstance(gate, Source) and gate.groups is alternating


def from_files(
    a: Float32[np.ndarray, "inputs stacked"],
    b: Float32[np.ndarray, "stacked outputs"],
    experts: int,
    *,
    interleaved: bool,
) -> tuple[Float32[np.ndarray, "experts inputs rank"], Float32[np.ndarray, "experts rank outputs"]]:
    """A and B of all experts, from the transposed tensors of a file; B has gate's outputs before up's.

    ``stacked`` is experts x rank. ``interleaved`` files alternate gate and up (``interleaves``).
    """
    stacked_a = a.T.reshape(experts, -1, a.shape[0]).swapaxes(1, 2)
    stacked_b = b.T.reshape(b.shape[1], -1, experts).transpose(2, 1, 0)
    if interleaved:
        stacked_b = np.concatenate([stacked_b[..., 0::2], stacked_b[..., 1::2]], axis=-1)
    return stacked_a, stacked_b


def to_files(
    a: Float32[np.ndarray, "experts inputs rank"],
    b: Float32[np.ndarray, "experts rank outputs"],
    *,
    interleaved: bool,
) -> tuple[Float32[np.ndarray, "stacked inputs"], Float32[np.ndarray, "outputs stacked"]]:
    """The tensors of a file: the inverse of ``from_files``, transposed."""
    if interleaved:
        b = np.stack(np.split(b, 2, axis=-1), axis=-1).reshape(b.shape)
    return a.swapaxes(1, 2).reshape(-1, a.shape[1]), b.transpose(2, 1, 0).reshape(b.shape[2], -1)
