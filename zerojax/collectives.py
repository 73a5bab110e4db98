"""The hops: every byte that crosses the mesh on behalf of a weight or a gradient goes through here.

All functions run inside ``shard_map`` on one device's values, for the leaves of one unit at once. What
belongs together travels together: the leaves of a unit share one collective per hop, except that a raw leaf
of a megabyte or more goes alone, because joining it would cost a copy of a full-size buffer.

The phases of one step, for one unit:

1. ``gather_node``: the owner encodes its primary shard; an all-gather over ``node`` gives every node the
   secondary partition (qwZ, ZeRO++ section 3.1).
2. ``gather_local``: an all-gather over ``local`` gives every device the leaf, in the buffer the matmuls
   read. The backward pass repeats this phase alone (hpZ, section 3.2), or both.
3. ``encode_gradients`` and ``deliver_gradients``: gradients are encoded, exchanged over ``local``,
   decoded and summed in fp32, encoded again, exchanged over ``node``, decoded and summed in fp32 at the
   owner (qgZ, section 3.3).
4. ``reduce_node``: the last hop on its own, where it is taken once per step.

A mesh axis of extent 1 has no hop, and nothing is encoded for it. Each phase has a named scope: profiles
show it, and ``zerojax.wire`` tells by it what a collective is for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

import pallas_kernels
from zerojax.codec import Seed, as_bytes, from_bytes, mix
from zerojax.layout import OWNED, Leaf, flatten, unflatten
from zerojax.mesh import LOCAL, NODE, World

ALONE_BYTES = 1 << 20
_LOCAL_HOP, _NODE_HOP = 1, 2

Rows = Num[Array, "rows m"]


@dataclass(frozen=True)
class Way:
    """How far a gradient travels, and in how many hops.

    Attributes:
        to: "secondary" sums over ``local`` alone, "primary" over the world.
        hops: 2, or 1 for a single all-to-all over both axes (the paper's Figure 3), in which every device
            sends every other its block: M between nodes per device where two hops send M per node.
        chunks: into how many pieces the owner's block is cut where there are two hops.
    """

    to: Literal["secondary", "primary"]
    hops: int = 2
    chunks: int = 1

    def axes(self, world: World) -> tuple[str | tuple[str, str], ...]:
        """The mesh axes to cross, in order, an axis of extent 1 left out."""
        if self.to == "primary" and self.hops == 1:
            return (OWNED,) if world.size > 1 else ()
        extents = {LOCAL: world.local} | ({NODE: world.nodes} if self.to == "primary" else {})
        return tuple(axis for axis, extent in extents.items() if extent > 1)


@jax.named_scope("gather_node")
def gather_node(shards: Sequence[Float[Array, " shard"]], leaves: Sequence[Leaf]) -> list[Rows]:
    """All-gather primary shards over ``node`` into secondary partitions.

    Args:
        shards: per leaf, the owner's fp32 block.
        leaves: their layouts; all of one world.

    Returns:
        Per leaf ``[nodes, m]`` in its local format: row n is what node n owned.
    """
    if leaves[0].world.nodes == 1:
        return [leaf.weights[1].encode(x[None]) for x, leaf in zip(shards, leaves, strict=True)]
    sent = [leaf.weights[0].encode(x[None])[0] for x, leaf in zip(shards, leaves, strict=True)]
    arrived = _gather_together(sent, NODE)
    return [_settle(rows, leaf) for rows, leaf in zip(arrived, leaves, strict=True)]


@jax.named_scope("gather_delta")
def gather_delta(
    shards: Sequence[Float[Array, " shard"]], secondary: Sequence[Rows], leaves: Sequence[Leaf]
) -> list[Rows]:
    """Bring secondary copies up to date by what changed since (SDP4Bit section 3.1).

    The owner encodes its weights minus its row of the copy; every node, its own included, adds the same
    decoded difference, so copies stay bit-identical, and what rounding left out comes along next time.

    Args:
        shards: per leaf, the owner's fp32 block.
        secondary: per leaf ``[nodes, shard]``, the copy so far, in its raw local format.
        leaves: their layouts.

    Returns:
        The new copies, as ``secondary``.
    """
    if leaves[0].world.nodes == 1:
        return gather_node(shards, leaves)
    row = lax.axis_index(NODE)
    sent = [
        leaf.weights[0].encode_delta(x[None], lax.dynamic_index_in_dim(copy, row))[0]
        for x, copy, leaf in zip(shards, secondary, leaves, strict=True)
    ]
    arrived = _gather_together(sent, NODE)
    return [
        leaf.weights[0].decode_add(rows, copy)
        for rows, copy, leaf in zip(arrived, secondary, leaves, strict=True)
    ]


@jax.named_scope("gather_exact")
def gather_exact(shards: Sequence[Float[Array, " shard"]], leaves: Sequence[Leaf]) -> list[Rows]:
    """Secondary copies sent whole in the local format: the birth and the resync of delta's copies."""
    sent = [leaf.weights[1].encode(x[None])[0] for x, leaf in zip(shards, leaves, strict=True)]
    return _gather_together(sent, NODE) if leaves[0].world.nodes > 1 else [x[None] for x in sent]


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
        arrived = _gather_together(flat, LOCAL)
    return [
        unflatten(_decode_blocks(blocks, leaf, dtype), leaf)
        for blocks, leaf, dtype in zip(arrived, leaves, dtypes, strict=True)
    ]


@jax.named_scope("encode_gradients")
def encode_gradients(
    grads: Sequence[Num[Array, "..."]], leaves: Sequence[Leaf], seed: Seed, way: Way
) -> list[Num[Array, "chunks rows m"]]:
    """Encode gradients for the first hop of their way: what a pipelined backward pass carries along.

    Args:
        grads: per leaf, one layer of natural shape, this device's contribution.
        leaves: their layouts.
        seed: salts stochastic rounding.
        way: the hops that follow.

    Returns:
        Per leaf the payload, cut into the way's chunks; row i is for peer i of the first axis.
    """
    axes = way.axes(leaves[0].world)
    if not axes:
        return [flatten(grad, leaf)[None, None] for grad, leaf in zip(grads, leaves, strict=True)]
    if len(axes) == 2:
        return [
            _encode_stages(grad, leaf, seed, way.chunks) for grad, leaf in zip(grads, leaves, strict=True)
        ]
    hop, salt = (0, _LOCAL_HOP) if axes[0] == LOCAL else (1, _NODE_HOP)
    peers = lax.axis_size(axes[0])
    return [
        leaf.grads[hop].encode(
            flatten(grad, leaf).reshape(peers, -1),
            seed=_salt(seed, leaf, salt),
            rotation=leaf.rotation,
        )[None]
        for grad, leaf in zip(grads, leaves, strict=True)
    ]


def deliver_gradients(
    payloads: Sequence[Num[Array, "chunks rows m"]], leaves: Sequence[Leaf], seed: Seed, way: Way
) -> list[Float[Array, " n"]]:
    """Take encoded gradients along their way.

    Between two hops one fused pass decodes, sums and encodes again. Chunks are chains of their own, so
    that one's node hop overlaps the next one's local hop (qgZ's pipeline, ZeRO++ Figure 8).

    Args:
        payloads: as ``encode_gradients`` returns.
        leaves: their layouts.
        seed: the same as there.
        way: the same as there.

    Returns:
        Per leaf the fp32 sum: over the world at its owner, or over the node as a secondary partition.
    """
    axes = way.axes(leaves[0].world)
    if not axes:
        return [payload.reshape(-1).astype(jnp.float32) for payload in payloads]
    if len(axes) == 1:
        hop = 0 if axes[0] == LOCAL else 1
        with jax.named_scope("reduce_local" if axes[0] == LOCAL else "reduce_node"):
            arrived = _exchange_together([payload[0] for payload in payloads], axes[0])
            return [
                leaf.grads[hop].decode_sum(rows, leaf.padded // rows.shape[0], rotation=leaf.rotation)
                for rows, leaf in zip(arrived, leaves, strict=True)
            ]
    pieces = []
    for chunk in range(way.chunks):
        with jax.named_scope("reduce_local"):
            arrived = _exchange_together([payload[chunk] for payload in payloads], LOCAL)
            between = [
                _between_hops(rows, leaf, mix(seed, chunk), way.chunks)
                for rows, leaf in zip(arrived, leaves, strict=True)
            ]
        with jax.named_scope("reduce_node"):
            arrived = _exchange_together(between, NODE)
            sums = [_last_sum(rows, leaf, way.chunks) for rows, leaf in zip(arrived, leaves, strict=True)]
        pieces.append(sums)
    if way.chunks == 1:
        return pieces[0]
    return [jnp.concatenate(parts) for parts in zip(*pieces, strict=True)]


def reduce_gradients(
    grads: Sequence[Num[Array, "..."]], leaves: Sequence[Leaf], seed: Seed, way: Way
) -> list[Float[Array, " n"]]:
    """Sum gradients over the mesh: ``encode_gradients``, then ``deliver_gradients``."""
    return deliver_gradients(encode_gradients(grads, leaves, seed, way), leaves, seed, way)


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
    arrived = _exchange_together(sent, NODE)
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
        rows = [x.reshape(-1) for x in _gather_together([x.reshape(-1) for x in rows], axis)]
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


def _last_sum(rows: Rows, leaf: Leaf, chunks: int) -> Float[Array, " n"]:
    return leaf.grads[1].decode_sum(rows, leaf.shard // chunks, rotation=leaf.rotation)


def _salt(seed: Seed, leaf: Leaf, hop: int) -> Seed:
    """A seed of its own for each leaf, hop and device."""
    return mix(seed, leaf.number, hop, lax.axis_index(NODE), lax.axis_index(LOCAL))


def _gather_together(parts: Sequence[Num[Array, " m"]], axis: str) -> list[Rows]:
    """One all-gather for all small ``parts``, one each for the large; ``[extent, m]`` each."""
    return _together(parts, lambda wire: lax.all_gather(wire, axis))


def _exchange_together(parts: Sequence[Rows], axis: str | tuple[str, ...]) -> list[Rows]:
    """One all-to-all for all small ``parts``, one each for the large; row i goes to peer i."""
    return _together(parts, lambda wire: lax.all_to_all(wire, axis, split_axis=0, concat_axis=0, tiled=True))


def _together(parts: Sequence[Array], collective: Callable[[Array], Array]) -> list[Array]:
    """Run ``collective`` on ``parts`` joined along their last axis, then take them apart.

    Parts of one dtype are joined as they are, others as bytes. Barriers keep the compiler from moving
    an encoding or a cast to the other side of the wire.
    """
    arrived: list[Array | None] = [None] * len(parts)
    joined = [i for i, part in enumerate(parts) if part.nbytes < ALONE_BYTES or len(parts) == 1]
    for i in set(range(len(parts))) - set(joined):
        arrived[i] = _across(parts[i], collective)
    if joined:
        small = [parts[i] for i in joined]
        dtype = small[0].dtype
        if any(part.dtype != dtype for part in small):
            small, dtype = [as_bytes(part) for part in small], jnp.dtype(jnp.uint8)
        wire = _across(small[0] if len(small) == 1 else jnp.concatenate(small, -1), collective)
        start = 0
        for i, part in zip(joined, small, strict=True):
            piece = lax.slice_in_dim(wire, start, start + part.shape[-1], axis=-1)
            start += part.shape[-1]
            arrived[i] = from_bytes(piece, parts[i].dtype) if dtype == jnp.uint8 else piece
    return [part for part in arrived if part is not None]


def _across(wire: Array, collective: Callable[[Array], Array]) -> Array:
    return lax.optimization_barrier(collective(lax.optimization_barrier(wire)))
