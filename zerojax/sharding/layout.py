"""The layout of a leaf: which device owns which elements.

A leaf is flattened, padded with zeros to a multiple of the world (times the codec block, if it is quantized)
and cut into ``local x nodes`` equal blocks, of which device ``(node n, local l)`` owns block
``l * nodes + n``: as a global array, one dimension sharded ``P(("local", "node"))``. With that order every
hop is contiguous: an all-gather over ``node`` gives block row ``l``, the secondary partition; one over
``local`` then gives the leaf; the gradient's two all-to-alls run the same way back (the tensor-slice
reordering of ZeRO++ section 3.3, equation 2, is this order).

A weight or a gradient is at one of three levels:

========== ================== ==========================================
level      elements a device  held by
========== ================== ==========================================
primary    P / (nodes*local)  its owner alone
secondary  P / local          every node once, spread over its devices
full       P                  every device
========== ================== ==========================================

The leading axis of a weight of experts may be spread over a node's devices for good: it is cut into one part
for each (``ParamLayout.parts``), which is padded by itself, so that device l's secondary partition is part l.
At "full" a device then has its own part alone (``ParamLayout.on_device``): no hop over ``local``.

The master weights of matrices that the optimizer needs whole (Muon) are held by every node, spread over its
devices: ``ParamLayout.in_every_node``. Their weights cross no nodes; the sums of their gradients, after they
have met at the owners, do once more.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Num

from pallas_kernels import BITS
from zerojax.sharding.mesh import LOCAL, OWNED, MeshShape
from zerojax.sharding.param_tree import Path
from zerojax.sharding.wire_format import E4M3, Codec
from zerojax.zero_config.config import NF4, NF4_BLOCK, PerHop, Rounding, ZeroConfig


@dataclass(frozen=True)
class ParamShape:
    """One parameter of the model, before it is laid out.

    Attributes:
        path: its path in the model.
        shape: unsharded shape; of one layer, if it is stacked.
        dtype: its dtype in the model.
        stack: ``(layers,)`` if that many layers are stacked along a leading axis, more extents if they are
            scanned by nested loops, else ``()``.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    stack: tuple[int, ...]

    @property
    def name(self) -> str:
        """The path, joined by "/"."""
        return "/".join(self.path)

    @property
    def size(self) -> int:
        """Elements of one layer, without padding."""
        return math.prod(self.shape)

    @property
    def layers(self) -> int:
        """The number of layers; 1 if it is not stacked."""
        return math.prod(self.stack)

    @property
    def count(self) -> int:
        """Elements of all layers, without padding."""
        return self.size * self.layers

    @property
    def unsharded_shape(self) -> tuple[int, ...]:
        """The shape in the model, layers included."""
        return (*self.stack, *self.shape)


