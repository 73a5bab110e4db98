"""One weight: its values at one level, its scale, and what a single hop makes of it.

A weight is at a level of ``zerojax.sharding.layout``, and its values have one form at each. A shard encoded
in the local hop's format has m items:

=============== ================= ==================================================================
level           values, per layer form
=============== ================= ==================================================================
primary         ``[owned]``       fp32 master values, of a shard or of a node's shards
primary, ready  ``[m]``           encoded
secondary       ``[nodes * m]``   encoded, one owner's shard after another
full            of ``on_device``  in the compute dtype; where fp8 products read the weight, fp8 codes
=============== ================= ==================================================================

The same class is used for the arrays of a train state (global arrays, of all layers), inside ``shard_map``
(one device's), for their shapes and for their shardings. ``zerojax.weights.gather`` brings the weights of a
unit, which travel together, to another level.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from zerojax.matmul.operand import Fp8Operand
from zerojax.sharding.layout import ParamLayout, unflatten
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import NODE
from zerojax.sharding.strategy import LEVELS, Level
from zerojax.sharding.wire_format import Codec

Payload = Num[Array, " m"]
"""One weight on its way: encoded, of one layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A weight at a level.

    Attributes:
        values: see this module. Arrays, or what describes them: ShapeDtypeStructs, PartitionSpecs.
        layout: where its elements live, and how they are encoded on the way.
        level: where the values are now.
        ready: whether the values at "primary" of a trained weight are encoded already, as the next hop sends
            them (with delta, differences): its master values are in host memory.
        scale: fp32, one per layer, of a weight that fp8 products read: what it was multiplied by before
            encoding, or at "primary" will be. None for all others.
        gradient: at "full", of codes: zeros that nothing reads, whose cotangent is the weight's gradient.
            Codes, being integers, have none.
    """

    values: Any
    layout: ParamLayout = field(metadata={"static": True})
    level: Level = field(metadata={"static": True})
    scale: Any = None
    ready: bool = field(default=False, kw_only=True, metadata={"static": True})
    gradient: Any = None

    def reaches(self, level: Level) -> bool:
        """Whether the weight is at a level, or beyond it on the way to "full", or has no hop to it."""
        if level == "secondary" and self.layout.in_every_node:
            return True
        return LEVELS.index(self.level) >= LEVELS.index(level)

    @property
    def crosses_nodes(self) -> bool:
        """Whether the weight has a hop between nodes on the way to "full"."""
        return not self.reaches("secondary") and self.layout.world.nodes > 1

    @property
    def crosses_local(self) -> bool:
        """Whether the weight has a hop within a node on the way to "full"."""
        return not self.reaches("full") and self.layout.on_device.world.local > 1

    def replace(self, values: Any, level: Level | None = None, gradient: Any = None) -> "Weight":
        """The same weight and scale with other values, perhaps at another level; ``gradient`` is not kept."""
        level = level or self.level
        ready = self.ready and level == "primary"
        return dataclasses.replace(self, values=values, level=level, gradient=gradient, ready=ready)

    # From the owner: "primary".

    def scaled(self) -> Float[Array, "*layers owned"]:
        """The master values as they are encoded: times the scale, if there is one."""
        return self.values if self.scale is None else self.values * self.scale[..., None]

    def encoded(self, codec: Codec) -> Payload:
        """One layer's shard, or a node's one after another, as sent; some are stored in that form."""
        if self.ready or self.layout.frozen:
            return to_device(self.values)
        return codec.encode(self.scaled().reshape(-1, self.layout.shard)).reshape(-1)

    def sent(self, copy: Payload | None = None) -> Payload:
        """One layer's shard as its next hop sends it; between nodes, less its row of delta's copy."""
        if self.ready or copy is None or not self.crosses_nodes:
            return self.encoded(self.layout.next_codec)
        row = lax.dynamic_index_in_dim(self._widened(copy), lax.axis_index(NODE))
        return self.layout.weights.node.encode_delta(self.scaled()[None], row)[0]

    # In a node: "secondary".

    def arrived(self, payload: Payload) -> "Weight":
        """The secondary partition: the shards that all nodes sent, brought into the local hop's format."""
        node, local = self.layout.weights.node, self.layout.weights.local
        if node != local:
            sent = payload.reshape(self.layout.world.nodes, -1)
            payload = local.encode(node.decode(sent, self.layout.shard, jnp.dtype(jnp.float32))).reshape(-1)
        return self.replace(payload, "secondary")

    def arrived_difference(self, payload: Payload, copy: Payload) -> "Weight":
        """The secondary partition: delta's copy with the differences that all nodes sent added to it."""
        sent, weights = payload.reshape(self.layout.world.nodes, -1), self.layout.weights
        added = weights.local.encode(weights.node.decode_add(sent, self._widened(copy)))
        return self.replace(added.reshape(-1), "secondary")

    def _widened(self, copy: Payload) -> Num[Array, "nodes shard"]:
        """Rows of delta's copy as numbers, which kernels can add to: fp8 codes are none."""
        rows = copy.reshape(self.layout.world.nodes, -1)
        if not self.layout.fp8:
            return rows
        return self.layout.weights.local.decode(rows, self.layout.shard, jnp.dtype(jnp.bfloat16))

    # On a device: "full".

    def whole(self, blocks: Num[Array, "..."], dtype: jnp.dtype) -> "Weight":
        """The weight that the matmuls read.

        The blocks are one layer's encoded shards, in the order of their owners; of a weight in parts either
        all of them, or those of this device's part.
        """
        codec = self.layout.weights.local
        every = blocks.size == self.layout.world.size * codec.row_items(self.layout.shard)
        leaf = self.layout if every else self.layout.on_device
        if leaf.fp8:
            codes = unflatten(blocks, leaf)
            return self.replace(codes, "full", gradient=jnp.zeros(codes.shape, dtype))
        rows = blocks.reshape(leaf.world.size, codec.row_items(leaf.shard))
        return self.replace(unflatten(codec.decode(rows, leaf.shard, dtype).reshape(-1), leaf), "full")

    def operand(self) -> Array | Fp8Operand:
        """What a model gets for the whole weight: the array or, of codes, what only products read."""
        if self.gradient is None:
            return self.values
        trained = not self.layout.frozen
        return Fp8Operand(self.values, self.gradient, self.scale, self.layout.name, trained=trained)

    def cotangent(self) -> Num[Array, "..."]:
        """The weight's gradient, where ``self`` is the cotangent of a whole weight."""
        return self.values if self.gradient is None else self.gradient


Weights = tuple[Weight, ...]
"""The weights of a unit, which travel together."""
