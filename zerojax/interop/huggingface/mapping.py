"""The Hugging Face tensors that make up each leaf of a ``zerojax.models.GPT``.

A leaf is named by its path, with ``block/`` for the leaves of every block: "embed/embedding",
"block/attention/qkv/kernel". Its matrix is (in, out); each tensor holds some of its columns, transposed or
not. A transposed tensor may hold those of other leaves as well. The leaves of experts are (experts, in, out),
and each tensor holds the matrix of one expert.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zerojax.models import GPTConfig
from zerojax.sharding.layout import ParamLayout

Shape = tuple[int, ...]
Place = tuple[str, int | None]
"""The name of a weight in ``TensorParts``, and the index of its block, if it is in one."""


@dataclass(frozen=True)
class TensorPart:
    """A Hugging Face tensor as a range of a leaf's columns (of its last axis).

    Attributes:
        name: of the tensor; "{layer}" in it is the index of the block, "{expert}" that of the expert.
        start: its first column in the leaf.
        stop: the column after its last; None for the end.
        transposed: whether the file holds it as (out, in).
        required: False for the second copy of a tied matrix, which a file may leave out.
        first_row: where the columns begin among the rows of a transposed tensor.
        rows: of the whole tensor, if it holds several leaves.
        expert: the index in the leaf's first axis; None if the leaf is one matrix.
    """

    name: str
    start: int = 0
    stop: int | None = None
    transposed: bool = False
    required: bool = True
    first_row: int = 0
    rows: int | None = None
    expert: int | None = None


TensorParts = dict[str, tuple[TensorPart, ...]]


@dataclass(frozen=True)
class Fused:
    """A tensor of several modules: the rows of the ``index``-th of ``count`` equal parts are one of them."""

    name: str
    index: int
    count: int


@dataclass(frozen=True)
class Bare:
    """A module whose weight is one of our parameters itself, not its kernel.

    With "{expert}" in the name there is one for each expert.
    """

    name: str

    def parts(self, model: GPTConfig, block: str) -> tuple[TensorPart, ...]:
        """The tensors of the parameter; their names begin with ``block``."""
        name = f"{block}{self.name}.weight"
        if "{expert}" not in name:
            return (TensorPart(name, transposed=True),)
        return tuple(
            TensorPart(name.replace("{expert}", str(expert)), transposed=True, expert=expert)
            for expert in range(model.experts)
        )


Module = str | tuple[str, ...] | Fused | Bare
"""What holds a module's weights: a module, several whose outputs lie side by side, or a part of one."""


@dataclass(frozen=True)
class Names:
    """The names of a family's modules.

    Attributes:
        block: ours -> theirs, of the modules in a block. There may be more leaves than a model has: those of
            biases are always among them.
        layers: what the names of a block's modules begin with.
        embed: the token embedding.
        norm: the norm after the last block.
        position: the table of learned positions.
        transposed: whether kernels are held as (out, in), as ``torch.nn.Linear`` does.
    """

    block: dict[str, Module]
    layers: str = "layers.{layer}."
    embed: str = "embed_tokens"
    norm: str = "norm"
    position: str | None = None
    transposed: bool = True

    def parts(self, model: GPTConfig, prefix: str) -> TensorParts:
        """The tensors of each leaf; all names except the output projection's begin with ``prefix``."""
        found = _embeddings(f"{prefix}{self.embed}.weight", tied=model.tied) | _norm(
            "norm", prefix + self.norm
        )
        if self.position is not None:
            found["position/embedding"] = (TensorPart(f"{prefix}{self.position}.weight"),)
        for ours, theirs in self.block.items():
            if "norm" in ours:
                assert isinstance(theirs, str)
                found |= _norm(f"block/{ours}", prefix + self.layers + theirs)
                continue
            if isinstance(theirs, Bare):
                found[f"block/{ours}"] = theirs.parts(model, prefix + self.layers)
                continue
            for leaf, kind, turned in (("kernel", "weight", self.transposed), ("bias", "bias", False)):
                found[f"block/{ours}/{leaf}"] = _columns(model, prefix + self.layers, theirs, kind, turned)
        return found


