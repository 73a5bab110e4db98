"""The layout of a parameter: which device owns which elements.

A parameter is flattened and padded with zeros to a multiple of the number of devices, or of that times the
codec block if it is quantized. It is cut into ``local x nodes`` equal blocks. Device ``(node n, local l)``
owns block ``l * nodes + n``: as a global array, one dimension is sharded ``P(("local", "node"))``. In that
order every hop is contiguous. An all-gather over ``node`` gives block row ``l``, the secondary partition. An
all-gather over ``local`` then gives the whole parameter. The gradient's two all-to-alls run the same way back
(this order is the tensor-slice reordering of ZeRO++ section 3.3, equation 2).

A weight or a gradient is at one of three levels:

========== ================== ==========================================
level      elements a device  held by
========== ================== ==========================================
primary    P / (nodes*local)  its owner alone
secondary  P / local          every node once, spread over its devices
full       P                  every device
========== ================== ==========================================

Weights of experts may be spread over a node's devices for good. Their leading axis is then cut into one part
for each device (``ParamLayout.parts``), and each part is padded separately, so that device l's secondary
partition is part l. At "full" a device has its own part alone (``ParamLayout.on_device``), and no hop over
``local`` is needed.

Every node holds the master weights of matrices that the optimizer needs whole (Muon), or with
``ZeroConfig.state_spread="node"`` all master weights, spread over its devices
(``ParamLayout.in_every_node``). These weights cross no nodes. Their gradient sums cross nodes once more after
they have met at the owners.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Num

from pallas_kernels.formats import BITS
from zerojax.sharding.mesh import LOCAL, OWNED, MeshShape
from zerojax.sharding.param_tree import Path
from zerojax.sharding.wire_format import E4M3, Codec
from zerojax.zero_config.config import NF4, NF4_BLOCK, PerHop, ZeroConfig
from zerojax.zero_config.options import Rounding

Values = tuple[Num[Array, "..."], ...]
"""One array for each trained parameter of a unit: its gradient, a sum of them, or a part of the weight."""


@dataclass(frozen=True)
class ParamShape:
    """A parameter of the model before it is laid out.

    Attributes:
        path: its path in the model.
        shape: its unsharded shape; of one layer, if it is stacked.
        dtype: its dtype in the model.
        stack: ``(layers,)`` if layers are stacked along a leading axis, more extents if nested loops scan
            them, otherwise ``()``.
        name: the path, joined by "/".
        size: elements of one layer, without padding.
        layers: the number of layers; 1 if it is not stacked.
        count: elements of all layers, without padding.
        unsharded_shape: the shape in the model, layers included.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    stack: tuple[int, ...]
    name: str = field(init=False, compare=False, repr=False)
    size: int = field(init=False, compare=False, repr=False)
    layers: int = field(init=False, compare=False, repr=False)
    count: int = field(init=False, compare=False, repr=False)
    unsharded_shape: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        size, layers = math.prod(self.shape), math.prod(self.stack)
        vars(self).update(
            name="/".join(self.path),
            size=size,
            layers=layers,
            count=size * layers,
            unsharded_shape=(*self.stack, *self.shape),
        )


