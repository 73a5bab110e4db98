"""The Hugging Face tensors that make up each leaf of a ``zerojax.models.GPT``.

A leaf is named by its path, with ``block/`` for the leaves of every block: "embed/embedding",
"block/attention/qkv/kernel". Its matrix is (in, out). Each tensor holds some of its columns, transposed or
not. A tensor may also hold columns of other leaves, side by side or interleaved. The leaves of experts are
(experts, in, out). A tensor then holds one expert's matrix, or the matrices of all experts.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from zerojax.models.config import GPTConfig
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.param_tree import Path

Shape = tuple[int, ...]
CONVOLUTION: Shape = (1,)
"""``TensorPart.ones`` of (out, 1, in), the layout of ``torch.nn.Conv1d``."""
Place = tuple[str, int | None]
"""The name of a weight in ``TensorParts``, and the index of its block (None outside blocks)."""


@dataclass(frozen=True)
class TensorPart:
    """A Hugging Face tensor as a range of a leaf's columns (of its last axis).

    Attributes:
        name: the tensor's name; "{layer}" in it is the index of the block, "{expert}" the index of the
            expert.
        start: its first column in the leaf.
        stop: the column after its last; None for the end.
        transposed: whether the file holds it as (out, in).
        required: False for the second copy of a tied matrix, which a file may leave out.
        first: the tensor's output that is the first of these columns.
        step: distance between the tensor's outputs that are neighbouring columns.
        outputs: outputs of the whole tensor, if it holds several leaves.
        expert: the index in the leaf's first axis; None if the leaf is one matrix.
        experts: the number of experts, if the tensor holds all of them.
        ones: axes of length 1 that it has in the file in addition, such as ``CONVOLUTION``.
    """

    name: str
    start: int = 0
    stop: int | None = None
    transposed: bool = False
    required: bool = True
    first: int = 0
    step: int = 1
    outputs: int | None = None
    expert: int | None = None
    experts: int | None = None
    ones: Shape = ()


Parts = Mapping[str, tuple[TensorPart, ...]]
"""The tensors of leaves, by the leaves' names."""


@dataclass(frozen=True)
class TensorParts:
    """The tensors of each leaf of a model.

    Attributes:
        outside: the tensors of leaves outside blocks.
        blocks: the tensors of blocks' leaves, for each of ``GPTConfig.kinds``.
        order: ``GPTConfig.order``.
    """

    outside: Parts
    blocks: Sequence[Parts]
    order: tuple[int, ...]

    def at(self, place: Place) -> tuple[TensorPart, ...]:
        """The tensors of a weight; none if the weight is unknown."""
        name, layer = place
        own = self.outside if layer is None else self.blocks[self.order[layer]]
        return own.get(name, ())


Groups = Callable[[GPTConfig], tuple[int, tuple[int, ...]]]
"""How many groups of outputs a tensor has, and the widths of the pieces of each."""


