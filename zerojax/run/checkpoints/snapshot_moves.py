"""How a snapshot's arrays go from node to node: to another host's memory, and to a host that lacks them."""

import functools
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from zerojax.comm.in_order import on_mesh
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import NODE


class Move(Protocol):
    """What devices of different nodes do together with their parts of arrays; hashable."""

    def __call__(self, *parts: Array) -> Array:
        """This device's new part, inside ``shard_map``."""
        ...


@dataclass(frozen=True)
class ToNext:
    """A device gets the part of the device of another node.

    Attributes:
        distance: from that node to this one.
    """

    distance: int

    def __call__(self, *parts: Array) -> Array:
        """The other device's part."""
        (own,), nodes = parts, lax.axis_size(NODE)
        return lax.ppermute(own, NODE, [(node, (node + self.distance) % nodes) for node in range(nodes)])


@dataclass(frozen=True)
class FromCopies:
    """Some nodes get back what ``ToNext`` has copied to others.

    Attributes:
        lacking: those nodes.
        distance: from a node to the one that has its copy.
    """

    lacking: tuple[int, ...]
    distance: int

    def __call__(self, *parts: Array) -> Array:
        """The own part, or what another node has copied of it; from the own part and a copy of another."""
        (own, copy), nodes = parts, lax.axis_size(NODE)
        back = lax.ppermute(copy, NODE, [((node + self.distance) % nodes, node) for node in self.lacking])
        return jnp.where(jnp.isin(lax.axis_index(NODE), jnp.array(self.lacking)), back, own)


@dataclass(frozen=True)
class FromNode:
    """All nodes hold the same parts, and get the ones that one of them has.

    Attributes:
        source: that node.
    """

    source: int

    def __call__(self, *parts: Array) -> Array:
        """The part in the source, bit for bit, from the own part."""
        own, *_ = parts
        # NCCL sums bytes, and neither NaN nor -0.0 changes.
        bits = lax.bitcast_convert_type(own, jnp.uint8) if own.dtype != bool else own.astype(jnp.uint8)
        bits = lax.psum(jnp.where(lax.axis_index(NODE) == self.source, bits, 0), NODE)
        return lax.bitcast_convert_type(bits, own.dtype) if own.dtype != bool else bits.astype(bool)


def of_neighbours(x: Array, distance: int) -> Array:
    """The parts of an array that devices ``distance`` nodes before these hold, as ``ToNext`` brings them."""
    assert isinstance(x.sharding, NamedSharding)
    differs = NODE in jax.tree.leaves(tuple(x.sharding.spec))
    return moved(ToNext(distance), x) if differs else x


def moved(move: Move, *arrays: Array) -> Array:
    """Move the parts of arrays of one sharding between nodes; the result is in the memory of the first."""
    sharding = arrays[0].sharding
    assert isinstance(sharding, NamedSharding)
    run = _program(move, sharding.mesh, sharding.spec)
    return jax.device_put(run(*map(to_device, arrays)), sharding)


@functools.cache
def _program(move: Move, mesh: Mesh, spec: PartitionSpec) -> "jax.stages.Wrapped":
    """Compiled once for each shape, since a job copies its state again and again."""
    return jax.jit(on_mesh(move, mesh=mesh, in_specs=spec, out_specs=spec))
