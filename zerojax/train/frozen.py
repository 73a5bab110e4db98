"""Frozen weights: how they are encoded and stored, and decoded again.

A frozen weight is stored once per node, spread over its devices, in the format in which it is gathered
(``ZeroConfig.frozen_weights``): the secondary partition of ZeRO++ (section 3.2), which then never has to be
sent again.
"""

from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Num, UInt32

from zerojax.matmul import fp8
from zerojax.matmul.operand import Scaled
from zerojax.sharding.layout import OWNED, ParamLayout, from_stored, to_stored
from zerojax.sharding.mesh import AXES, LOCAL, NODE
from zerojax.sharding.wire_format import mix
from zerojax.train.spec import TrainSpec


def encode_frozen(
    spec: TrainSpec, leaf: ParamLayout, weight: Num[Array, "..."]
) -> tuple[Any, UInt32[Array, ""]]:
    """A weight as it is stored, and its fingerprint; runs under ``jit``.

    Each owner encodes its shard, and the nodes exchange the encoded shards, once.

    Args:
        spec: the train spec.
        leaf: the weight's layout.
        weight: of unsharded shape, layers included; any sharding.

    Returns:
        The weight as ``TrainSpec.abstract_frozen`` says. And a hash of its path, of its values before they
        were encoded, and of their order, the same on every mesh: the sum of the hashes of a model's weights
        is its fingerprint.
    """
    owned = spec.sharding(leaf.spec(OWNED))
    stored = lax.with_sharding_constraint(to_stored(weight.astype(jnp.float32), leaf), owned)

    def encode(block: Float[Array, "..."]) -> tuple[Any, Array]:
        rows = block.reshape(leaf.layers, leaf.shard)
        hashed, scale = lax.psum(_hash(rows, leaf), AXES), None
        if leaf.fp8:
            peaks = lax.pmax(jnp.max(jnp.abs(rows), axis=-1), AXES)
            scale = fp8.scale_for(peaks, fp8.E4M3)
            rows = rows * scale[:, None]
        sent = leaf.weights.local.encode(rows)
        every = lax.all_gather(sent, NODE, axis=1) if leaf.world.nodes > 1 else sent[:, None]
        values = every.reshape(*leaf.stack, -1)
        return values if scale is None else Scaled(values, scale.reshape(leaf.stack)), hashed

    out = leaf.spec((LOCAL,))
    run = jax.shard_map(
        encode,
        mesh=spec.mesh,
        in_specs=leaf.spec(OWNED),
        out_specs=(Scaled(out, PartitionSpec()) if leaf.fp8 else out, PartitionSpec()),
        check_vma=False,
    )
    return run(stored)


def _hash(rows: Float[Array, "layers shard"], leaf: ParamLayout) -> UInt32[Array, ""]:
    """The sum of hashes of this device's elements and their places."""
    place = lax.axis_index(OWNED) * leaf.shard + jnp.arange(leaf.shard, dtype=jnp.uint32)
    salt = jnp.arange(leaf.layers, dtype=jnp.uint32)[:, None] + np.uint32(crc32(leaf.name.encode()))
    hashes = mix(lax.bitcast_convert_type(rows, jnp.uint32), place, salt)
    return jnp.sum(jnp.where(place < leaf.size, hashes, 0), dtype=jnp.uint32)


def decode_frozen(stored: Any, leaf: ParamLayout) -> Float[Array, "..."]:
    """The weight of unsharded shape, layers included, fp32; undoes ``encode_frozen`` but for its rounding."""
    values, scale = stored if isinstance(stored, Scaled) else (stored, None)
    codec = leaf.weights.local
    rows = values.reshape(-1, codec.row_items(leaf.shard))
    flat = codec.decode(rows, leaf.shard, jnp.dtype(jnp.float32)).reshape(leaf.layers, -1)
    if scale is not None:
        flat = flat / scale.reshape(-1, 1)
    return from_stored(flat.reshape(*leaf.stack, -1), leaf)
