"""One weight at one of its levels, and the hops that bring the weights of a unit from one level to the next.

A weight is at a level of ``zerojax.sharding.layout``. In these forms m is the number of items in one owner's
encoded shard:

================= ================= ================================================================
level             values, per layer form
================= ================= ================================================================
primary           ``[owned]``       fp32 master values, of one shard or of a node's shards
primary, encoded  ``[m]``           as the next hop sends it
secondary         ``[nodes * m]``   in the local hop's format, one owner's shard after another
full              of ``on_device``  in the compute dtype; fp8 codes where fp8 products read the weight
================= ================= ================================================================

Two hops lead from the owner to the matmul. The weights of a unit share one collective per hop
(``zerojax.comm.coalesced``), except that payloads of a megabyte or more go alone.

1. The node hop (``encode``, ``cross_nodes``, ``decode``): the owner encodes its shard, and an all-gather over
   ``node`` gives every node the secondary partition (qwZ, ZeRO++ section 3.1). With delta, the owner encodes
   its difference from the node's replica, and every node, its own included, adds the same decoded difference.
   So replicas stay bit-identical, and rounding errors become part of the next difference (SDP4Bit, section
   3.1).
2. The local hop (``to_full``): an all-gather over ``local`` gives every device the whole weight, in the
   buffer that the matmuls read. The backward pass repeats this hop (hpZ, section 3.2), or both.

A weight has no node hop if every node holds its master values, and no local hop if it belongs to experts
that are spread over a node's devices (``ParamLayout.parts``). A mesh axis of extent 1 has no hop. Each hop
has a named scope, which profiles show, and by which ``zerojax.analysis.comm_report`` names the collective.

A ``WeightPrefetcher`` fetches a stack's layers ahead of the layer that computes. Each part of the node hop
has an iteration of the scan to itself. While layer i computes, layer i + 1's weights are decoded and gathered
within the node, layer i + 2's cross the nodes, and layer i + 3's are encoded. The backward pass fetches
layers in reverse order. If weights cross no nodes, layer i + 1's are gathered. Within an iteration nothing
waits for anything else.

Functions and methods run inside ``shard_map`` on one device's values of one layer. The class also describes
the arrays of a train state: global arrays of all layers, their shapes or their shardings.
"""

import dataclasses
import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from zerojax.comm.coalesced import gather_together
from zerojax.matmul.operand import Fp8Operand
from zerojax.sharding.layers import Place, layer_at
from zerojax.sharding.layout import ParamLayout, unflatten
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.sharding.strategy import LEVELS, Level
from zerojax.sharding.wire_format import Codec

