"""The fragments into which local updates cut a parameter (``zerojax.train.local_updates``)."""

import dataclasses
import math
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.memory import in_host, to_device, to_host
from zerojax.sharding.wire_format import Codec
from zerojax.zero_config.config import PerHop, ZeroConfig


@dataclass(frozen=True)
class Fragments:
    """A parameter cut into ``every`` fragments. Each step sends one of them.

    An owner's shard of all layers is cut into ``every`` runs of whole codec blocks; fragment i is run i of
    every owner. All runs have the same length: places behind the shard's end are read as zeros and never
    written.

    The methods run inside ``shard_map``, on one device's part of a stored parameter. That is the shard of one
    owner, or the shards of several owners, one after another, of each layer.

    Attributes:
        leaf: the parameter's layout in the mesh.
        every: the number of fragments.
        change: the format in which changes of the outer weights are sent to the nodes.
        blocks: codec blocks in one owner's shard of one layer.
        count: codec blocks of one owner's shard in a fragment.
        layout: the layout of one fragment, as if it were a parameter with one dimension.
        wide: blocks that are copied from each layer in host memory that holds a part of the fragment.
        some: the most layers over which a fragment's blocks extend.
        is_small: whether a fragment needs the whole parameter. XLA copies a whole parameter from host memory
            only in its stored shape.
    """

    leaf: ParamLayout
    every: int
    change: Codec
    blocks: int = field(init=False)
    count: int = field(init=False)
    layout: ParamLayout = field(init=False)
    wide: int = field(init=False)
    some: int = field(init=False)
    is_small: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        leaf, block = self.leaf, self.change.block
        blocks = leaf.shard // block
        count = -(-leaf.layers * blocks // self.every)
        wide = min(count, blocks)
        last = blocks - math.gcd(count, blocks)  # the last block of a layer at which a fragment may begin
        some = min(leaf.layers, -(-(last + count) // blocks))
        layout = dataclasses.replace(
            leaf,
            shape=(count * block * leaf.world.size,),
            dtype="float32",
            stack=(),
            parts=1,
            shard=count * block,
            weights=PerHop(node=self.change, local=Codec("fp32", block)),
        )
        is_small = some * wide == leaf.layers * blocks
        vars(self).update(blocks=blocks, count=count, layout=layout, wide=wide, some=some, is_small=is_small)

    @staticmethod
    def of(zero: ZeroConfig, leaf: ParamLayout) -> "Fragments":
        """The fragments of a parameter."""
        fmt = zero.wire_format_of(leaf.name, len(leaf.shape), zero.weights or zero.compute_format)
        return Fragments(leaf, zero.every, Codec(fmt, zero.block_size))

    def take(self, x: Float[Array, "..."], index: Int32[Array, ""]) -> Float[Array, " m"]:
        """Read fragment ``index`` of a parameter: flat, one owner's part after another.

        From a parameter in host memory, the parts of layers that hold the fragment are copied to the device.
        """
        layer, row = self._rows(index)
        blocks = self._by_block(to_device(x) if self.is_small else x)
        if in_host(blocks):
            blocks, layer, row = self._fetched(blocks, layer, row)
        taken = blocks.at[layer, :, row].get(mode="fill", fill_value=0)
        return taken.swapaxes(0, 1).reshape(-1)

    def put(
        self, x: Float[Array, "..."], index: Int32[Array, ""], fragment: Float[Array, " m"]
    ) -> Float[Array, "..."]:
        """The parameter with its fragment ``index`` replaced."""
        if in_host(x) and self.is_small:
            return to_host(self.put(to_device(x), index, fragment))
        layer, row = self._rows(index)
        rows = fragment.reshape(-1, self.count, self.change.block).swapaxes(0, 1)
        blocks = self._by_block(x)
        if not in_host(x):
            return blocks.at[layer, :, row].set(rows, mode="drop").reshape(x.shape)
        here, near, close = self._fetched(blocks, layer, row)
        # Read before it is written: otherwise XLA copies the whole stack.
        here, blocks = lax.optimization_barrier((here.at[near, :, close].set(rows, mode="drop"), blocks))
        for part, start in zip(here, self._parts(layer[0], row[0]), strict=True):
            blocks = lax.dynamic_update_slice(
                blocks, to_host(part[None]), start, allow_negative_indices=False
            )
        return blocks.reshape(x.shape)

    def without_padding(
        self, fragment: Float32[Array, " m"], index: Int32[Array, ""], axes: tuple[str, ...]
    ) -> Float32[Array, " m"]:
        """Fragment ``index`` with zeros in the parameter's padding.

        A rotation spreads rounding errors over 32 neighbours, and some of these may be padding.

        Args:
            fragment: as ``take`` returns it.
            index: which fragment it is.
            axes: the mesh axes over which the parameter is spread, in the order of its owners.
        """
        leaf = self.leaf
        if not leaf.rotation or leaf.padded == leaf.size:
            return fragment
        owners = fragment.size // (self.count * self.change.block)
        owner = lax.axis_index(axes) * owners + jnp.arange(owners)
        _, row = self._rows(index)
        place: Int32[Array, "owners count block"] = (
            owner[:, None, None] * leaf.shard
            + row[None, :, None] * self.change.block
            + jnp.arange(self.change.block)[None, None]
        )
        return jnp.where(leaf.element_at(place.reshape(-1)) < leaf.size, fragment, 0)

    def _rows(self, index: Int32[Array, ""]) -> tuple[Int32[Array, " count"], Int32[Array, " count"]]:
        """For each block of a fragment, its layer and its place among the blocks of an owner's shard."""
        return jnp.divmod(index * self.count + jnp.arange(self.count), self.blocks)

    def _fetched(
        self,
        blocks: Float[Array, "layers owners blocks block"],
        layer: Int32[Array, " count"],
        row: Int32[Array, " count"],
    ) -> tuple[Float[Array, "some owners wide block"], Int32[Array, " count"], Int32[Array, " count"]]:
        """The parts of layers in host memory that hold a fragment, copied to the device.

        Returns:
            These parts, and the places of the fragment's blocks in them, like ``_rows`` for the whole
            parameter.
        """
        shape = (1, blocks.shape[1], self.wide, blocks.shape[3])
        starts = self._parts(layer[0], row[0])
        parts = [
            to_device(lax.dynamic_slice(blocks, start, shape, allow_negative_indices=False))
            for start in starts
        ]
        near = layer - starts[0][0]
        begin = jnp.stack([start[2] for start in starts])
        return jnp.concatenate(parts), near, row - begin[jnp.minimum(near, len(starts) - 1)]

    def _parts(
        self, layer: Int32[Array, ""], row: Int32[Array, ""]
    ) -> list[tuple[Int32[Array, ""], int, Int32[Array, ""], int]]:
        """Where the parts of ``wide`` blocks begin that hold a fragment.

        Args:
            layer: the layer of the fragment's first block; behind the last layer, if the fragment is all
                padding.
            row: the first block's place in that layer.
        """
        first = jnp.minimum(layer, self.leaf.layers - self.some)

        def begin(number: int) -> Int32[Array, ""]:
            ahead = row - (first + number - layer) * self.blocks
            return jnp.clip(ahead, 0, self.blocks - self.wide)

        return [(first + number, 0, begin(number), 0) for number in range(self.some)]

    def _by_block(self, x: Float[Array, "..."]) -> Float[Array, "layers owners blocks block"]:
        return x.reshape(self.leaf.layers, -1, self.blocks, self.change.block)
