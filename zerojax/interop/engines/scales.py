"""fp8 weights with a scale for each block: computes the scales, and encodes shards on their devices.

The codes and scales equal the ones that ``FP8Blocks.encode`` computes on the host, bit for bit. A block may
cross shards, so its largest magnitude is a maximum over devices. No weight leaves its device.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, UInt8, UInt32

from pallas_kernels.reference import INF_BITS, to_bits, to_float
from zerojax.interop.engines.encoder import Cut, in_pieces
from zerojax.interop.engines.receiver.manifest import Strip
from zerojax.interop.huggingface.fp8_blocks import FP8Blocks
from zerojax.interop.huggingface.mapping import Tensor
from zerojax.sharding.memory import to_device
from zerojax.sharding.param_tree import Path

_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class Blocks:
    """The blocks of a weight's matrix that share a scale.

    Attributes:
        shape: of the matrix, (inputs, outputs).
        height: inputs of a block.
        firsts: the first output of each column of blocks.
    """

    shape: tuple[int, int]
    height: int
    firsts: tuple[int, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor], how: FP8Blocks) -> "Blocks":
        """The blocks of one layer, whose columns are in these tensors."""
        outputs, inputs = how.block_shape
        firsts = {x for t in tensors for x in range(t.columns.start, t.columns.stop, outputs)}
        rows, columns = tensors[0].weight
        return Blocks((rows, columns), inputs, tuple(sorted(firsts)))

    @property
    def rows(self) -> int:
        """Rows of blocks."""
        return -(-self.shape[0] // self.height)

    @property
    def columns(self) -> int:
        """Columns of blocks."""
        return len(self.firsts)

    @property
    def band(self) -> int:
        """Elements of a row of blocks."""
        return self.height * self.shape[1]

    @property
    def column_of(self) -> Int32[np.ndarray, " outputs"]:
        """The column of blocks of each output."""
        return np.searchsorted(self.firsts, np.arange(self.shape[1]), "right").astype(np.int32) - 1

    def strip_of(self, tensor: Tensor, number: int, how: FP8Blocks) -> Strip:
        """Where the scales of a tensor are in the matrix of scales; ``number`` is their tensor's."""
        height, columns = how.block_shape[0], tensor.columns
        left = self.firsts.index(columns.start)
        end = left + -(-(columns.stop - columns.start) // height)
        return Strip(number, 0, self.rows, left, end, tensor.part.first // height * self.rows, 1, self.rows)


def exponents_of(
    arrays: Mapping[Path, jax.Array], blocks: Mapping[Path, Blocks], layers: Mapping[Path, int]
) -> dict[Path, Int32[Array, "layers rows columns"]]:
    """The exponents of the scales of the weights with ``blocks``, on all devices.

    All processes must call it. ``arrays`` are fp32, as a train state stores them.
    """
    if not blocks:
        return {}
    found = [_on_devices(arrays[path], own, layers[path]) for path, own in blocks.items()]
    mesh: Mesh = arrays[next(iter(blocks))].sharding.mesh  # pyrefly: ignore[missing-attribute]
    return dict(zip(blocks, _exponents(found, mesh), strict=True))


def _on_devices(x: jax.Array, blocks: Blocks, layers: int) -> Int32[Array, "devices layers rows columns"]:
    """What each device knows of the largest magnitudes."""
    mesh: Mesh = x.sharding.mesh  # pyrefly: ignore[missing-attribute]
    own = [
        # The index starts at the shard's first element of a layer.
        _largest(shard.data, np.int32(shard.index[-2].start or 0), blocks=blocks, layers=layers)[None]
        for shard in x.addressable_shards
    ]
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_single_device_arrays((mesh.size, *own[0].shape[1:]), sharding, own)


@functools.partial(jax.jit, static_argnames="mesh")
def _exponents(largest: list[Array], mesh: Mesh) -> list[Int32[Array, "layers rows columns"]]:
    everyone = NamedSharding(mesh, PartitionSpec())
    return [lax.with_sharding_constraint(FP8Blocks.exponents(x.max(0)), everyone) for x in largest]


@functools.partial(jax.jit, static_argnames=("blocks", "layers"))
def _largest(
    shard: Float[Array, "..."], start: Int32[Array, ""], *, blocks: Blocks, layers: int
) -> Int32[Array, "layers rows columns"]:
    """The fp32 bits of the largest magnitude in each block of a shard, whose first element is ``start``."""
    bits = to_bits(to_device(shard).reshape(layers, -1)) & _MAGNITUDE
    count = bits.shape[1] // blocks.band + 2
    space = jnp.zeros((layers, count * blocks.band), jnp.int32)
    space = lax.dynamic_update_slice(space, bits, (0, start % blocks.band))
    rows = space.reshape(layers, count, blocks.height, -1).max(2)
    columns = jax.ops.segment_max(
        jnp.moveaxis(rows, -1, 0), blocks.column_of, blocks.columns, indices_are_sorted=True
    )
    every = jnp.zeros((layers, blocks.rows + count, blocks.columns), jnp.int32)
    every = lax.dynamic_update_slice(every, jnp.moveaxis(columns, 0, -1), (0, start // blocks.band, 0))
    return every[:, : blocks.rows]


@functools.partial(jax.jit, static_argnames=("blocks", "layers", "cut"))
def codes_of(
    shard: Float[Array, "..."],
    exponents: Int32[Array, "layers rows columns"],
    start: Int32[Array, ""],
    *,
    blocks: Blocks,
    layers: int,
    cut: Cut,
) -> UInt8[Array, "pieces size"]:
    """The e4m3 codes of a shard, whose first element is ``start``, cut into pieces."""
    values = to_device(shard).reshape(layers, -1)
    inputs, outputs = blocks.shape
    element = jnp.minimum(start + jnp.arange(values.shape[1]), inputs * outputs - 1)
    column = jnp.asarray(blocks.column_of)[element % outputs]
    factors = to_float((127 - exponents[:, element // blocks.band, column]) << 23)
    return in_pieces(_e4m3(values * factors), cut)


@functools.partial(jax.jit, static_argnames="cut")
def scales_of(exponents: Int32[Array, "layers rows columns"], *, cut: Cut) -> UInt32[Array, "pieces size"]:
    """The bits of the fp32 scales with these exponents, cut into pieces."""
    return in_pieces(((127 + exponents) << 23).astype(jnp.uint32).reshape(len(exponents), -1), cut)


def _e4m3(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Codes of fp32 numbers up to 448, rounded to nearest, half to even; NaN for numbers that are not finite.

    Chips convert by way of fp16, or clip: so it is computed in integers.
    """
    bits = to_bits(x) & _MAGNITUDE
    exponent = jnp.maximum(bits >> 23, 121)
    steps = jnp.round(jnp.abs(x) * to_float((257 - exponent) << 23)).astype(jnp.int32)
    code = jnp.where(bits < INF_BITS, ((exponent - 121) << 3) + steps, 0x7F)
    return (code | jnp.where(to_bits(x) < 0, 0x80, 0)).astype(jnp.uint8)