@dataclass(frozen=True)
class ParamLayout(ParamShape):
    """One parameter of the model with its layout and its wire formats.

    Attributes:
        world: the mesh's extents.
        shard: elements of one layer that one device owns, padding included.
        weights: codecs of its gather's hops.
        grads: codecs of its gradient's hops.
        rotation: of its gradient; 0 if no hop is quantized.
        index: of the parameter in the model; salts its random bits.
        frozen: whether it is not trained: it is stored in the format of ``weights``, at
            ``ShardingStrategy.frozen``.
        sums: if every node holds the master weight: the codec in which its owner sends the sum of a shard's
            gradients to all nodes. Else None.
        parts: into how many parts, each padded by itself, a layer's leading axis is cut: 1, or one for each
            device of a node, which gathers no other.
        of_experts: whether the leading axis of a layer is the expert's.
    """

    world: MeshShape
    shard: int
    weights: PerHop[Codec]
    grads: PerHop[Codec]
    rotation: int
    index: int
    frozen: bool = False
    sums: Codec | None = None
    parts: int = 1
    of_experts: bool = False

    @property
    def on_device(self) -> "ParamLayout":
        """The layout of what one device gathers: the whole weight, or its own part by itself."""
        if self.parts == 1:
            return self
        shape = (self.shape[0] // self.parts, *self.shape[1:])
        return replace(self, shape=shape, world=MeshShape(self.world.nodes, 1), parts=1)

    @property
    def in_every_node(self) -> bool:
        """Whether every node holds the master weight, spread over its devices."""
        return self.sums is not None

    @property
    def owners(self) -> tuple[str, ...]:
        """The mesh axes over which the master weight is spread, in the order of its blocks."""
        return (LOCAL,) if self.in_every_node else self.world.owners

    @property
    def owned(self) -> int:
        """Elements of one layer of the master weight on one device, padding included."""
        return self.secondary if self.in_every_node else self.shard

    @property
    def next_codec(self) -> Codec:
        """The codec of the master weight's next hop: between nodes, or where it has none, within a node."""
        crosses = self.world.nodes > 1 and not self.in_every_node
        return self.weights.node if crosses else self.weights.local

    @property
    def fp8(self) -> bool:
        """Whether it is gathered as the operand of fp8 products."""
        return self.weights.local.fmt == E4M3

    @property
    def padded(self) -> int:
        """Elements of one layer, padding included."""
        return self.shard * self.world.size

    @property
    def secondary(self) -> int:
        """Elements of one layer's secondary partition on one device, padding included."""
        return self.shard * self.world.nodes

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the train state: flat, but of the unsharded rank.

        Trailing ones keep the rank, so that an optimizer mask such as ``x.ndim > 1`` gives the same result as
        on the model, in which a stacked leaf has an axis more than one layer's.
        """
        return (*self.stack, self.padded, *(1,) * (len(self.shape) - 1))

    @property
    def encoded_shape(self) -> tuple[int, ...]:
        """The shape of the shards in the local hop's format, one after another."""
        return (*self.stack, self.world.size * self.weights.local.row_items(self.shard))

    @property
    def in_node(self) -> "ParamLayout":
        """The layout where each node has the parameter by itself: a device owns its secondary partition."""
        return replace(self, world=MeshShape(1, self.world.local), shard=self.secondary)

    def element_at(self, place: Num[Array, "..."]) -> Num[Array, "..."]:
        """The element of a layer that is stored at a place in ``[0, padded)``; ``size`` in padding."""
        if self.parts == 1:
            return jnp.minimum(place, self.size)
        size, padded = self.size // self.parts, self.padded // self.parts
        own = place % padded
        return jnp.where(own < size, place // padded * size + own, self.size)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The elements stored at the places [start, stop), without padding.

        Yields:
            A place, and the first of the elements from there on and the one after the last, for each part.
        """
        size, padded = self.size // self.parts, self.padded // self.parts
        for part in range(start // padded, -(-stop // padded)):
            first = max(start - part * padded, 0)
            last = min(stop - part * padded, size)
            if first < last:
                yield part * padded + first, part * size + first, part * size + last

    def spec(self, axes: tuple[str, ...] = OWNED) -> PartitionSpec:
        """The sharding of the stored array: over ``axes``, layer by layer if it is stacked."""
        return PartitionSpec(*(None for _ in self.stack), axes or None)


def make_layout(
    p: ParamShape,
    *,
    index: int,
    world: MeshShape,
    zero: ZeroConfig,
    fp8: bool = False,
    frozen: bool = False,
    in_every_node: bool = False,
    parts: int = 1,
    of_experts: bool = False,
) -> ParamLayout:
    """Lay out one parameter and choose its formats, by ``ZeroConfig.precise`` and its rank.

    A weight of ``fp8`` products crosses ``local`` as what they read, and ``node`` as well, unless differences
    or fewer bits are sent there. A frozen one is stored as it travels. Where every node holds the
    master weight, sums of gradients cross nodes in the format in which the weight would have, if that has
    enough bits for gradients.
    """

    def codec(fmt: str, rounding: Rounding = "nearest") -> Codec:
        fmt = zero.wire_format_of(p.name, len(p.shape), fmt)
        return Codec(fmt, NF4_BLOCK if fmt == NF4 else zero.block_size, rounding)

    operand = Codec(E4M3, zero.block_size)
    if frozen:
        stored = operand if fp8 else codec(zero.frozen_weights or zero.compute_format)
        weights, chunks = PerHop(stored, stored), 1
        grads = PerHop(*[Codec(zero.compute_format, zero.block_size)] * 2)
    else:
        weights = PerHop(*map(codec, zero.weight_formats))
        grads = PerHop(*(codec(fmt, zero.rounding) for fmt in zero.grad_formats))
        chunks = zero.chunks
        if fp8:
            fewer = zero.weights_delta or BITS[weights.node.fmt] < 8
            weights = PerHop(node=weights.node if fewer else operand, local=operand)
    sums = codec(zero.sum_format, zero.rounding) if in_every_node else None
    in_fragments = zero.every > 0 and not frozen
    blocks = [c.block for c in (*weights, *grads, *filter(None, [sums])) if not c.raw or in_fragments]
    unit = chunks * max(blocks, default=1)
    shard = unit * -(-max(1, p.size // parts) // (unit * (world.size // parts)))
    rotation = zero.rotation if not all(codec.raw for codec in grads) else 0
    own = p.path, p.shape, p.dtype, p.stack
    return ParamLayout(*own, world, shard, weights, grads, rotation, index, frozen, sums, parts, of_experts)


def without_place(leaf: ParamLayout) -> ParamLayout:
    """A layout without the path that tells it from others of the same shape and formats."""
    return replace(leaf, path=(), index=0)


def flatten(x: Num[Array, "..."], leaf: ParamLayout) -> Num[Array, " padded"]:
    """One layer of unsharded shape, flat and padded with zeros."""
    if leaf.padded == leaf.size:
        return x.reshape(-1)
    return _padded(x.reshape(leaf.parts, -1), leaf).reshape(-1)


def unflatten(flat: Num[Array, " padded"], leaf: ParamLayout) -> Num[Array, "..."]:
    """Undo ``flatten``."""
    return _unpadded(flat.reshape(leaf.parts, -1), leaf).reshape(leaf.shape)


def to_stored[A: (Array, np.ndarray)](x: A, leaf: ParamLayout) -> A:
    """Convert a leaf of unsharded shape, with all layers, to the shape that the train state stores.

    An array on the host stays there, as a copy.
    """
    return _padded(x.reshape(leaf.layers, leaf.parts, -1), leaf).reshape(leaf.stored_shape)


def from_stored[A: (Array, np.ndarray)](x: A, leaf: ParamLayout) -> A:
    """Undo ``to_stored``."""
    return _unpadded(x.reshape(leaf.layers, leaf.parts, -1), leaf).reshape(leaf.unsharded_shape)


def _padded[A: (Array, np.ndarray)](parts: A, leaf: ParamLayout) -> A:
    """The parts of one or all layers, each of them padded with zeros."""
    pad = cast(Callable[..., A], np.pad if isinstance(parts, np.ndarray) else jnp.pad)
    return pad(parts, [(0, 0)] * (parts.ndim - 1) + [(0, (leaf.padded - leaf.size) // leaf.parts)])


def _unpadded[A: (Array, np.ndarray)](parts: A, leaf: ParamLayout) -> A:
    """Undo ``_padded``."""
    return parts[..., : leaf.size // leaf.parts]


def in_a_row(x: Num[Array, "..."], stack: tuple[int, ...]) -> Num[Array, "layers ..."]:
    """The layers of a stacked array along one axis."""
    return x.reshape(math.prod(stack), *x.shape[len(stack) :])