Payload = Num[Array, " m"]
"""One encoded weight of one layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A weight at a level.

    Attributes:
        values: see this module. Arrays, ShapeDtypeStructs or PartitionSpecs.
        layout: where its elements live, and how they are encoded.
        level: where the values are now.
        is_encoded: whether the values at "primary" are already encoded as the next hop sends them. That is so
            for trained weights whose master values are in host memory.
        scale: fp32, one per layer, for a weight that fp8 products read: the factor that is applied before
            encoding. None for all others.
        gradient: at "full", beside fp8 codes: zeros that nothing reads, whose cotangent is the weight's
            gradient. Codes are integers and have no cotangent.
        replica: at "primary", with delta: the node's replica, if the hop between nodes refreshes it.
    """

    values: Any
    layout: ParamLayout = field(metadata={"static": True})
    level: Level = field(metadata={"static": True})
    scale: Any = None
    is_encoded: bool = field(default=False, kw_only=True, metadata={"static": True})
    gradient: Any = None
    replica: Any = None

    def reaches(self, level: Level) -> bool:
        """Whether the weight is at a level or beyond it, or has no hop to it."""
        if level == "secondary" and self.layout.in_every_node:
            return True
        return LEVELS.index(self.level) >= LEVELS.index(level)

    @property
    def crosses_nodes(self) -> bool:
        """Whether the weight has a hop between nodes on the way to "full"."""
        return not self.reaches("secondary") and self.layout.world.nodes > 1

    def replace(self, values: Any, level: Level | None = None, gradient: Any = None) -> "Weight":
        """The same weight and scale with other values, perhaps at another level; ``gradient`` is not kept."""
        level = level or self.level
        owned = level == "primary"
        return dataclasses.replace(
            self,
            values=values,
            level=level,
            gradient=gradient,
            is_encoded=self.is_encoded and owned,
            replica=self.replica if owned else None,
        )

    def scaled(self) -> Float[Array, "*layers owned"]:
        """The master values, multiplied by the scale if there is one."""
        return self.values if self.scale is None else self.values * self.scale[..., None]

    def encoded(self, codec: Codec) -> Payload:
        """The values at "primary", encoded as one payload: one shard after another."""
        if self.is_encoded or self.layout.frozen:
            return to_device(self.values)
        return codec.encode(self.scaled().reshape(-1, self.layout.shard)).reshape(-1)

    def sent(self) -> Payload:
        """The payload of the next hop; with a replica, the encoded difference from the owner's row of it."""
        if self.is_encoded or self.replica is None or not self.crosses_nodes:
            return self.encoded(self.layout.next_codec)
        row = lax.dynamic_index_in_dim(self._known(), lax.axis_index(NODE))
        return self.layout.weights.node.encode_delta(self.scaled()[None], row)[0]

    def arrived(self, payload: Payload) -> "Weight":
        """The secondary partition in the local hop's format, from the payloads of all nodes.

        With a replica it is the replica plus the differences. Weights that cross no nodes are there already.
        """
        node, local = self.layout.weights.node, self.layout.weights.local
        if self.crosses_nodes and (node != local or self.replica is not None):
            rows = payload.reshape(self.layout.world.nodes, -1)
            numbers = (
                node.decode(rows, self.layout.shard, jnp.dtype(jnp.float32))
                if self.replica is None
                else node.decode_add(rows, self._known())
            )
            payload = local.encode(numbers).reshape(-1)
        return self.replace(payload, "secondary")

    def _known(self) -> Num[Array, "nodes shard"]:
        """The rows of the replica as numbers that kernels can add to; fp8 codes are decoded."""
        rows = self.replica.reshape(self.layout.world.nodes, -1)
        if not self.layout.fp8:
            return rows
        return self.layout.weights.local.decode(rows, self.layout.shard, jnp.dtype(jnp.bfloat16))

    def whole(self, blocks: Num[Array, "..."]) -> "Weight":
        """The weight that the matmuls read, from one layer's encoded shards in the order of their owners.

        For a weight in parts, ``blocks`` are all shards or the ones of this device's part.
        """
        codec = self.layout.weights.local
        every = blocks.size == self.layout.world.size * codec.row_items(self.layout.shard)
        leaf = self.layout if every else self.layout.on_device
        if leaf.fp8:
            codes = unflatten(blocks, leaf)
            return self.replace(codes, "full", gradient=jnp.zeros(codes.shape, leaf.gathered_dtype))
        rows = blocks.reshape(leaf.world.size, codec.row_items(leaf.shard))
        whole = codec.decode(rows, leaf.shard, leaf.gathered_dtype)
        return self.replace(unflatten(whole.reshape(-1), leaf), "full")

    def operand(self) -> Array | Fp8Operand:
        """The whole weight as a model receives it: an array, or an fp8 operand that only products read."""
        if self.gradient is None:
            return self.values
        trained = not self.layout.frozen
        return Fp8Operand(self.values, self.gradient, self.scale, self.layout.name, trained=trained)


Weights = tuple[Weight, ...]
"""The weights of a unit, which travel together."""
Payloads = tuple[Payload, ...]
"""One payload for each weight that crosses the hop, or delta's replica of each."""


def beside(weights: Weights, replicas: Payloads) -> Weights:
    """The weights with delta's replicas. The trained weights that have replicas come first."""
    held = zip(weights, replicas, strict=False)
    return (*(dataclasses.replace(w, replica=x) for w, x in held), *weights[len(replicas) :])


def _node_hop(weights: Weights) -> AbstractContextManager[object]:
    """The name scope of the hop between nodes."""
    delta = any(w.replica is not None for w in weights)
    return jax.named_scope("gather_delta" if delta else "gather_node")


def encode(weights: Weights) -> Payloads:
    """Encode the weights that cross nodes, with delta as differences from their replicas."""
    with _node_hop(weights):
        return tuple(w.sent() for w in weights if w.crosses_nodes)


def cross_nodes(weights: Weights, payloads: Payloads, *, separate_stream: bool = False) -> Payloads:
    """All-gather encoded ``weights`` over ``node``: each result has the nodes' payloads one after another."""
    with _node_hop(weights):
        arrived = gather_together(payloads, NODE, separate_stream=separate_stream)
        return tuple(rows.reshape(-1) for rows in arrived)


def decode(weights: Weights, arrived: Payloads) -> Weights:
    """The weights, with the ones at "primary" replaced by their secondary partitions.

    ``arrived`` are the payloads of the weights that have crossed nodes. The others are encoded here.
    """
    payloads = iter(arrived)
    with _node_hop(weights):
        return tuple(
            w.arrived(next(payloads) if w.crosses_nodes else w.sent()) if w.level == "primary" else w
            for w in weights
        )