@dataclass(frozen=True)
class ParamLayout(ParamShape):
    """A parameter with its layout and its wire formats.

    Attributes:
        world: extents of the mesh.
        shard: elements of one layer that one device owns, padding included.
        weights: codecs of the hops that gather the weight.
        grads: codecs of the hops that reduce the gradient.
        rotation: width of the gradient's rotation; 0 if no hop is quantized.
        index: the parameter's number in the model, which salts its random bits.
        compute_dtype: the compute dtype of the config.
        frozen: whether it is not trained. It is then stored in the format of ``weights``, at the level
            ``ShardingStrategy.frozen``.
        sums: if every node holds the master weight, the codec in which an owner sends its gradient sums to
            all nodes; otherwise None.
        parts: the number of separately padded parts into which the leading axis is cut: 1, or the number of
            devices of a node.
        of_experts: whether the leading axis counts experts.
        padded: elements of one layer, padding included.
        secondary: elements of one layer's secondary partition on one device, padding included.
        in_every_node: whether every node holds the master weight, spread over its devices.
        owners: the mesh axes over which the master weight is spread, in the order of its blocks.
        owned: elements of one layer of the master weight on one device, padding included.
        next_codec: of the master weight's next hop: the node hop, or the local hop if it has no node hop.
        gathered_dtype: the dtype to compute in: never wider than the model's own.
        fp8: whether the weight is gathered as an operand of fp8 products.
        stored_shape: the shape in the train state: flat, but of the unsharded rank. Trailing axes of extent 1
            keep the rank, so that an optimizer mask such as ``x.ndim > 1`` gives the same result as on the
            model. A stacked parameter has one axis more there than one of its layers.
        on_device: the layout of the tensor that one device gathers: this one, or the one of this device's
            part.
    """

    world: MeshShape
    shard: int
    weights: PerHop[Codec]
    grads: PerHop[Codec]
    rotation: int
    index: int
    compute_dtype: str
    frozen: bool = False
    sums: Codec | None = None
    parts: int = 1
    of_experts: bool = False
    padded: int = field(init=False, compare=False, repr=False)
    secondary: int = field(init=False, compare=False, repr=False)
    in_every_node: bool = field(init=False, compare=False, repr=False)
    owners: tuple[str, ...] = field(init=False, compare=False, repr=False)
    owned: int = field(init=False, compare=False, repr=False)
    next_codec: Codec = field(init=False, compare=False, repr=False)
    gathered_dtype: jnp.dtype = field(init=False, compare=False, repr=False)
    fp8: bool = field(init=False, compare=False, repr=False)
    stored_shape: tuple[int, ...] = field(init=False, compare=False, repr=False)
    on_device: "ParamLayout" = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        super().__post_init__()
        world, in_every_node = self.world, self.sums is not None
        padded, secondary = self.shard * world.size, self.shard * world.nodes
        crosses = world.nodes > 1 and not in_every_node
        dtypes = jnp.dtype(self.compute_dtype), jnp.dtype(self.dtype)
        on_device = self
        if self.parts > 1:
            shape = (self.shape[0] // self.parts, *self.shape[1:])
            on_device = replace(self, shape=shape, world=MeshShape(world.nodes, 1), parts=1)
        vars(self).update(
            padded=padded,
            secondary=secondary,
            in_every_node=in_every_node,
            owners=(LOCAL,) if in_every_node else world.owners,
            owned=secondary if in_every_node else self.shard,
            next_codec=self.weights.node if crosses else self.weights.local,
            gathered_dtype=min(dtypes, key=lambda dtype: dtype.itemsize),
            fp8=self.weights.local.fmt == E4M3,
            stored_shape=(*self.stack, padded, *(1,) * (len(self.shape) - 1)),
            on_device=on_device,
        )

    @property
    def in_node(self) -> "ParamLayout":
        """The layout if each node holds the parameter alone: a device then owns its secondary partition."""
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
            For each part: a place, the first element stored from there on, and one past the last.
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
    """Lay out one parameter and choose its formats from ``ZeroConfig.precise`` and its rank.

    A weight of ``fp8`` products crosses ``local`` in the form that products read, and ``node`` too, unless
    differences or fewer bits are sent there. A frozen weight is stored as it travels. If every node holds the
    master weight, gradient sums cross nodes in the format that the weight would use there, or in the
    gradient's format if that has more bits.
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
    own = p.path, p.shape, p.dtype, p.stack, world, shard, weights, grads, rotation, index
    return ParamLayout(*own, str(zero.compute_dtype), frozen, sums, parts, of_experts)


def without_place(leaf: ParamLayout) -> ParamLayout:
    """The layout without its path and index, equal for all parameters of the same shape and formats."""
    return replace(leaf, path=(), index=0)


def flatten(x: Num[Array, "..."], leaf: ParamLayout) -> Num[Array, " padded"]:
    """One layer of unsharded shape as ``[padded]``: flat, with zeros at the end of each of its ``parts``."""
    if leaf.padded == leaf.size:
        return x.reshape(-1)
    return _padded(x.reshape(leaf.parts, -1), leaf).reshape(-1)


def unflatten(flat: Num[Array, " padded"], leaf: ParamLayout) -> Num[Array, "..."]:
    """Undo ``flatten``."""
    return flat.reshape(leaf.parts, -1)[:, : leaf.size // leaf.parts].reshape(leaf.shape)


def to_stored[A: (Array, np.ndarray)](x: A, leaf: ParamLayout) -> A:
    """Convert a leaf of unsharded shape, with all layers, to the shape that the train state stores.

    An array on the host stays there, as a copy.
    """
    return _reshaped(_padded(_reshaped(x, leaf.layers, leaf.parts, -1), leaf), *leaf.stored_shape)


def from_stored[A: (Array, np.ndarray)](x: A, leaf: ParamLayout) -> A:
    """Undo ``to_stored``."""
    parts = _reshaped(x, leaf.layers, leaf.parts, -1)
    return _reshaped(parts[..., : leaf.size // leaf.parts], *leaf.unsharded_shape)


def _reshaped[A: (Array, np.ndarray)](x: A, *shape: int) -> A:
    """Another shape of the same kind of array, which type checkers do not conclude from the method."""
    return cast(Callable[..., A], x.reshape)(*shape)


def _padded[A: (Array, np.ndarray)](parts: A, leaf: ParamLayout) -> A:
    """The parts of one or of all layers, each padded with zeros."""
    pad = cast(Callable[..., A], np.pad if isinstance(parts, np.ndarray) else jnp.pad)
    return pad(parts, [(0, 0)] * (parts.ndim - 1) + [(0, (leaf.padded - leaf.size) // leaf.parts)])


def in_a_row(x: Num[Array, "..."], stack: tuple[int, ...]) -> Num[Array, "layers ..."]:
    """A stacked array with one axis of layers in place of the axes of ``stack``."""
    return x.reshape(math.prod(stack), *x.shape[len(stack) :])
