"""Frozen weights: how they are encoded and stored, and decoded again.

A frozen weight is stored once per node, spread over its devices, in the format in which it is gathered
(``ZeroConfig.frozen_weights``). That is the secondary partition of ZeRO++ (section 3.2), which then never has
to be sent again. With ``frozen_spread="world"`` only its owners store its encoded shards, which cross nodes
unchanged.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Num, PyTree, UInt32

from zerojax.comm.in_order import on_mesh
from zerojax.matmul import fp8
from zerojax.sharding.layers import put_layers
from zerojax.sharding.layout import OWNED, ParamLayout, from_stored, to_stored, without_place
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import AXES, NODE
from zerojax.sharding.param_tree import Path, to_tree
from zerojax.sharding.wire_format import mix
from zerojax.train.fields import shardings_of, specs_of
from zerojax.train.spec import TrainSpec
from zerojax.weights import Weight

ReadLayer = Callable[[ParamLayout, int | None], Float[Array, "..."]]
"""Reads a layer's fp32 values in stored form. The arguments are a layout and the index of a stacked layer."""


def encode_frozen(
    spec: TrainSpec, leaf: ParamLayout, weight: Num[Array, "..."], salt: UInt32[Array, ""] | None = None
) -> tuple[Weight, UInt32[Array, ""]]:
    """A weight in the form in which it is stored, and its fingerprint; runs under ``jit``.

    Each owner encodes its shard, and the nodes exchange the encoded shards, once.

    Args:
        spec: the train spec.
        leaf: the weight's layout.
        weight: of unsharded shape, layers included, with any sharding.
        salt: of the hash; by default made from the weight's path.

    Returns:
        The weight as ``TrainSpec.stored`` describes it. And a hash of its path, of its values before
        encoding, and of their order, which is the same on every mesh. The sum of all hashes is a model's
        fingerprint.
    """
    owned = spec.sharding(leaf.spec(OWNED))
    stored = lax.with_sharding_constraint(to_stored(weight.astype(jnp.float32), leaf), owned)
    return _encode_stored(spec, leaf, stored, _salt(leaf) if salt is None else salt)


def encode_one(spec: TrainSpec, leaf: ParamLayout, weight: Num[Array, "..."]) -> tuple[Weight, int]:
    """``encode_frozen`` by a compiled function that weights of one layout share; waits for it."""
    one, everyone = without_place(leaf), spec.sharding(PartitionSpec())

    def make() -> Any:
        shardings = shardings_of(spec.stored(one, spec.strategy.frozen, "frozen"))
        return jax.jit(functools.partial(encode_frozen, spec, one), out_shardings=(shardings, everyone))

    stored, hashed = jax.block_until_ready(spec.once(f"freeze {one}", make)(weight, _salt(leaf)))
    return dataclasses.replace(stored, layout=leaf), int(hashed)


def load_frozen(spec: TrainSpec, read: ReadLayer) -> dict[str, PyTree]:
    """The state's fields "frozen" and "base", from weights that are read and encoded layer by layer.

    ``read`` returns a layer cut as its owners hold it.
    """
    return frozen_fields(spec, ((leaf.path, *_encode_layers(spec, leaf, read)) for leaf in spec.frozen))


def frozen_fields(spec: TrainSpec, encoded: Iterable[tuple[Path, Weight, int]]) -> dict[str, PyTree]:
    """The state's fields "frozen" and "base", from the path, the stored form and the hash of each weight."""
    stored: dict[Path, Weight] = {}
    total = 0
    for path, one, hashed in encoded:
        stored[path] = one
        total += hashed
    fingerprint = np.asarray(total % 2**32, np.uint32)
    placed = jax.make_array_from_callback((), spec.sharding(PartitionSpec()), lambda _: fingerprint)
    return {"frozen": to_tree(stored), "base": {"fingerprint": placed}}


