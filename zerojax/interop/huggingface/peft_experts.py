"""Adapters of experts in the files of PEFT, which are its ``target_parameters``.

transformers holds the experts of a layer in two parameters of one module, whatever its files have:
``gate_up_proj``, whose outputs are those of gate and up, and ``down_proj``. PEFT wraps the module once for
each that has an adapter; if both have one, the tensors of the first are those of its ``base_layer``. A is
``[experts x rank, inputs]``, expert by expert, and B ``[outputs, rank x experts]``, rank by rank.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from zerojax.interop.huggingface.families import Family
from zerojax.interop.huggingface.mapping import Place
from zerojax.models import GPTConfig

PARAMETERS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""transformers' -> the names of our weights."""
MODULE = "experts"
"""The last word of the name of a layer's experts."""


class ExpertFactor(NamedTuple):
    """The adapters of the experts of one layer.

    Attributes:
        a: ``[experts, inputs, rank]``.
        b: ``[experts, rank, outputs]``.
        scale: what A B is multiplied by.
    """

    a: Float32[np.ndarray, "experts inputs rank"]
    b: Float32[np.ndarray, "experts rank outputs"]
    scale: float


def modules(family: Family, model: GPTConfig) -> Iterator[tuple[int, str]]:
    """The layers that have experts, and the name of the module that holds these."""
    for layer in range(model.layers):
        if model.of_layer(layer).experts:
            yield layer, family.prefix + family.names.layers.format(layer=layer) + family.names.experts


def wrapped(module: str, parameter: str, adapted: Collection[str]) -> str:
    """The name of the module that has a parameter's A and B; ``adapted`` are all parameters with some."""
    later = list(PARAMETERS)[list(PARAMETERS).index(parameter) + 1 :]
    return ".".join([module, *("base_layer" for other in later if other in adapted)])


def place(name: str, layer: int) -> Place:
    """The place of the weight of this name of a layer's experts."""
    return f"block/mlp/{name}", layer


def _columns(family: Family, name: str, width: int) -> slice:
    """Where the outputs of gate, up or down are among those of their parameter."""
    if name == "down":
        return slice(None)
    second = int(name == "up")
    gate = family.names.bare["mlp/gate"]
    turns = gate.turn is not None and not gate.halves
    return slice(second, None, 2) if turns else slice(second * width, (second + 1) * width)


def split(
    parameter: str, both: ExpertFactor, family: Family, model: GPTConfig
) -> Iterator[tuple[str, ExpertFactor]]:
    """The adapters of our weights, without the ranks that another of them alone uses."""
    for name in PARAMETERS[parameter]:
        b = both.b[..., _columns(family, name, model.ffn_width)]
        used = b.any(axis=(0, 2)) | ~both.b.any(axis=(0, 2))
        if used.any():
            yield name, ExpertFactor(both.a[..., used], b[:, used], both.scale)


def joined(parameter: str, own: Mapping[str, ExpertFactor], family: Family, model: GPTConfig) -> ExpertFactor:
    """The reverse of ``split``, exactly; weights of the same A share its ranks."""
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
    """From the tensors of a file."""
    return ExpertFactor(
        a.reshape(experts, -1, a.shape[1]).swapaxes(1, 2),
        b.reshape(len(b), -1, experts).transpose(2, 1, 0),
        scale,
    )


def to_files(factor: ExpertFactor) -> tuple[np.ndarray, np.ndarray]:
    """The reverse of ``from_files``: A and B."""
    a, b, _ = factor
    return a.swapaxes(1, 2).reshape(-1, a.shape[1]), b.transpose(2, 1, 0).reshape(b.shape[2], -1)