def _columns(
    model: GPTConfig, block: str, module: str | tuple[str, ...] | Fused, kind: str, transposed: bool
) -> tuple[TensorPart, ...]:
    """The tensors of a kernel or bias."""
    if isinstance(module, str):
        return (TensorPart(f"{block}{module}.{kind}", transposed=transposed),)
    if isinstance(module, Fused):
        width = model.ffn_width
        first, rows = module.index * width, module.count * width
        return (
            TensorPart(f"{block}{module.name}.{kind}", transposed=transposed, first_row=first, rows=rows),
        )
    kv = model.key_value_heads * model.head_dim
    ends = (model.attention_width, model.attention_width + kv, model.attention_width + 2 * kv)
    return tuple(
        TensorPart(f"{block}{name}.{kind}", start, end, transposed)
        for name, start, end in zip(module, (0, *ends), ends, strict=False)
    )


def _norm(ours: str, theirs: str) -> TensorParts:
    return {
        f"{ours}/scale": (TensorPart(f"{theirs}.weight"),),
        f"{ours}/bias": (TensorPart(f"{theirs}.bias"),),
    }


def _embeddings(name: str, *, tied: bool) -> TensorParts:
    """The token embedding and the output projection, which are one leaf if tied."""
    table, head = TensorPart(name), TensorPart("lm_head.weight", required=not tied)
    if tied:
        return {"embed/embedding": (table, head)}
    return {"embed/embedding": (table,), "head/embedding": (head,)}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, and the columns that it holds of a weight.

    Attributes:
        name: in the file.
        place: the weight.
        weight: the weight's shape (of one layer).
        part: its columns of the weight.
    """

    name: str
    place: Place
    weight: Shape
    part: TensorPart

    @property
    def columns(self) -> slice:
        """The columns of the weight."""
        start, stop, _ = slice(self.part.start, self.part.stop).indices(self.weight[-1])
        return slice(start, stop)

    @property
    def rows(self) -> slice:
        """Where these columns are among the rows of a transposed tensor."""
        first = self.part.first_row
        return slice(first, first + self.columns.stop - self.columns.start)

    @property
    def outputs(self) -> int:
        """The columns of all weights that the tensor holds."""
        return self.part.rows or self.columns.stop - self.columns.start

    @property
    def shape(self) -> Shape:
        """Its shape in the file."""
        shape = (*self.weight[0 if self.part.expert is None else 1 : -1], self.outputs)
        return shape[::-1] if self.part.transposed else shape

    @property
    def inputs(self) -> slice:
        """Where its matrix begins and ends in the weight, as one matrix of (in, out)."""
        height = self.weight[-2] if len(self.weight) > 1 else 1
        first = height * (self.part.expert or 0)
        return slice(first, first + height)

    def among(self, weight: np.ndarray) -> np.ndarray:
        """The columns of a weight that it holds, a view."""
        own = weight if self.part.expert is None else weight[self.part.expert]
        return own[..., self.columns]

    def of(self, weight: np.ndarray) -> np.ndarray:
        """What the tensor holds of a weight, in its own layout."""
        columns = self.among(weight)
        return columns.T if self.part.transposed else columns

    def within(self, values: np.ndarray) -> np.ndarray:
        """The columns of the weight, from all values of the tensor."""
        return values[self.rows].T if self.part.transposed else values


def layers_of(leaf: ParamLayout) -> Sequence[int | None]:
    """The indices of a leaf's stacked layers; None alone if it is not stacked."""
    return range(leaf.layers) if leaf.stack else (None,)


def tensors_of(leaf: ParamLayout, parts: TensorParts) -> Iterator[Tensor]:
    """Every tensor of a leaf, layer by layer."""
    for layer in layers_of(leaf):
        yield from tensors_at(place_of(leaf, layer), leaf.shape, parts)


def tensors_at(place: Place, shape: Shape, parts: TensorParts) -> Iterator[Tensor]:
    """The tensors of a weight of this shape (of one layer)."""
    name, layer = place
    for part in parts.get(name, ()):
        yield Tensor(part.name.format(layer=layer), place, shape, part)


def place_of(leaf: ParamLayout, layer: int | None) -> Place:
    """The place of a leaf, or of one layer of a leaf that is stacked."""
    first, *rest = leaf.path
    if first != "blocks":
        return leaf.name, layer
    # ("blocks", "block", ...) when stacked, ("blocks", "3", ...) in a list
    return "/".join(("block", *rest[1:])), int(rest[0]) if layer is None else layer