def qkv_groups(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """The number of key and value heads, and the widths of the queries, key and value of each."""
    width = model.head_dim
    return model.key_value_heads, (model.heads // model.key_value_heads * width, width, width)


def gate_and_up(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """One group of outputs: the MLP's gate, and the projection that it multiplies."""
    return 1, (model.ffn_width, model.ffn_width)


def alternating(model: GPTConfig) -> tuple[int, tuple[int, ...]]:
    """A group of two outputs for each of the MLP's: of its gate, and of the projection that it multiplies."""
    return model.ffn_width, (1, 1)


@dataclass(frozen=True)
class Source:
    """Outputs of a module or of a tensor that make up one of our weights.

    Attributes:
        name: of the module; of the tensor itself if our weight is no module's kernel or bias. With "{expert}"
            in it there is a tensor for each expert.
        groups: the number of equal groups of the tensor's outputs, and the widths of the pieces of each
            (``qkv_groups``); None if the tensor is one piece.
        pieces: the pieces of each group that make up the weight, one behind the other; None for all.
        transposed: as in ``TensorPart``, of a tensor that is named itself.
        stacked: whether it holds the matrices of all experts.
        ones: as in ``TensorPart``.
    """

    name: str
    groups: Groups | None = None
    pieces: tuple[int, ...] | None = None
    transposed: bool = True
    stacked: bool = False
    ones: Shape = ()

    def parts(self, model: GPTConfig, block: str, first: TensorPart | None = None) -> Iterator[TensorPart]:
        """The tensors of the weight; their names begin with ``block``.

        ``first`` describes a module's tensor: the end of its name, its layout, and its first column.
        """
        part = first or TensorPart("", transposed=self.transposed, ones=self.ones)
        part = replace(part, name=block + self.name + part.name)
        if self.stacked:
            part = replace(part, experts=model.experts)
        each = "{expert}" in self.name or self.stacked
        for expert in range(model.experts) if each else (None,):
            name = part.name.replace("{expert}", str(expert))
            yield from self._pieces(model, replace(part, name=name, expert=expert))

    def _pieces(self, model: GPTConfig, part: TensorPart) -> Iterator[TensorPart]:
        if self.groups is None:
            yield part
            return
        (count, widths), start = self.groups(model), part.start
        step = sum(widths)
        part = replace(part, outputs=count * step)
        for piece in range(len(widths)) if self.pieces is None else self.pieces:
            width, first = widths[piece], sum(widths[:piece])
            if width == 1:
                yield replace(part, start=start, stop=start + count, first=first, step=step)
            else:
                for group in range(count):
                    begin = start + group * width
                    yield replace(part, start=begin, stop=begin + width, first=first + group * step)
            start += count * width


@dataclass(frozen=True)
class Joined:
    """Tensors, or pieces of them, whose outputs lie side by side in one of our weights.

    Attributes:
        names: of the modules, or of the tensors of a bare parameter.
        widths: of the outputs of each.
        ones: as in ``TensorPart``.
    """

    names: tuple[str | Source, ...]
    widths: Callable[[GPTConfig], Sequence[int]]
    ones: Shape = ()

    def parts(self, model: GPTConfig, block: str, first: TensorPart | None = None) -> Iterator[TensorPart]:
        """The tensors of the weight, as from ``Source.parts``."""
        part, start = first or TensorPart("", transposed=True, ones=self.ones), 0
        for own, width in zip(self.names, self.widths(model), strict=True):
            if width:  # a layer may lack the module
                own = Source(own) if isinstance(own, str) else own
                yield from own.parts(model, block, replace(part, start=start, stop=start + width))
                start += width


def qkv_widths(model: GPTConfig) -> tuple[int, int, int]:
    """The widths of the queries, keys and values of all heads."""
    return model.attention_width, model.keys_width, model.values_width


Module = str | Source | Joined
"""The Hugging Face modules of one of our modules: one, a part of one, or several side by side."""


Tensors = dict[str, Source | Joined]
"""Our parameters that are whole tensors -> the tensors."""


@dataclass(frozen=True)
class Names:
    """The names of a family's modules.

    Attributes:
        block: our modules in a block -> theirs. Leaves that a model lacks may be among them; biases always
            are.
        bare: our parameters and state in a block that are a whole tensor -> the tensor.
        outside: our further parameters outside blocks -> their tensors.
        layers: prefix of the names of a block's modules.
        embed: the token embedding.
        norm: the norm after the last block.
        position: the table of learned positions.
        head: the output projection, if it is not the token embedding.
        experts: the module of all experts in transformers 5, by which PEFT names their adapters.
        transposed: whether kernels are (out, in), as in ``torch.nn.Linear``.
        other_names: modules of blocks, and their names in files that transformers wrote.
    """

    block: dict[str, Module]
    bare: Tensors = field(default_factory=dict)
    outside: dict[str, Source] = field(default_factory=dict)
    layers: str = "layers.{layer}."
    embed: str = "embed_tokens"
    norm: str = "norm"
    position: str | None = None
    head: str = "lm_head"
    experts: str = "mlp.experts"
    transposed: bool = True
    other_names: tuple[tuple[str, str], ...] = ()

    def in_files(self, names: Collection[str]) -> "Names":
        """The names in files with the tensors ``names``; modules that these lack have ``other_names``."""
        modules = {re.sub(r".*layers\.\d+\.", "", name).rpartition(".")[0] for name in names}
        others = {theirs: other for theirs, other in self.other_names if theirs not in modules}
        block = {
            ours: others.get(theirs, theirs) if isinstance(theirs, str) else theirs
            for ours, theirs in self.block.items()
        }
        return replace(self, block=block) if others else self

    def parts(self, model: GPTConfig, prefix: str) -> TensorParts:
        """The tensors of each leaf; all names except the output projection's begin with ``prefix``."""
        table = TensorPart(f"{prefix}{self.embed}.weight")
        head = TensorPart(f"{self.head}.weight", required=not model.tied)
        found = _norm("norm", prefix + self.norm)
        if model.tied:  # they are one leaf
            found["embed/embedding"] = table, head
        else:
            found |= {"embed/embedding": (table,), "head/embedding": (head,)}
        found["head/bias"] = (TensorPart(f"{self.head}.bias"),)
        if self.position is not None:
            found["position/embedding"] = (TensorPart(f"{prefix}{self.position}.weight"),)
        found |= {ours: tuple(tensor.parts(model, prefix)) for ours, tensor in self.outside.items()}
        blocks = [self._of_block(kind, prefix + self.layers) for kind, _ in model.kinds]
        return TensorParts(found, blocks, model.order)

    def _of_block(self, model: GPTConfig, prefix: str) -> Parts:
        """The tensors of each leaf of a block of ``model``, whose blocks are of one kind."""
        found: dict[str, tuple[TensorPart, ...]] = {}
        for ours, theirs in self.block.items():
            if "norm" in ours:
                assert isinstance(theirs, str)
                found |= _norm(f"block/{ours}", prefix + theirs)
                continue
            source = Source(theirs) if isinstance(theirs, str) else theirs
            kernel, bias = TensorPart(".weight", transposed=self.transposed), TensorPart(".bias")
            for leaf, first in (("kernel", kernel), ("bias", bias)):
                found[f"block/{ours}/{leaf}"] = tuple(source.parts(model, prefix, first))
        for ours, tensor in self.bare.items():
            found[f"block/{ours}"] = tuple(tensor.parts(model, prefix))
        return found


def _norm(ours: str, theirs: str) -> dict[str, tuple[TensorPart, ...]]:
    return {
        f"{ours}/scale": (TensorPart(f"{theirs}.weight"),),
        f"{ours}/bias": (TensorPart(f"{theirs}.bias"),),
    }


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, and the weight's columns that it holds.

    Attributes:
        name: the name in the file.
        place: the weight.
        weight: the weight's shape (of one layer).
        part: the columns of the weight.
    """

    name: str
    place: Place
    weight: Shape
    part: TensorPart

    @property
    def columns(self) -> slice:
        """The range of the weight's columns."""
        start, stop, _ = slice(self.part.start, self.part.stop).indices(self.weight[-1])
        return slice(start, stop)

    @property
    def rows(self) -> slice:
        """The range of the tensor's outputs (the rows, if it is transposed) that holds these columns."""
        first, count = self.part.first, self.columns.stop - self.columns.start
        return slice(first, first + count * self.part.step, self.part.step)

    @property
    def outputs(self) -> int:
        """The tensor's outputs, for all weights that it holds."""
        return self.part.outputs or self.columns.stop - self.columns.start

    @property
    def shape(self) -> Shape:
        """Its shape in the file."""
        shape = (*self.weight[0 if self.part.expert is None else 1 : -1], self.outputs)
        shape = shape[::-1] if self.part.transposed else shape
        shape = self._with_ones(shape, 1)
        return shape if self.part.experts is None else (self.part.experts, *shape)

    @property
    def axes(self) -> int:
        """The number of its axes in the file, without ``TensorPart.ones``: 1 for a vector."""
        return len(self.shape) - len(self.part.ones)

    def region(self, inputs: slice = slice(None)) -> tuple[slice, ...]:
        """The tensor's ranges, one per axis, that hold the weight's columns in the rows ``inputs``."""
        own = (self.rows, inputs) if self.part.transposed else (inputs, self.rows)[-self.axes :]
        own = self._with_ones(own, slice(None))
        expert = self.part.expert
        return own if self.part.experts is None or expert is None else (slice(expert, expert + 1), *own)

    def _with_ones[T](self, axes: tuple[T, ...], one: T) -> tuple[T, ...]:
        """``axes`` with ``one`` for each of the axes that the file has in addition."""
        found = list(axes)
        for axis in self.part.ones:
            found.insert(axis, one)
        return tuple(found)

    @property
    def inputs(self) -> slice:
        """The tensor's rows in the weight, seen as one matrix of (in, out)."""
        height = self.weight[-2] if len(self.weight) > 1 else 1
        first = height * (self.part.expert or 0)
        return slice(first, first + height)

    def among(self, weight: np.ndarray) -> np.ndarray:
        """The weight's columns that the tensor holds, as a view of one layer (in, out)."""
        own = weight if self.part.expert is None else weight[self.part.expert]
        return own[..., self.columns]

    def of(self, weight: np.ndarray) -> np.ndarray:
        """The weight's columns that the tensor holds, in the tensor's layout."""
        columns = self.among(weight)
        columns = columns.T if self.part.transposed else columns
        columns = np.expand_dims(columns, self.part.ones)
        return columns if self.part.experts is None else columns[None]

    def within(self, values: np.ndarray) -> np.ndarray:
        """The columns of the weight in its layout, from the tensor's values in the layout of the file."""
        return self.turned(values[self.region()])

    def turned(self, values: np.ndarray) -> np.ndarray:
        """Columns in the weight's layout, from the file's layout."""
        values = values if self.part.experts is None else values[0]
        values = values.squeeze(self.part.ones)
        return values.T if self.part.transposed else values


def layers_of(leaf: ParamLayout) -> Sequence[int | None]:
    """The indices of a leaf's stacked layers; only None if it is not stacked."""
    return range(leaf.layers) if leaf.stack else (None,)


def tensors_of(leaf: ParamLayout, parts: TensorParts) -> Iterator[Tensor]:
    """Every tensor of a leaf, layer by layer."""
    for layer in layers_of(leaf):
        yield from tensors_at(place_at(leaf.path, layer, parts.order), leaf.shape, parts)


def tensors_of_state(
    model_state: Mapping[str, jax.Array | jax.ShapeDtypeStruct], parts: TensorParts
) -> Iterator[tuple[str, int | None, Tensor]]:
    """The tensors of a model's state other than weights, such as the router's selection biases.

    Yields:
        An array's name, the index of a layer if it is stacked, and the tensor.
    """
    for name, x in model_state.items():
        path = tuple(name.split("/"))
        stacked = "block" in path[1:3]
        for layer in range(x.shape[0]) if stacked else (None,):
            for tensor in tensors_at(place_at(path, layer, parts.order), x.shape[stacked:], parts):
                yield name, layer, tensor


def tensors_at(place: Place, shape: Shape, parts: TensorParts) -> Iterator[Tensor]:
    """The tensors of a weight with this shape (of one layer)."""
    for part in parts.at(place):
        yield Tensor(part.name.format(layer=place[1]), place, shape, part)


def place_at(path: Path, layer: int | None, order: Sequence[int]) -> Place:
    """The place of a path's weight; ``layer`` is the index in its stack, None if it is not stacked.

    ``order`` is ``GPTConfig.order``.
    """
    first, *rest = path
    if first != "blocks":
        return "/".join(path), layer
    # ("blocks", "block", ...) in the only stack; ("blocks", "3", "block", ...) in the stack of a kind whose
    # first layer is 3; ("blocks", "3", ...) in a list.
    number, *rest = rest
    if number == "block":
        return "/".join(("block", *rest)), layer or 0
    if layer is None:
        return "/".join(("block", *rest)), int(number)
    numbers = [other for other, kind in enumerate(order) if kind == order[int(number)]]
    return "/".join(("block", *rest[1:])), numbers[layer]
