"""The Hugging Face tensors that make up each leaf of a ``zerojax.models.GPT``.

A leaf is named by its path, with ``block/`` for the leaves of every block: "embed/embedding",
"block/attention/qkv/kernel". Its matrix is (in, out); each tensor holds some of its columns, transposed or
not. A transposed tensor may hold those of other leaves as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerojax.sharding.layout import ParamLayout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A Hugging Face tensor as a range of a leaf's columns (of its last axis).

    Attributes:
        name: of the tensor; "{layer}" in it is the index of the block.
        start: its first column in the leaf.
        stop: the column after its last; None for the end.
        transposed: whether the file holds it as (out, in).
        required: False for the second copy of a tied matrix, which a file may leave out.
        first_row: where the columns begin among the rows of a transposed tensor.
        rows: of the whole tensor, if it holds several leaves.
    """

    name: str
    start: int = 0
    stop: int | None = None
    transposed: bool = False
    required: bool = True
    first_row: int = 0
    rows: int | None = None

    @property
    def columns(self) -> slice:
        """The range of columns."""
        return slice(self.start, self.stop)

    def file_shape(self, leaf_shape: Shape) -> Shape:
        """The tensor's shape in a file, for a leaf of the given shape (of one layer)."""
        *rows, width = leaf_shape
        shape = (*rows, self.rows or len(range(width)[self.columns]))
        return shape[::-1] if self.transposed else shape


TensorParts = dict[str, tuple[TensorPart, ...]]


def whole(name: str) -> tuple[TensorPart, ...]:
    """A leaf that is one tensor, unchanged."""
    return (TensorPart(name),)


def matrix(name: str) -> tuple[TensorPart, ...]:
    """A kernel that is the weight of one ``torch.nn.Linear``, which PyTorch holds as (out, in)."""
    return (TensorPart(name, transposed=True),)


def rows_of(name: str, first: int, rows: int) -> tuple[TensorPart, ...]:
    """A kernel that is some of a ``torch.nn.Linear``'s rows: those from ``first`` on, of ``rows`` in all."""
    return (TensorPart(name, transposed=True, first_row=first, rows=rows),)


def embeddings(name: str, *, tied: bool) -> TensorParts:
    """The token embedding, of the given name, and the output projection, which are one leaf if tied."""
    table, head = TensorPart(name), TensorPart("lm_head.weight", required=not tied)
    if tied:
        return {"embed/embedding": (table, head)}
    return {"embed/embedding": (table,), "head/embedding": (head,)}


def side_by_side(names: tuple[str, ...], widths: tuple[int, ...], transposed: bool) -> tuple[TensorPart, ...]:
    """A leaf whose columns are several tensors, one after the other."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return tuple(
        TensorPart(name, start, start + width, transposed)
        for name, start, width in zip(names, starts, widths, strict=True)
    )


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file, and its place in the model.

    Attributes:
        name: in the file.
        shape: in the file.
        leaf: that it is a part of.
        layer: index among the leaf's stacked layers, or None.
        part: its columns of the leaf.
    """

    name: str
    shape: Shape
    leaf: ParamLayout
    layer: int | None
    part: TensorPart


def layers_of(leaf: ParamLayout) -> Sequence[int | None]:
    """The indices of a leaf's stacked layers; None alone if it is not stacked."""
    return range(leaf.layers) if leaf.stack else (None,)


def tensors_of(leaf: ParamLayout, parts: TensorParts) -> Iterator[Tensor]:
    """Every tensor of a leaf, layer by layer."""
    for layer in layers_of(leaf):
        yield from layer_tensors(leaf, layer, parts)


def layer_tensors(leaf: ParamLayout, layer: int | None, parts: TensorParts) -> Iterator[Tensor]:
    """The tensors of one layer of a leaf; ``layer`` is None if the leaf is not stacked."""
    name, number = place_of(leaf, layer)
    for part in parts[name]:
        yield Tensor(part.name.format(layer=number), part.file_shape(leaf.shape), leaf, layer, part)


def place_of(leaf: ParamLayout, layer: int | None) -> tuple[str, int | None]:
    """The name of a leaf in ``TensorParts``, and the index of its block, if it is in one."""
    first, *rest = leaf.path
    if first != "blocks":
        return leaf.name, layer
    # ("blocks", "block", ...) when stacked, ("blocks", "3", ...) in a list
    return "/".join(("block", *rest[1:])), int(rest[0]) if layer is None else layer
