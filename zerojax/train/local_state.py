"""What local updates add to a train state, and the fragments in which it crosses nodes.

Owners hold the outer weights and their momentum, as they hold any state of ZeRO. Each node holds weights of
its own, which it trains, and the outer weights as it last heard of them: the base of what it has learnt.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32, PyTree

from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.sharding.param_tree import to_tree
from zerojax.sharding.wire_format import Codec
from zerojax.train.spec import TrainSpec
from zerojax.zero_config import PerHop

MAX_METRICS = 64
"""The most scalars of a loss function's aux: a state is made before they are known."""
REPORT_COLUMNS = MAX_METRICS + 7
"""What a node tells of a step, in fp32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalState:
    """The arrays of local updates. Trees are nested by path.

    Attributes:
        weights: each node's own, fp32 ``[nodes, *stored_shape]``, over the devices of the node.
        known: the outer weights as the nodes know them, fp32 ``stored_shape``, the same in every node.
        momentum: of the outer weights, at their owners as these are; empty without one.
        skipped_in_row: per node ``[nodes]``, as ``TrainState.skipped_in_row``.
        report: per node ``[nodes, REPORT_COLUMNS]``, what it has to tell of its last step.
    """

    weights: PyTree
    known: PyTree
    momentum: PyTree
    skipped_in_row: Any
    report: Any


def abstract_local(spec: TrainSpec) -> LocalState:
    """The shapes, dtypes and shardings of a state's arrays of local updates."""

    def tree(shape_of: Any, spec_of: Any) -> PyTree:
        return to_tree(spec.by_path(lambda leaf: spec.abstract(shape_of(leaf), jnp.float32, spec_of(leaf))))

    def in_node(leaf: ParamLayout) -> PartitionSpec:
        return leaf.spec((LOCAL,))

    def stored(leaf: ParamLayout) -> tuple[int, ...]:
        return leaf.stored_shape

    nodes = spec.world.nodes
    return LocalState(
        weights=tree(lambda leaf: (nodes, *leaf.stored_shape), per_node),
        known=tree(stored, in_node),
        momentum=tree(stored, spec.param_spec) if spec.zero.outer_momentum else {},
        skipped_in_row=spec.abstract((nodes,), jnp.int32, PartitionSpec(NODE)),
        report=spec.abstract((nodes, REPORT_COLUMNS), jnp.float32, PartitionSpec(NODE)),
    )


def per_node(leaf: ParamLayout) -> PartitionSpec:
    """The sharding of an array that every node has of a parameter, by node along its first axis."""
    return PartitionSpec(NODE, *leaf.spec((LOCAL,)))


def first_local(spec: TrainSpec, params: PyTree) -> LocalState:
    """The arrays of local updates where all nodes begin with the outer weights; runs under ``jit``."""
    nodes, wanted = spec.world.nodes, abstract_local(spec)

    def placed(x: Array, like: jax.ShapeDtypeStruct) -> Array:
        return lax.with_sharding_constraint(jnp.broadcast_to(x, like.shape), like.sharding)

    return LocalState(
        weights=jax.tree.map(placed, params, wanted.weights),
        known=jax.tree.map(placed, params, wanted.known),
        momentum=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), wanted.momentum),
        skipped_in_row=jnp.zeros(nodes, jnp.int32),
        report=jnp.zeros(wanted.report.shape, jnp.float32),
    )


@dataclass(frozen=True)
class Fragments:
    """A parameter in ``every`` fragments of whole codec blocks, of which each step sends one.

    A fragment takes as many blocks of every owner's shard. All but the last have the same number, and one
    that reaches beyond the end has zeros there. All methods run on one device's values, inside ``shard_map``:
    flat, of one owner's shard or of several in a row, with the layers of a stack along the first axis.

    Attributes:
        leaf: the parameter's layout in the mesh.
        every: the number of fragments.
        change: the format of the outer weights' changes on their way to the nodes.
    """

    leaf: ParamLayout
    every: int
    change: Codec

    @staticmethod
    def of(spec: TrainSpec, leaf: ParamLayout) -> "Fragments":
        """Those of a parameter."""
        zero = spec.zero
        fmt = zero.wire_format_of(leaf.name, len(leaf.shape), zero.weights or zero.compute_format)
        return Fragments(leaf, zero.every, Codec(fmt, zero.block_size))

    @property
    def blocks(self) -> int:
        """The codec blocks of one owner's shard of one layer."""
        return self.leaf.shard // self.change.block

    @property
    def count(self) -> int:
        """The blocks of a fragment in one owner's shard."""
        return -(-self.leaf.layers * self.blocks // self.every)

    @property
    def layout(self) -> ParamLayout:
        """The layout of one fragment, as that of a parameter of one dimension."""
        shard = self.count * self.change.block
        return dataclasses.replace(
            self.leaf,
            shape=(shard * self.leaf.world.size,),
            dtype="float32",
            stack=(),
            shard=shard,
            weights=PerHop(node=self.change, local=Codec("fp32", self.change.block)),
        )

    def take(self, x: Float32[Array, "*layers n"], index: Int32[Array, ""]) -> Float32[Array, " m"]:
        """Fragment ``index`` of a parameter, one owner's part after the other."""
        layer, row = self._rows(index)
        taken = self._by_block(x).at[layer, :, row].get(mode="fill", fill_value=0)
        return taken.swapaxes(0, 1).reshape(-1)

    def put(
        self, x: Float32[Array, "*layers n"], index: Int32[Array, ""], fragment: Float32[Array, " m"]
    ) -> Float32[Array, "*layers n"]:
        """The parameter with another fragment ``index``."""
        layer, row = self._rows(index)
        rows = fragment.reshape(-1, self.count, self.change.block).swapaxes(0, 1)
        return self._by_block(x).at[layer, :, row].set(rows, mode="drop").reshape(x.shape)

    def without_padding(
        self, fragment: Float32[Array, " m"], index: Int32[Array, ""], axes: tuple[str, ...]
    ) -> Float32[Array, " m"]:
        """Fragment ``index`` with zeros in the padding, to which a rotation spreads rounding errors.

        Args:
            fragment: one owner's, or the parts of several in a row.
            index: of the fragment.
            axes: the mesh axes that number the devices' values.
        """
        leaf = self.leaf
        if not leaf.rotation or leaf.padded == leaf.size:
            return fragment
        owners = fragment.size // (self.count * self.change.block)
        owner = lax.axis_index(axes) * owners + jnp.arange(owners)
        _, row = self._rows(index)
        inside: Bool[Array, "owners count block"] = (
            owner[:, None, None] * leaf.shard
            + row[:, None] * self.change.block
            + jnp.arange(self.change.block)
        ) < leaf.size
        return jnp.where(inside.reshape(-1), fragment, 0)

    def _rows(self, index: Int32[Array, ""]) -> tuple[Int32[Array, " count"], Int32[Array, " count"]]:
        """The layer and, within it, the block of an owner's shard, for each block of a fragment."""
        return jnp.divmod(index * self.count + jnp.arange(self.count), self.blocks)

    def _by_block(self, x: Float32[Array, "*layers n"]) -> Float32[Array, "layers owners blocks block"]:
        return x.reshape(self.leaf.layers, -1, self.blocks, self.change.block)
