"""Adapters of experts in PEFT's files, its ``target_parameters``.

transformers holds a layer's experts in two parameters of one module, whatever the files have:
``gate_up_proj``, with the outputs of gate and up, and ``down_proj``. PEFT wraps the module once for each
adapted parameter. If both are adapted, the tensors of the first are named after its ``base_layer``. A is
``[experts x rank, inputs]``, expert by expert. B is ``[outputs, rank x experts]``, rank by rank.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from zerojax.interop.huggingface.families import Family
from zerojax.interop.huggingface.mapping import Place
from zerojax.models import GPTConfig

PARAMETERS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""transformers' parameters -> the names of our weights."""
MODULE = "experts"
"""The last word in the name of a layer's experts."""


class ExpertFactor(NamedTuple):
    """The adapters of one layer's experts.

    Attributes:
        a: ``[experts, inputs, rank]``.
        b: ``[experts, rank, outputs]``.
        scale: factor of A B.
    """

    a: Float32[np.ndarray, "experts inputs rank"]
    b: Float32[np.ndarray, "experts rank outputs"]
    scale: float


def modules(family: Family, model: GPTConfig) -> Iterator[tuple[int, str]]:
    """The layers with experts, and the names of the modules that hold them."""
    for layer in range(model.layers):
        if model.of_layer(layer).experts:
            yield layer, family.prefix + family.names.layers.format(layer=layer) + family.names.experts


def wrapped(module: str, parameter: str, adapted: Collection[str]) -> str:
    """The name of the module with a parameter's A and B; ``adapted`` are all parameters with adapters."""
    later = list(PARAMETERS)[list(PARAMETERS).index(parameter) + 1 :]
    return ".".join([module, *("base_layer" for other in later if other in adapted)])


def place(name: str, layer: int) -> Place:
    """The place of a weight of a layer's experts."""
    return f"block/mlp/{name}", layer


def _columns(family: Family, name: str, width: int) -> slice:
    """The outputs of gate, up or down among the outputs of their parameter."""
    if name == "down":
        return slice(None)
    second = int(name == "up")
    gate = family.names.bare["mlp/gate"]
    turns = gate.turn is not None and not gate.halves
    return slice(second, None, 2) if turns else slice(second * width, (second + 1) * width)


def split(
    parameter: str, both: ExpertFactor, family: Family, model: GPTConfig
) -> Iterator[tuple[str, ExpertFactor]]:
    """The adapters of our weights, each without ranks that only another weight uses."""
    for name in PARAMETERS[parameter]:
        b = both.b[..., _columns(family, name, model.ffn_width)]
        used = b.any(axis=(0, 2)) | ~both.b.any(axis=(0, 2))
        if used.any():
            yield name, ExpertFactor(both.a[..., used], b[:, used], both.scale)


def joined(parameter: str, own: Mapping[str, ExpertFactor], family: Family, model: GPTConfig) -> ExpertFactor:
    """The inverse of ``split``, exactly; weights with the same A share its ranks."""
    first, *others = own.values()
    shared = all(np.array_equal(first.a, other.a) for other in others)
    ranks = [one.b.shape[1] for one in own.values()]
    ends = np.cumsum([0, *ranks])
    outputs = len(PARAMETERS[parameter]) * first.b.shape[2]
    b = np.zeros((len(first.b), ranks[0] if shared else ends[-1], outputs), np.float32)
    for number, (name, one) in enumerate(own.items()):
        start = 0 if shared else ends[number]
        columns = _columns(family, name, model.ffn_width)
        b[:, start : start + ranks[number], columns] = one.b * np.float32(one.scale / first.scale)
    a = first.a if shared else np.concatenate([one.a for one in own.values()], axis=-1)
    return ExpertFactor(a, b, first.scale)


def from_files(
    a: Float32[np.ndarray, "stacked inputs"],
    b: Float32[np.ndarray, "outputs stacked"],
    experts: int,
    scale: float,
) -> ExpertFactor:
    """The adapters in a file's tensors."""
    return ExpertFactor(
        a.reshape(experts, -1, a.shape[1]).swapaxes(1, 2),
        b.reshape(len(b), -1, experts).transpose(2, 1, 0),
        scale,
    )


def to_files(factor: ExpertFactor) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of ``from_files``: A and B."""
    a, b, _ = factor
    return a.swapaxes(1, 2).reshape(-1, a.shape[1]), b.transpose(2, 1, 0).reshape(b.shape[2], -1)