def to_secondary(weights: Weights) -> Weights:
    """Bring the weights at "primary" to secondary partitions; the others stay as they are."""
    payloads = encode(weights)
    return decode(weights, cross_nodes(weights, payloads) if payloads else ())


@jax.named_scope("gather_exact")
def gather_exact(weights: Weights) -> Payloads:
    """New replicas for delta: secondary partitions of weights at "primary", sent in the local format."""
    payloads = [w.encoded(w.layout.weights.local) for w in weights]
    if not any(w.crosses_nodes for w in weights):
        return tuple(payloads)
    return tuple(x.reshape(-1) for x in gather_together(payloads, NODE))


def to_full(weights: Weights) -> Weights:
    """Bring weights from secondary partitions to whole ones; whole ones stay as they are."""
    with jax.named_scope("gather_local"):
        blocks = {i: to_device(w.values) for i, w in enumerate(weights) if w.level != "full"}
        crossing = [i for i in blocks if weights[i].layout.on_device.world.local > 1]
        blocks |= zip(crossing, gather_together([blocks[i] for i in crossing], LOCAL), strict=True)
        return tuple(w.whole(blocks[i]) if i in blocks else w for i, w in enumerate(weights))


def gradients_of(cotangents: Weights) -> tuple[Num[Array, "..."], ...]:
    """The gradients of the trained weights, from the cotangents of all whole weights."""
    trained = (w for w in cotangents if not w.layout.frozen)
    return tuple(w.values if w.gradient is None else w.gradient for w in trained)


Replicas = tuple[Payloads, ...]
"""Delta's replicas of each kind of layers, stacked."""


class Fetching(NamedTuple):
    """The weights on their way, carried from one layer to the next.

    Attributes:
        replicas: delta's replicas of all layers by kind, refreshed for the layers fetched so far.
        payloads: the encoded weights that cross the nodes next.
        arrived: the weights that have crossed and are not yet decoded.
    """

    replicas: Replicas
    payloads: Payloads
    arrived: Payloads


@dataclass(frozen=True)
class WeightPrefetcher:
    """The order in which a pass fetches layers; callers hold the weights on their way (``Fetching``).

    Attributes:
        weights: for each kind, of all layers, stacked, each at its own level.
        step: 1 forward, to the last layer; -1 backward, to layer 0.
        separate_stream: see ``zerojax.comm.coalesced``.
    """

    weights: tuple[Weights, ...]
    step: Literal[1, -1]
    separate_stream: bool

    @functools.cached_property
    def crosses(self) -> bool:
        """Whether weights cross nodes."""
        return any(w.crosses_nodes for own in self.weights for w in own)

    def start(self, first: Place) -> tuple[Fetching, Weights]:
        """Fetch the first layer's secondary partitions, and start on the next two layers.

        Delta's replicas of all layers are refreshed as their weights arrive.
        """
        replicas = tuple(tuple(w.replica for w in own if w.replica is not None) for own in self.weights)
        payloads, arrived = (), ()
        if self.crosses:
            weights = self._layer(replicas, first)
            arrived = cross_nodes(weights, encode(weights), separate_stream=self.separate_stream)
            payloads = encode(self._layer(replicas, first.ahead(self.step)))
        return self.advance(Fetching(replicas, payloads, arrived), first + -self.step)

    def advance(self, fetching: Fetching, place: Place) -> tuple[Fetching, Weights]:
        """Move every layer's weights one stage on, while the layer at ``place`` computes.

        Returns:
            ``fetching`` for the next layer, and the next layer's secondary partitions.
        """
        replicas, payloads, arrived = fetching
        following, second = place + self.step, place + 2 * self.step
        weights = self._layer(replicas, following)
        secondary = decode(weights, arrived)
        if own := replicas[following.kind]:
            replicas = following.put(replicas, tuple(w.values for w in secondary[: len(own)]))
        # No layer of a loop is the last one to cross.
        if self.crosses and (not place.peeled or 0 <= second.number <= place.order.last):
            sent = self.weights[second.kind]
            arrived = cross_nodes(sent, payloads, separate_stream=self.separate_stream)
            # The last payload is never sent: encoding it costs less than peeling another layer off the loop.
            payloads = encode(self._layer(replicas, place.ahead(3 * self.step)))
        return Fetching(replicas, payloads, arrived), secondary

    def _layer(self, replicas: Replicas, place: Place) -> Weights:
        """A layer's weights, with its replicas as they are now."""
        return layer_at(beside(self.weights[place.kind], replicas[place.kind]), place.index)
