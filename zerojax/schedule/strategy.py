"""Routes: at which level weights start and gradients end, and what is kept in between.

The stages of ZeRO and hpZ are nothing but different routes (levels as in ``zerojax.sharding.layout``):

===================== ========= ========= =========
                      source    keep      sink
===================== ========= ========= =========
stages 0 and 1        full      full      full
stage 2               full      full      primary
stage 3               primary   primary   primary
stage 3, hpZ          primary   secondary primary
stage 3, delta        secondary secondary primary
===================== ========= ========= =========

and where the node hop is taken once per step, the sink is the secondary partition. A stack whose layers bring
delta's copies up to date as they are gathered (``Sharded.copy``) finds its weights at "primary" that once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Num

from zerojax.comm.collectives import (
    Way,
    cross_nodes,
    decode_weights,
    encode_gradients,
    encode_weights,
    gather_local,
    gather_node,
    send_gradients,
    sum_gradients,
)
from zerojax.sharding.layout import Leaf
from zerojax.sharding.wire_format import Seed
from zerojax.zero_config import RAW, Remat, ZeroConfig

Level = Literal["primary", "secondary", "full"]
Values = tuple[Num[Array, "..."], ...]
Payload = tuple[Values, ...]
"""Gradients on their way: per chunk and leaf."""


@dataclasses.dataclass(frozen=True)
class Route:
    """Between which levels weights and gradients travel, when, and how.

    Attributes:
        source: the level at which a unit finds its weights.
        keep: the level from which the backward pass gathers again.
        sink: the level at which a unit leaves its gradients.
        compute_dtype: of the gathered weights.
        grad_dtype: of gradients left at level "full".
        remat: the rematerialisation policy within the unit.
        way: the hops of a gradient, from the unit to the sink or, where that is "full", to the owner.
    """

    source: Level
    keep: Level
    sink: Level
    compute_dtype: str
    grad_dtype: str
    remat: Remat
    way: Way

    @staticmethod
    def of(zero: ZeroConfig) -> "Route":
        """The route that a config asks for."""
        source: Level = "full"
        keep: Level = "full"
        if zero.stage == 3:
            source = "secondary" if zero.weights_delta else "primary"
            keep = "secondary" if zero.hpz else "primary"
        sink: Level = "full"
        if zero.stage >= 2:
            sink = "secondary" if zero.node_hop_once else "primary"
        return Route(
            source=source,
            keep=keep,
            sink=sink,
            compute_dtype=str(zero.compute_dtype),
            # One micro-batch's gradients are not added to anything before they are reduced.
            grad_dtype=str(zero.compute_dtype) if zero.passes == 1 else "float32",
            remat=zero.remat,
            way=Way(
                "secondary" if sink == "secondary" else "primary",
                zero.grads_hops,
                zero.chunks,
                _apart(zero, keep, sink),
            ),
        )

    def weight_dtype(self, leaf: Leaf) -> jnp.dtype:
        """What a leaf is computed in: never wider than the model itself has it."""
        return min(jnp.dtype(self.compute_dtype), jnp.dtype(leaf.dtype), key=lambda d: d.itemsize)

    def to_secondary(self, level: Level, values: Values, leaves: Sequence[Leaf]) -> Values:
        """From a level, the source's or the kept one, to secondary partitions: the node hop, or nothing."""
        return tuple(gather_node(values, leaves)) if level == "primary" else values

    def crosses_nodes(self, level: Level, leaves: Sequence[Leaf]) -> bool:
        """Whether weights come from that level over a hop between nodes."""
        return level == "primary" and leaves[0].world.nodes > 1

    def encode_weights(self, values: Values, copies: Values | None, leaves: Sequence[Leaf]) -> Values:
        """Primary shards, ready for the hop between nodes; with copies, for bringing those up to date."""
        return tuple(encode_weights(values, copies, leaves))

    def cross_nodes(self, payload: Values, leaves: Sequence[Leaf], *, delta: bool) -> Values:
        """The hop between nodes on its own."""
        return tuple(cross_nodes(payload, leaves, delta=delta, apart=self.way.apart))

    def decode_weights(self, arrived: Values, copies: Values | None, leaves: Sequence[Leaf]) -> Values:
        """Secondary partitions of what crossed; with copies, these as they are now."""
        return tuple(decode_weights(arrived, copies, leaves))

    def to_whole(self, secondary: Values, leaves: Sequence[Leaf]) -> Values:
        """From secondary partitions to whole leaves of natural shape."""
        if self.keep == "full":
            return secondary
        return tuple(gather_local(secondary, leaves, [self.weight_dtype(leaf) for leaf in leaves]))

    def encode(self, grads: Values, leaves: Sequence[Leaf], seed: Seed) -> Payload:
        """Whole gradients, this device's part, ready for their first hop."""
        if self.sink == "full":
            return (tuple(grad.astype(self.grad_dtype) for grad in grads),)
        return _frozen(encode_gradients(grads, leaves, seed, self.way))

    def hops(self, leaves: Sequence[Leaf]) -> int:
        """How many hops lie between the unit and the sink."""
        return 0 if self.sink == "full" else len(self.way.axes(leaves[0].world))

    def send(self, payload: Payload, leaves: Sequence[Leaf], seed: Seed, hop: int) -> Payload:
        """``encode``'s result, or that of the hop before, over one hop."""
        return _frozen(send_gradients(payload, leaves, seed, self.way, hop))

    def sum(self, arrived: Payload, leaves: Sequence[Leaf]) -> Values:
        """Sums, not yet means, of what the last hop returned."""
        return arrived[0] if self.sink == "full" else tuple(sum_gradients(arrived, leaves, self.way))

    def deliver(self, payload: Payload, leaves: Sequence[Leaf], seed: Seed) -> Values:
        """From ``encode``'s result to the sink."""
        for hop in range(self.hops(leaves)):
            payload = self.send(payload, leaves, seed, hop)
        return self.sum(payload, leaves)

    def reduces_between_nodes(self, leaves: Sequence[Leaf]) -> bool:
        """Whether gradients cross the nodes on their way to the sink."""
        return self.sink == "primary" and leaves[0].world.nodes > 1

    def zero_sink(self, leaf: Leaf) -> Num[Array, "..."]:
        """A gradient of zeros at the sink's level; of all layers, where the leaf is stacked."""
        layers = () if leaf.layers is None else (leaf.layers,)
        if self.sink == "full":
            return jnp.zeros((*layers, *leaf.shape), self.grad_dtype)
        size = leaf.secondary if self.sink == "secondary" else leaf.shard
        return jnp.zeros((*layers, size), jnp.float32)


def _apart(zero: ZeroConfig, keep: Level, sink: Level) -> bool:
    """Whether hops between nodes get a stream of their own, beside those within.

    That wants one collective a hop. So not where the backward pass gathers from other nodes too, not with
    chunks, nor where to join gradients copies them at full size; and not where no micro-batch crosses nodes.
    """
    crosses = sink == "primary" or not zero.weights_delta or zero.passes == 1
    quantized = zero.grad_formats[0] not in RAW
    return crosses and keep == "secondary" and quantized and zero.grads_hops == 2 and zero.chunks == 1


def _frozen(chunks: Sequence[Sequence[Num[Array, "..."]]]) -> Payload:
    return tuple(tuple(chunk) for chunk in chunks)
