"""The hops: every byte that crosses the mesh on behalf of a weight or a gradient goes through here.

All functions run inside ``shard_map`` on one device's values, for the leaves of one unit at once. What
belongs together travels together (``coalesced``): the leaves of a unit share one collective per hop,
except where a payload of a megabyte or more goes alone.

The phases of one step, for one unit:

1. ``gather_node``: the owner encodes its primary shard; an all-gather over ``node`` gives every node the
   secondary partition (qwZ, ZeRO++ section 3.1). It comes in three parts as well, which a pipeline can have
   in different iterations, so that the next hop between nodes waits for no encoding or decoding.
2. ``gather_local``: an all-gather over ``local`` gives every device the leaf, in the buffer the matmuls
   read. The backward pass repeats this phase alone (hpZ, section 3.2), or both.
3. ``encode_gradients``, ``send_gradients`` and ``sum_gradients``: gradients are encoded, exchanged over
   ``local``, decoded and summed in fp32, encoded again, exchanged over ``node``, decoded and summed in fp32
   at the owner (qgZ, section 3.3). A pipeline can have each hop in an iteration of its own.
4. ``reduce_node``: the last hop on its own, where it is taken once per step.

A mesh axis of extent 1 has no hop, and nothing is encoded for it. Each phase has a named scope: profiles
show it, and ``zerojax.analysis.comm_report`` tells by it what a collective is for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

import pallas_kernels
from zerojax.comm.coalesced import Rows, exchange_together, gather_together
from zerojax.sharding.layout import OWNED, Leaf, flatten, unflatten
from zerojax.sharding.mesh import LOCAL, NODE, World
from zerojax.sharding.wire_format import Seed, mix

_LOCAL_HOP, _NODE_HOP = 1, 2


@dataclass(frozen=True)
class Way:
    """How far a gradient travels, and in how many hops.

    Attributes:
        to: "secondary" sums over ``local`` alone, "primary" over the world.
        hops: 2, or 1 for a single all-to-all over both axes (the paper's Figure 3), in which every device
            sends every other its block: M between nodes per device where two hops send M per node.
        chunks: into how many pieces the owner's block is cut where there are two hops.
        apart: whether hops between nodes, those of the weights too, have a stream of their own
            (``coalesced``).
    """

    to: Literal["secondary", "primary"]
    hops: int = 2
    chunks: int = 1
    apart: bool = False

    def axes(self, world: World) -> tuple[str | tuple[str, str], ...]:
        """The mesh axes to cross, in order, an axis of extent 1 left out."""
        if self.to == "primary" and self.hops == 1:
            return (OWNED,) if world.size > 1 else ()
        extents = {LOCAL: world.local} | ({NODE: world.nodes} if self.to == "primary" else {})
        return tuple(axis for axis, extent in extents.items() if extent > 1)


def encode_weights(
    shards: Sequence[Float[Array, " shard"]], copies: Sequence[Rows] | None, leaves: Sequence[Leaf]
) -> list[Num[Array, " m"]]:
    """Encode primary shards for the node hop: the weights, or what changed since delta's copies were made.

    The owner encodes its weights minus its row of the copy; every node, its own included, adds the same
    decoded difference, so copies stay bit-identical, and what rounding left out comes along next time
    (SDP4Bit, section 3.1).

    Args:
        shards: per leaf, the owner's fp32 block.
        copies: per leaf ``[nodes, shard]``, delta's copy so far in its raw local format; or None.
        leaves: their layouts; all of one world.

    Returns:
        Per leaf its payload; on one node, which has no such hop, in the local format.
    """
    with jax.named_scope(_node_scope(copies)):
        if leaves[0].world.nodes == 1:
            return [leaf.weights[1].encode(x[None])[0] for x, leaf in zip(shards, leaves, strict=True)]
        if copies is None:
            return [leaf.weights[0].encode(x[None])[0] for x, leaf in zip(shards, leaves, strict=True)]
        row = lax.axis_index(NODE)
        return [
            leaf.weights[0].encode_delta(x[None], lax.dynamic_index_in_dim(copy, row))[0]
            for x, copy, leaf in zip(shards, copies, leaves, strict=True)
        ]


def cross_nodes(
    payloads: Sequence[Num[Array, " m"]], leaves: Sequence[Leaf], *, delta: bool, apart: bool = False
) -> list[Num[Array, " n"]]:
    """All-gather what ``encode_weights`` returned over ``node``, row after row, not yet decoded.

    ``apart`` has it on a stream of its own (``coalesced``).
    """
    if leaves[0].world.nodes == 1:
        return list(payloads)
    with jax.named_scope("gather_delta" if delta else "gather_node"):
        return [rows.reshape(-1) for rows in gather_together(payloads, NODE, apart=apart)]


def decode_weights(
    arrived: Sequence[Num[Array, " n"]], copies: Sequence[Rows] | None, leaves: Sequence[Leaf]
) -> list[Rows]:
    """What crossed the nodes, as secondary partitions.

    Args:
        arrived: as ``cross_nodes`` returns.
        copies: the same as were encoded against.
        leaves: their layouts.

    Returns:
        Per leaf ``[nodes, m]`` in its local format: row n is what node n owned. With ``copies``, new ones.
    """
    nodes = leaves[0].world.nodes
    rows = [x.reshape(nodes, -1) for x in arrived]
    if nodes == 1:
        return rows
    with jax.named_scope(_node_scope(copies)):
        if copies is None:
            return [_settle(x, leaf) for x, leaf in zip(rows, leaves, strict=True)]
        return [
            leaf.weights[0].decode_add(x, copy) for x, copy, leaf in zip(rows, copies, leaves, strict=True)
        ]


def _node_scope(copies: Sequence[Rows] | None) -> str:
    return "gather_node" if copies is None else "gather_delta"


def gather_node(shards: Sequence[Float[Array, " shard"]], leaves: Sequence[Leaf]) -> list[Rows]:
    """All-gather primary shards over ``node`` into secondary partitions: the three above in turn."""
    return decode_weights(
        cross_nodes(encode_weights(shards, None, leaves), leaves, delta=False), None, leaves
    )


def gather_delta(
    shards: Sequence[Float[Array, " shard"]], copies: Sequence[Rows], leaves: Sequence[Leaf]
) -> list[Rows]:
    """Bring delta's secondary copies up to date: the same with ``copies``."""
    payloads = encode_weights(shards, copies, leaves)
    return decode_weights(cross_nodes(payloads, leaves, delta=True), copies, leaves)


@jax.named_scope("gather_exact")
def gather_exact(shards: Sequence[Float[Array, " shard"]], leaves: Sequence[Leaf]) -> list[Rows]:
    """Secondary copies sent whole in the local format: the birth and the resync of delta's copies."""
    sent = [leaf.weights[1].encode(x[None])[0] for x, leaf in zip(shards, leaves, strict=True)]
    return gather_together(sent, NODE) if leaves[0].world.nodes > 1 else [x[None] for x in sent]


@jax.named_scope("gather_local")
def gather_local(
    secondary: Sequence[Rows], leaves: Sequence[Leaf], dtypes: Sequence[jnp.dtype]
) -> list[Num[Array, "..."]]:
    """All-gather secondary partitions over ``local`` into whole leaves.

    Args:
        secondary: per leaf ``[nodes, m]``, as ``gather_node`` returns.
        leaves: their layouts.
        dtypes: per leaf, the dtype to compute in.

    Returns:
        Per leaf, one layer of natural shape, without padding.
    """
    arrived = list(secondary)
    if leaves[0].world.local > 1:
        flat = [rows.reshape(-1) for rows in secondary]
        arrived = gather_together(flat, LOCAL)
    return [
        unflatten(_decode_blocks(blocks, leaf, dtype), leaf)
        for blocks, leaf, dtype in zip(arrived, leaves, dtypes, strict=True)
    ]


@jax.named_scope("encode_gradients")
def encode_gradients(
    grads: Sequence[Num[Array, "..."]], leaves: Sequence[Leaf], seed: Seed, way: Way
) -> list[list[Rows]]:
    """Encode gradients for the first hop of their way: what a pipelined backward pass carries along.

    Args:
        grads: per leaf, one layer of natural shape, this device's contribution.
        leaves: their layouts.
        seed: salts stochastic rounding.
        way: the hops that follow.

    Returns:
        Per chunk and leaf the payload ``[peers, m]``; row i is for peer i of the first axis. Without hops
        one chunk and one row, as it came.
    """
    axes = way.axes(leaves[0].world)
    if not axes:
        return [[flatten(grad, leaf)[None] for grad, leaf in zip(grads, leaves, strict=True)]]
    if len(axes) == 2:
        staged = [
            _encode_stages(grad, leaf, seed, way.chunks) for grad, leaf in zip(grads, leaves, strict=True)
        ]
        return [[payload[chunk] for payload in staged] for chunk in range(way.chunks)]
    hop, salt = (0, _LOCAL_HOP) if axes[0] == LOCAL else (1, _NODE_HOP)
    peers = lax.axis_size(axes[0])
    return [
        [
            leaf.grads[hop].encode(
                flatten(grad, leaf).reshape(peers, -1),
                seed=_salt(seed, leaf, salt),
                rotation=leaf.rotation,
            )
            for grad, leaf in zip(grads, leaves, strict=True)
        ]
    ]


def send_gradients(
    chunks: Sequence[Sequence[Rows]], leaves: Sequence[Leaf], seed: Seed, way: Way, hop: int
) -> list[list[Rows]]:
    """Take encoded gradients over one hop of their way, and make them ready for the next if there is one.

    Between two hops one fused pass decodes, sums and encodes again. Chunks are chains of their own: where
    both hops of a unit follow each other, one's node hop overlaps the next one's local hop (qgZ's pipeline,
    ZeRO++ Figure 8).

    Args:
        chunks: as ``encode_gradients`` returns, or this function for the hop before.
        leaves: their layouts.
        seed: the same as there.
        way: the same as there.
        hop: which of the way's hops, from 0.

    Returns:
        Per chunk and leaf, what the next hop sends; of the last, what arrived, not yet decoded.
    """
    axes = way.axes(leaves[0].world)
    if hop == len(axes) - 1:
        with jax.named_scope(_last_hop(axes)[1]):
            return [exchange_together(chunk, axes[hop], apart=way.apart) for chunk in chunks]
    sent = []
    with jax.named_scope("reduce_local"):
        for index, chunk in enumerate(chunks):
            arrived = exchange_together(chunk, LOCAL, apart=way.apart)
            salted = mix(seed, index)
            sent.append(
                [
                    _between_hops(rows, leaf, salted, len(chunks))
                    for rows, leaf in zip(arrived, leaves, strict=True)
                ]
            )
    return sent


def sum_gradients(
    arrived: Sequence[Sequence[Rows]], leaves: Sequence[Leaf], way: Way
) -> list[Float[Array, " n"]]:
    """Decode and add up what the last hop brought; where there is none, what ``encode_gradients`` returned.

    Returns:
        Per leaf the fp32 sum: over the world at its owner, or over the node as a secondary partition.
    """
    axes = way.axes(leaves[0].world)
    if not axes:
        return [rows.reshape(-1).astype(jnp.float32) for rows in arrived[0]]
    codec, scope = _last_hop(axes)
    sizes = [(leaf.shard if way.to == "primary" else leaf.secondary) // len(arrived) for leaf in leaves]
    with jax.named_scope(scope):
        pieces = [
            [
                leaf.grads[codec].decode_sum(rows, size, rotation=leaf.rotation)
                for rows, size, leaf in zip(chunk, sizes, leaves, strict=True)
            ]
            for chunk in arrived
        ]
    if len(pieces) == 1:
        return pieces[0]
    return [jnp.concatenate(parts) for parts in zip(*pieces, strict=True)]


def reduce_gradients(
    grads: Sequence[Num[Array, "..."]], leaves: Sequence[Leaf], seed: Seed, way: Way
) -> list[Float[Array, " n"]]:
    """Sum gradients over the mesh: encode, send over every hop, and sum them."""
    chunks = encode_gradients(grads, leaves, seed, way)
    for hop in range(len(way.axes(leaves[0].world))):
        chunks = send_gradients(chunks, leaves, seed, way, hop)
    return sum_gradients(chunks, leaves, way)


@jax.named_scope("reduce_node")
def reduce_node(
    sums: Sequence[Float[Array, " secondary"]],
    leaves: Sequence[Leaf],
    seed: Seed,
    residuals: Sequence[Float[Array, " secondary"]] | None = None,
) -> tuple[list[Float[Array, " shard"]], list[Float[Array, " secondary"]] | None]:
    """Sum node-local sums over ``node``: from secondary partitions to the owners.

    Args:
        sums: per leaf, the fp32 sum over the node's devices, un-rotated.
        leaves: their layouts.
        seed: salts stochastic rounding.
        residuals: with error feedback, what encoding lost last time (fp32, un-rotated): it is added
            before encoding.

    Returns:
        Per leaf, the fp32 sum over the world at its owner; and the new residuals, or None.
    """
    world = leaves[0].world
    if world.nodes == 1:
        return list(sums), None
    if residuals is not None:
        sums = [x + residual for x, residual in zip(sums, residuals, strict=True)]
    sent = [
        leaf.grads[1].encode(
            x.reshape(world.nodes, leaf.shard),
            seed=_salt(seed, leaf, _NODE_HOP),
            rotation=leaf.rotation,
        )
        for x, leaf in zip(sums, leaves, strict=True)
    ]
    kept = None
    if residuals is not None:
        kept = [
            x - _decode_each(rows, leaf).reshape(-1) for x, rows, leaf in zip(sums, sent, leaves, strict=True)
        ]
    arrived = exchange_together(sent, NODE)
    owned = [
        leaf.grads[1].decode_sum(rows, leaf.shard, rotation=leaf.rotation)
        for rows, leaf in zip(arrived, leaves, strict=True)
    ]
    return owned, kept


@jax.named_scope("all_gather_sum")
def all_gather_sum(
    sums: Sequence[Float[Array, " shard"]], leaves: Sequence[Leaf]
) -> list[Float[Array, "..."]]:
    """Give everyone the owners' sums: the second half of stage 0's all-reduce.

    They stay in the wire's raw format, for all of them are whole: the optimizer widens as it reads.
    """
    rows = [x.astype(leaf.grads[1].dtype) for x, leaf in zip(sums, leaves, strict=True)]
    for axis in (NODE, LOCAL):
        rows = [x.reshape(-1) for x in gather_together([x.reshape(-1) for x in rows], axis)]
    return [unflatten(x, leaf) for x, leaf in zip(rows, leaves, strict=True)]


def _settle(rows: Rows, leaf: Leaf) -> Rows:
    """From the node hop's format to the local one's; nothing to do where they are the same."""
    node, local = leaf.weights
    if node == local:
        return rows
    return local.encode(node.decode(rows, leaf.shard, jnp.dtype(jnp.float32)))


def _decode_blocks(blocks: Rows, leaf: Leaf, dtype: jnp.dtype) -> Num[Array, " padded"]:
    codec = leaf.weights[1]
    rows = blocks.reshape(leaf.world.size, codec.row_items(leaf.shard))
    return codec.decode(rows, leaf.shard, dtype).reshape(-1)


def _decode_each(rows: Rows, leaf: Leaf) -> Float[Array, "rows n"]:
    """What each row will be read as, un-rotated: a sum over one peer, row by row."""
    codec = leaf.grads[1]
    decoded = [codec.decode_sum(row[None], leaf.shard, rotation=leaf.rotation) for row in rows]
    return jnp.stack(decoded)


def _encode_stages(
    grad: Num[Array, "..."], leaf: Leaf, seed: Seed, chunks: int
) -> Num[Array, "chunks local m"]:
    """The payload of the first hop, stage by stage: the reordering is the encoder's index map."""
    world, codec, flat = leaf.world, leaf.grads[0], flatten(grad, leaf)
    if codec.raw:
        staged = flat.reshape(world.local, world.nodes, chunks, leaf.shard // chunks)
        staged = staged.transpose(2, 0, 1, 3).reshape(chunks, world.local, -1)
        return staged.astype(codec.dtype)
    return pallas_kernels.encode_reordered(
        flat,
        codec.fmt,
        local=world.local,
        nodes=world.nodes,
        chunks=chunks,
        block=codec.block,
        rounding=codec.rounding,
        rotation=leaf.rotation,
        seed=_salt(seed, leaf, _LOCAL_HOP),
    )


def _between_hops(rows: Rows, leaf: Leaf, seed: Seed, chunks: int) -> Rows:
    """Sum over the node's devices and encode for the owners.

    Where both hops are quantized the values stay rotated; where only one is, it rotates on its own.
    """
    first, second = leaf.grads
    nodes, n = leaf.world.nodes, leaf.shard // chunks
    salted = _salt(seed, leaf, _NODE_HOP)
    if not first.raw and not second.raw:
        return first.decode_sum_encode(rows, second, nodes, n, seed=salted)
    total = first.decode_sum(rows, nodes * n, rotation=leaf.rotation)
    return second.encode(total.reshape(nodes, n), seed=salted, rotation=leaf.rotation)


def _last_hop(axes: Sequence[str | tuple[str, str]]) -> tuple[int, str]:
    """Which of a leaf's gradient codecs the last hop has, and its scope."""
    return (0, "reduce_local") if axes[-1] == LOCAL else (1, "reduce_node")


def _salt(seed: Seed, leaf: Leaf, hop: int) -> Seed:
    """A seed of its own for each leaf, hop and device."""
    return mix(seed, leaf.number, hop, lax.axis_index(NODE), lax.axis_index(LOCAL))
