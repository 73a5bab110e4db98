"""The hops of one unit's weights and gradients across the mesh.

All methods of ``UnitComm`` run inside ``shard_map`` on one device's values. The parameters of a unit share
one collective per hop (``coalesced``), except that payloads of a megabyte or more go alone.

The phases of one step:

1. ``gather_node``: the owner encodes its primary shard; an all-gather over ``node`` gives every node the
   secondary partition (qwZ, ZeRO++ section 3.1). Its three parts can also be called one by one: a
   prefetching scan has them in different iterations, so the next hop between nodes waits for no encoding or
   decoding.
2. ``gather_local``: an all-gather over ``local`` gives every device the whole parameter, in the buffer that
   the matmuls read. The backward pass repeats this phase alone (hpZ, section 3.2), or both.
3. ``encode_gradients``, ``send_gradients`` and ``sum_gradients``: gradients are encoded, exchanged over
   ``local``, decoded and summed in fp32, encoded again, exchanged over ``node``, decoded and summed in fp32
   at the owner (qgZ, section 3.3). A scan can have each hop in an iteration of its own.
4. ``reduce_node``: the last hop alone, if it is taken once per step.

A mesh axis of extent 1 has no hop, and nothing is encoded for it. Each phase has a named scope, which
profiles show, and from which ``zerojax.analysis.comm_report`` learns the purpose of a collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from zerojax.comm.coalesced import Rows, exchange_together, gather_together
from zerojax.comm.parameter import (
    LOCAL_HOP,
    NODE_HOP,
    add_difference,
    decoded_weight,
    encode_difference,
    encode_reordered,
    encode_rows,
    encode_weight,
    encoding_error,
    in_local_format,
    sum_and_encode,
)
from zerojax.matmul.operand import array_of
from zerojax.sharding.layout import ParamLayout, flatten, unflatten
from zerojax.sharding.mesh import LOCAL, NODE, MeshShape
from zerojax.sharding.strategy import Level, ShardingStrategy
from zerojax.sharding.wire_format import Codec, Seed, mix

Values = tuple[Num[Array, "..."], ...]
"""One array per parameter of a unit."""

Payload = tuple[Values, ...]
"""Encoded gradients: per chunk and parameter."""


@dataclass(frozen=True)
class UnitComm:
    """The communication of parameters that travel together.

    Attributes:
        strategy: between which levels they travel.
        leaves: the layouts of those that are trained, all on one mesh. ``Values`` has one array for each.
        frozen: the layouts of those that are not. Secondary partitions and whole parameters have arrays for
            them, after those of ``leaves``; so have primary shards, if that is where they are stored.
    """

    strategy: ShardingStrategy
    leaves: tuple[ParamLayout, ...]
    frozen: tuple[ParamLayout, ...] = ()

    @property
    def every(self) -> tuple[ParamLayout, ...]:
        """Trained and frozen parameters."""
        return (*self.leaves, *self.frozen)

    @property
    def primary(self) -> tuple[ParamLayout, ...]:
        """Those with primary shards: the trained, and frozen ones that are stored so."""
        return self.every if self.strategy.frozen == "primary" else self.leaves

    @property
    def world(self) -> MeshShape:
        """The mesh's extents."""
        return self.every[0].world

    # Weights.

    def crosses_nodes(self, level: Level) -> bool:
        """Whether a gather from that level has a hop between nodes."""
        return level == "primary" and self.world.nodes > 1 and bool(self.primary)

    def encode_weights(self, shards: Values, copies: Values | None = None) -> Values:
        """Encode primary shards for the node hop: the weights, or their difference from delta's copies.

        The owner encodes its weights minus its row of the copy; every node, its own included, adds the same
        decoded difference. So copies stay bit-identical, and rounding errors are part of the next difference
        (SDP4Bit, section 3.1).

        Args:
            shards: ``[shard]``, the owner's fp32 block; ``Scaled``, where it is an operand of fp8 products. A
                frozen one is encoded already.
            copies: ``[nodes, shard]``, delta's copy so far in its raw local format; or None.

        Returns:
            The payloads; on one node, which has no node hop, in the local format.
        """
        with jax.named_scope(_node_scope(delta=copies is not None)):
            if self.world.nodes == 1:
                return self._in_local_format(shards)
            if copies is None:
                pairs = zip(shards, self.primary, strict=True)
                return tuple(encode_weight(x, leaf, leaf.weights.node) for x, leaf in pairs)
            return tuple(encode_difference(x, copy, leaf) for x, copy, leaf in self._each(shards, copies))

    def cross_nodes(self, payloads: Values, *, delta: bool, own_stream: bool | None = None) -> Values:
        """All-gather encoded weights over ``node``; the rows follow each other, not yet decoded.

        Args:
            payloads: ``[m]`` each, as ``encode_weights`` returns.
            delta: whether they are differences.
            own_stream: see ``coalesced``; by default the strategy's.
        """
        if self.world.nodes == 1:
            return payloads
        if own_stream is None:
            own_stream = self.strategy.own_stream
        with jax.named_scope(_node_scope(delta=delta)):
            return tuple(rows.reshape(-1) for rows in gather_together(payloads, NODE, own_stream=own_stream))

    def decode_weights(self, arrived: Values, copies: Values | None = None) -> Values:
        """Decode gathered weights into secondary partitions.

        Args:
            arrived: as ``cross_nodes`` returns.
            copies: as for ``encode_weights``.

        Returns:
            ``[nodes, m]`` in the local format: row n is node n's shard. With ``copies``, the new copies.
        """
        rows = tuple(x.reshape(self.world.nodes, -1) for x in arrived)
        if self.world.nodes == 1:
            return rows
        with jax.named_scope(_node_scope(delta=copies is not None)):
            if copies is None:
                return tuple(in_local_format(x, leaf) for x, leaf in zip(rows, self.primary, strict=True))
            return tuple(add_difference(x, copy, leaf) for x, copy, leaf in self._each(rows, copies))

    def gather_node(self, shards: Values, copies: Values | None = None) -> Values:
        """All-gather primary shards over ``node`` into secondary partitions, or into new delta copies."""
        payloads = self.encode_weights(shards, copies)
        arrived = self.cross_nodes(payloads, delta=copies is not None, own_stream=False)
        return self.decode_weights(arrived, copies)

    @jax.named_scope("gather_exact")
    def gather_exact(self, shards: Values) -> Values:
        """Secondary copies sent whole in the local format, to create or resync delta's copies."""
        sent = self._in_local_format(shards)
        return tuple(gather_together(sent, NODE) if self.world.nodes > 1 else (x[None] for x in sent))

    @jax.named_scope("gather_local")
    def gather_local(self, secondary: Values) -> Values:
        """All-gather secondary partitions over ``local`` into whole parameters in their compute dtype.

        Args:
            secondary: ``[nodes, m]``, as ``gather_node`` returns.

        Returns:
            One layer of unsharded shape, without padding; ``Codes``, where it is an operand of fp8 products.
        """
        arrived = secondary
        if self.world.local > 1:
            arrived = gather_together([rows.reshape(-1) for rows in secondary], LOCAL)
        return tuple(
            decoded_weight(blocks, leaf, self.strategy.weight_dtype(leaf))
            for blocks, leaf in zip(arrived, self.every, strict=True)
        )

    def to_secondary(self, level: Level, values: Values, frozen: Values = ()) -> Values:
        """Bring weights from a level to secondary partitions: the node hop from "primary", else nothing.

        Args:
            level: of ``values``.
            values: of the trained parameters, or at "primary" of all that have primary shards.
            frozen: of the other frozen ones: secondary partitions already.
        """
        trained = self.gather_node(values) if level == "primary" else tuple(map(array_of, values))
        return (*trained, *map(array_of, frozen))

    def to_whole(self, secondary: Values) -> Values:
        """Gather secondary partitions into whole parameters; those of ``keep`` "full" are whole already."""
        return secondary if self.strategy.keep == "full" else self.gather_local(secondary)

    # Gradients.

    @property
    def axes(self) -> tuple[str | tuple[str, str], ...]:
        """The mesh axes that a gradient crosses, in order, without those of extent 1."""
        return self.strategy.axes(self.world)

    @jax.named_scope("encode_gradients")
    def encode_gradients(self, grads: Values, seed: Seed) -> Payload:
        """Encode gradients for their first hop.

        Args:
            grads: one layer of unsharded shape, this device's contribution: a cotangent of ``gather_local``'s
                result.
            seed: salts stochastic rounding.

        Returns:
            The payloads ``[peers, m]``; row i is for peer i of the first axis. Without hops one chunk of
            one row, not encoded.
        """
        axes, chunks = self.axes, self.strategy.chunks
        grads = tuple(map(array_of, grads[: len(self.leaves)]))
        if not axes:
            return (tuple(flatten(grad, leaf)[None] for grad, leaf in self._each(grads)),)
        if len(axes) == 2:
            staged = [encode_reordered(grad, leaf, seed, chunks) for grad, leaf in self._each(grads)]
            return tuple(tuple(payload[chunk] for payload in staged) for chunk in range(chunks))
        hop, peers = (LOCAL_HOP if axes[0] == LOCAL else NODE_HOP), lax.axis_size(axes[0])
        encoded = (
            encode_rows(flatten(grad, leaf).reshape(peers, -1), leaf, self._last_codec(leaf), seed, hop)
            for grad, leaf in self._each(grads)
        )
        return (tuple(encoded),)

    def send_gradients(self, chunks: Payload, seed: Seed, hop: int) -> Payload:
        """Take encoded gradients over one hop, and encode them for the next if there is one.

        Between two hops one fused pass decodes, sums and encodes again. Chunks do not depend on each other:
        if both hops of a unit follow each other, one chunk's node hop overlaps the next one's local hop
        (qgZ's pipeline, ZeRO++ Figure 8).

        Args:
            chunks: as ``encode_gradients`` returns, or this method for the hop before.
            seed: the same as there.
            hop: which of the ``axes``, from 0.

        Returns:
            The payload of the next hop; after the last, the payload that arrived, not yet decoded.
        """
        axes, own_stream = self.axes, self.strategy.own_stream
        if hop == len(axes) - 1:
            with jax.named_scope(self._last_scope):
                return tuple(
                    tuple(exchange_together(chunk, axes[hop], own_stream=own_stream)) for chunk in chunks
                )
        sent: list[Values] = []
        with jax.named_scope("reduce_local"):
            for index, chunk in enumerate(chunks):
                arrived = exchange_together(chunk, LOCAL, own_stream=own_stream)
                salted = mix(seed, index)
                summed = (
                    sum_and_encode(rows, leaf, salted, len(chunks)) for rows, leaf in self._each(arrived)
                )
                sent.append(tuple(summed))
        return tuple(sent)

    def sum_gradients(self, arrived: Payload) -> Values:
        """Decode and sum the payload of the last hop; without hops, that of ``encode_gradients``.

        Returns:
            The fp32 sum, not yet a mean: over the world at its owner, or over the node as a secondary
            partition.
        """
        if not self.axes:
            return tuple(rows.reshape(-1).astype(jnp.float32) for rows in arrived[0])
        to_owner = self.strategy.summed_at == "primary"

        def total(rows: Rows, leaf: ParamLayout) -> Float[Array, " n"]:
            size = (leaf.shard if to_owner else leaf.secondary) // len(arrived)
            return self._last_codec(leaf).decode_sum(rows, size, rotation=leaf.rotation)

        with jax.named_scope(self._last_scope):
            pieces = [tuple(total(rows, leaf) for rows, leaf in self._each(chunk)) for chunk in arrived]
        if len(pieces) == 1:
            return pieces[0]
        return tuple(jnp.concatenate(parts) for parts in zip(*pieces, strict=True))

    def deliver(self, payload: Payload, seed: Seed) -> Values:
        """Send encoded gradients over all hops, and sum them."""
        for hop in range(len(self.axes)):
            payload = self.send_gradients(payload, seed, hop)
        return self.sum_gradients(payload)

    def reduce_gradients(self, grads: Values, seed: Seed) -> Values:
        """Encode gradients, send them over all hops, and sum them."""
        return self.deliver(self.encode_gradients(grads, seed), seed)

    def to_sink(self, grads: Values, seed: Seed) -> Values:
        """This device's whole gradients as sums at the sink's level; at "full" they are not reduced."""
        grads = grads[: len(self.leaves)]
        if self.strategy.sink == "full":
            return tuple(grad.astype(self.strategy.grad_dtype) for grad in grads)
        return self.reduce_gradients(grads, seed)

    @jax.named_scope("reduce_node")
    def reduce_node(
        self, sums: Values, seed: Seed, residuals: Values | None = None
    ) -> tuple[Values, Values | None]:
        """Sum node-local sums over ``node``: from secondary partitions to the owners.

        Args:
            sums: ``[secondary]``, the fp32 sum over the node's devices, un-rotated.
            seed: salts stochastic rounding.
            residuals: with error feedback, the last encoding's error (fp32, un-rotated), which is added
                before encoding.

        Returns:
            ``[shard]``, the fp32 sum over the world at its owner; and the new residuals, or None.
        """
        nodes = self.world.nodes
        if nodes == 1:
            return sums, None
        if residuals is not None:
            sums = tuple(x + residual for x, residual in zip(sums, residuals, strict=True))
        sent = [
            encode_rows(x.reshape(nodes, -1), leaf, leaf.grads.node, seed, NODE_HOP)
            for x, leaf in self._each(sums)
        ]
        kept = None
        if residuals is not None:
            kept = tuple(encoding_error(x, rows, leaf) for x, rows, leaf in self._each(sums, sent))
        owned = tuple(
            leaf.grads.node.decode_sum(rows, leaf.shard, rotation=leaf.rotation)
            for rows, leaf in self._each(exchange_together(sent, NODE))
        )
        return owned, kept

    @jax.named_scope("all_gather_sum")
    def all_gather_sum(self, sums: Values) -> Values:
        """Replicate the owners' sums: the second half of stage 0's all-reduce.

        They stay in the wire's raw format, which saves memory: the optimizer widens them as it reads.
        """
        rows = [x.astype(leaf.grads.node.dtype) for x, leaf in self._each(sums)]
        for axis in (NODE, LOCAL):
            rows = [x.reshape(-1) for x in gather_together([x.reshape(-1) for x in rows], axis)]
        return tuple(unflatten(x, leaf) for x, leaf in self._each(rows))

    def _each(self, *values: Sequence[Array]) -> "zip[tuple[Any, ...]]":
        """For every parameter one array of each of ``values``, and its layout."""
        return zip(*values, self.leaves, strict=True)

    def _in_local_format(self, shards: Values) -> Values:
        pairs = zip(shards, self.primary, strict=True)
        return tuple(encode_weight(x, leaf, leaf.weights.local) for x, leaf in pairs)

    def _last_codec(self, leaf: ParamLayout) -> Codec:
        return leaf.grads.local if self.axes[-1] == LOCAL else leaf.grads.node

    @property
    def _last_scope(self) -> str:
        return "reduce_local" if self.axes[-1] == LOCAL else "reduce_node"


def _node_scope(*, delta: bool) -> str:
    return "gather_delta" if delta else "gather_node"