def _encode_layers(spec: TrainSpec, leaf: ParamLayout, read: ReadLayer) -> tuple[Weight, int]:
    """A weight in the form in which it is stored, and its hash. At most one layer is in memory in fp32."""
    like, everyone = spec.stored(leaf, spec.strategy.frozen, "frozen"), spec.sharding(PartitionSpec())
    # Weights of one layout share a compiled function; only the salt of the hash differs.
    one = dataclasses.replace(without_place(leaf), stack=(1,) * len(leaf.stack))
    arrays = (like.values, like.scale)
    shardings, specs = shardings_of(arrays), specs_of(arrays)

    def put(stored: Any, layer: Array, values: Array, salt: Array) -> tuple[Any, Array]:
        weight, hashed = _encode_stored(spec, one, values, salt + layer)
        encoded = (weight.values, weight.scale)
        if leaf.stack:
            place = functools.partial(put_layers, leaf.stack)
            run = on_mesh(place, spec.mesh, in_specs=(specs, specs, PartitionSpec()), out_specs=specs)
            encoded = run(stored, encoded, layer)
        return encoded, hashed

    def empty() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays)

    form = f"{one} of {leaf.stack}"
    run = spec.once(
        f"freeze a layer: {form}",
        lambda: jax.jit(put, donate_argnums=0, out_shardings=(shardings, everyone)),
    )
    begin = spec.once(f"no layers: {form}", lambda: jax.jit(empty, out_shardings=shardings))
    stored: Any = begin() if leaf.stack else None
    total = 0
    for layer in range(leaf.layers):
        values = read(leaf, layer if leaf.stack else None)
        stored, hashed = run(stored, np.uint32(layer), values, _salt(leaf))
        total += int(hashed)  # waits, so that one layer's values are freed before the next are read
    values, scale = stored
    return Weight(values, leaf, spec.strategy.frozen, scale), total


def _encode_stored(
    spec: TrainSpec, leaf: ParamLayout, stored: Float[Array, "..."], salt: UInt32[Array, ""] | np.uint32
) -> tuple[Weight, UInt32[Array, ""]]:
    """``encode_frozen`` for values that their owners hold; the layers' hashes have salts from ``salt`` on."""
    level = spec.strategy.frozen

    def encode(block: Float[Array, "..."], salt: UInt32[Array, ""]) -> tuple[Weight, Array]:
        rows = block.reshape(leaf.layers, leaf.shard)
        hashed, scale = lax.psum(_hash(rows, leaf, salt), AXES), None
        if leaf.fp8:
            peaks = lax.pmax(jnp.max(jnp.abs(rows), axis=-1), AXES)
            scale = fp8.scale_for(peaks, fp8.E4M3)
            rows, scale = rows * scale[:, None], scale.reshape(leaf.stack)
        sent = leaf.weights.local.encode(rows)
        in_node = level == "secondary" and leaf.world.nodes > 1
        every = lax.all_gather(sent, NODE, axis=1) if in_node else sent[:, None]
        return Weight(every.reshape(*leaf.stack, -1), leaf, level, scale), hashed

    run = on_mesh(
        encode,
        spec.mesh,
        in_specs=(leaf.spec(OWNED), PartitionSpec()),
        out_specs=(specs_of(spec.stored(leaf, level)), PartitionSpec()),
    )
    return run(stored, jnp.asarray(salt))


def _salt(leaf: ParamLayout) -> np.uint32:
    return np.uint32(crc32(leaf.name.encode()))


def _hash(
    rows: Float[Array, "layers shard"], leaf: ParamLayout, salt: UInt32[Array, ""]
) -> UInt32[Array, ""]:
    """The sum of hashes of this device's elements and their places."""
    place = leaf.element_at(lax.axis_index(OWNED) * leaf.shard + jnp.arange(leaf.shard, dtype=jnp.uint32))
    salts = jnp.arange(leaf.layers, dtype=jnp.uint32)[:, None] + salt
    hashes = mix(lax.bitcast_convert_type(rows, jnp.uint32), place, salts)
    return jnp.sum(jnp.where(place < leaf.size, hashes, 0), dtype=jnp.uint32)


def decode_frozen(stored: Weight) -> Float[Array, "..."]:
    """The weight of unsharded shape, layers included, fp32; undoes ``encode_frozen`` up to its rounding."""
    leaf = stored.layout
    codec = leaf.weights.local
    rows = to_device(stored.values).reshape(-1, codec.row_items(leaf.shard))
    flat = codec.decode(rows, leaf.shard, jnp.dtype(jnp.float32)).reshape(leaf.layers, -1)
    if stored.scale is not None:
        flat = flat / stored.scale.reshape(-1, 1)
    return from_stored(flat.reshape(*leaf.stack, -1), leaf)
