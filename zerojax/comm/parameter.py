"""What is sent of one parameter: its weight and its gradient, encoded before a hop and decoded after it.

``zerojax.comm.collectives`` calls these functions inside ``shard_map`` for every parameter of a unit.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

import pallas_kernels
from zerojax.comm.coalesced import Rows
from zerojax.matmul.operand import Codes, Scaled, array_of
from zerojax.sharding.layout import ParamLayout, flatten, unflatten
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.sharding.wire_format import Codec, Seed, mix

LOCAL_HOP, NODE_HOP = 1, 2
"""What salts the random bits of a gradient's hops."""

# Weights.


def encode_weight(shard: Any, leaf: ParamLayout, codec: Codec) -> Num[Array, " m"]:
    """A primary shard as it is sent; a frozen one is stored so."""
    return array_of(shard) if leaf.frozen else codec.encode(_scaled(shard)[None])[0]


def encode_difference(shard: Any, copy: Rows, leaf: ParamLayout) -> Num[Array, " m"]:
    """A primary shard's difference from its owner's row of delta's copy ``[nodes, m]``."""
    row = lax.dynamic_index_in_dim(copy, lax.axis_index(NODE))
    return leaf.weights.node.encode_delta(_scaled(shard)[None], _widened(row, leaf))[0]


def add_difference(rows: Rows, copy: Rows, leaf: ParamLayout) -> Rows:
    """Delta's copy, in the local hop's format, with the differences of all owners added."""
    return leaf.weights.local.encode(leaf.weights.node.decode_add(rows, _widened(copy, leaf)))


def in_local_format(rows: Rows, leaf: ParamLayout) -> Rows:
    """Weights that arrive in the node hop's format, in the local hop's."""
    node, local = leaf.weights.node, leaf.weights.local
    if node == local:
        return rows
    return local.encode(node.decode(rows, leaf.shard, jnp.dtype(jnp.float32)))


def decoded_weight(blocks: Num[Array, "..."], leaf: ParamLayout, dtype: jnp.dtype) -> Any:
    """The whole weight that the matmuls read.

    Args:
        blocks: one layer's encoded shards, in the order of their owners.
        leaf: its layout.
        dtype: of the weight.

    Returns:
        One layer of unsharded shape; ``Codes``, where it is an operand of fp8 products.
    """
    if leaf.fp8:
        return Codes.of(unflatten(blocks, leaf), dtype)
    codec = leaf.weights.local
    rows = blocks.reshape(leaf.world.size, codec.row_items(leaf.shard))
    return unflatten(codec.decode(rows, leaf.shard, dtype).reshape(-1), leaf)


def _scaled(shard: Any) -> Float[Array, " shard"]:
    return shard.scaled() if isinstance(shard, Scaled) else shard


def _widened(rows: Rows, leaf: ParamLayout) -> Rows:
    """Rows of delta's copy as numbers, which kernels can add to: fp8 codes are none."""
    return leaf.weights.local.decode(rows, leaf.shard, jnp.dtype(jnp.bfloat16)) if leaf.fp8 else rows


# Gradients.


def encode_rows(rows: Float[Array, "peers n"], leaf: ParamLayout, codec: Codec, seed: Seed, hop: int) -> Rows:
    """Encode a row of a gradient for each peer of a hop (``LOCAL_HOP`` or ``NODE_HOP``)."""
    return codec.encode(rows, seed=_salt(seed, leaf, hop), rotation=leaf.rotation)


def encode_reordered(
    grad: Num[Array, "..."], leaf: ParamLayout, seed: Seed, chunks: int
) -> Num[Array, "chunks local m"]:
    """The payload of the first of two hops, by chunk: the encoder's index map does the reordering."""
    world, codec, flat = leaf.world, leaf.grads.local, flatten(grad, leaf)
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
        seed=_salt(seed, leaf, LOCAL_HOP),
    )


def sum_and_encode(rows: Rows, leaf: ParamLayout, seed: Seed, chunks: int) -> Rows:
    """Between two hops: sum a chunk over the node's devices, and encode it for its owners.

    If both hops are quantized the values stay rotated; if only one is, it rotates on its own.
    """
    first, second = leaf.grads.local, leaf.grads.node
    nodes, n = leaf.world.nodes, leaf.shard // chunks
    if not first.raw and not second.raw:
        return first.decode_sum_encode(rows, second, nodes, n, seed=_salt(seed, leaf, NODE_HOP))
    total = first.decode_sum(rows, nodes * n, rotation=leaf.rotation)
    return encode_rows(total.reshape(nodes, n), leaf, second, seed, NODE_HOP)


def encoding_error(sums: Float[Array, " n"], rows: Rows, leaf: ParamLayout) -> Float[Array, " n"]:
    """What the node hop's encoding of ``sums`` into ``rows`` loses, un-rotated."""
    codec = leaf.grads.node
    # As the receiver will decode: a row is a sum over one peer.
    decoded = [codec.decode_sum(row[None], leaf.shard, rotation=leaf.rotation) for row in rows]
    return sums - jnp.stack(decoded).reshape(-1)


def _salt(seed: Seed, leaf: ParamLayout, hop: int) -> Seed:
    """A separate seed for each leaf, hop and device."""
    return mix(seed, leaf.index, hop, lax.axis_index(NODE), lax.axis_index(LOCAL))
