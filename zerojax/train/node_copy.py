"""A copy of the weights in every node, for passes that read the same weights more than once.

Each forward pass brings a state's weights across nodes. Evaluations, log-probabilities and generation make
many between two updates, and the step after them another: with a copy the first exchange is the only one. It
is what frozen weights are (``zerojax.train.frozen``): the secondary partitions of ZeRO++ (section 3.2),
stored once per node, with the very values that each pass would compute with.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from zerojax.comm.in_order import on_mesh
from zerojax.comm.xla_options import compiler_options
from zerojax.matmul.operand import array_of, with_values
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.sharding.param_tree import Path, from_tree
from zerojax.train.blocks import flat_blocks
from zerojax.train.fields import state_specs
from zerojax.train.memory import device_bytes
from zerojax.train.sources import rows_of, secondary_partitions
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState, check_there

Stored = dict[Path, Any]

READ = ("params", "secondary", "step", "frozen", "node_copy")
"""The fields of a state that ``node_rows`` reads."""


def with_node_copy(state: TrainState) -> TrainState:
    """The state with a copy of its weights in every node: the passes that follow send none between nodes.

    For several calls of ``eval_step``, ``predict_step`` or ``generate`` between two updates, and at stage 3
    the ``train_step`` after them. They compute with the same weights as without it; in bf16 the compiler may
    round what comes of them elsewhere. The step, and ``TrainState.replace`` of weights, drop the copy.

    Args:
        state: any; it is not donated.

    Returns:
        With the copy: two bytes per parameter, or as few as ``ZeroConfig.local_weights`` takes, over the
        devices of a node. The state itself on one node and at stage 0, where no pass sends weights.

    Raises:
        ConfigurationError: the state is abstract or was donated.
    """
    check_there(state)
    return state.replace(node_copy=stored_in_node(state)) if lacks_node_copy(state) else state


def lacks_node_copy(state: TrainState) -> bool:
    """Whether a pass of the state sends weights between nodes, which a copy would spare."""
    return state.spec.world.nodes > 1 and state.spec.zero.stage > 0 and not state.node_copy


def stored_in_node(state: TrainState) -> Stored:
    """The weights of ``copied_leaves`` as a node stores them."""
    if state.node_copy:
        return state.node_copy
    spec = state.spec

    def local(shards: dict[str, Any]) -> Stored:
        rows = node_rows(spec, shards)
        return {leaf.path: _flat(rows[leaf.path], leaf) for leaf in copied_leaves(spec)}

    return spec.once("node copy", lambda: per_node(spec, local, node_copy_specs(spec)))(state)


def per_node(spec: TrainSpec, local: Any, out: Any) -> Any:
    """The compiled function from a state to what ``local`` makes on each device of its fields in ``READ``."""

    def run(given: dict[str, Any]) -> Any:
        specs = read_specs(spec, copied=bool(given["node_copy"]))
        own = ({name: specs[name] for name in given},)
        return on_mesh(local, spec.mesh, in_specs=own, out_specs=out)(given)

    program = jax.jit(run, compiler_options=compiler_options(spec.mesh))
    return lambda state: program({name: getattr(state, name) for name in READ})


def read_specs(spec: TrainSpec, *, copied: bool) -> dict[str, Any]:
    """The PartitionSpecs of a state's fields, with or without a copy."""
    return state_specs(spec) | {"node_copy": node_copy_specs(spec) if copied else {}}


def node_layout(leaf: ParamLayout) -> ParamLayout:
    """A weight's layout in the copy: that of a frozen one."""
    return dataclasses.replace(leaf, frozen=True)


def copied_leaves(spec: TrainSpec) -> tuple[ParamLayout, ...]:
    """The weights in the copy: all but frozen ones that every node has already."""
    return (*spec.leaves, *(spec.frozen if spec.strategy.frozen == "primary" else ()))


def abstract_in_node(spec: TrainSpec, leaf: ParamLayout) -> Any:
    """A weight in the copy: its shape, dtype and sharding; ``Scaled`` codes, if fp8 products read it."""
    own = node_layout(leaf)
    return spec.abstract_encoded(own, own.frozen_shape, own.spec((LOCAL,)))


def node_copy_specs(spec: TrainSpec) -> dict[Path, Any]:
    """The PartitionSpec of each weight in the copy."""
    abstract = {leaf.path: abstract_in_node(spec, leaf) for leaf in copied_leaves(spec)}
    return jax.tree.map(lambda x: x.sharding.spec, abstract)


def node_copy_bytes(spec: TrainSpec) -> int:
    """Bytes of the copy on one device."""
    return device_bytes([abstract_in_node(spec, leaf) for leaf in copied_leaves(spec)])


def node_rows(spec: TrainSpec, shards: dict[str, Any]) -> Stored:
    """The secondary partition of every weight, inside ``shard_map``: from the copy, or from other nodes.

    Args:
        spec: the train spec.
        shards: the fields in ``READ``.

    Returns:
        ``[.., nodes, m]`` in the local format; those that fp8 products read as ``Scaled`` codes.
    """
    stored, frozen = shards["node_copy"], from_tree(shards["frozen"])
    if stored:
        rows = {
            leaf.path: jax.tree.map(functools.partial(rows_of, leaf=leaf), stored[leaf.path])
            for leaf in (*spec.leaves, *spec.frozen)
            if leaf.path in stored
        }
    else:
        masters = flat_blocks(from_tree(shards["params"]), spec.leaves)
        rows = secondary_partitions(spec, masters, from_tree(shards["secondary"]), shards["step"])
    for leaf in spec.frozen:
        if leaf.path not in rows:
            rows[leaf.path] = jax.tree.map(functools.partial(_frozen_rows, spec, leaf), frozen[leaf.path])
    return rows


def _frozen_rows(spec: TrainSpec, leaf: ParamLayout, x: Array) -> Array:
    """A frozen weight's secondary partition; a scale as it is."""
    if spec.strategy.frozen == "primary" and x.ndim > len(leaf.stack):
        return lax.all_gather(x, NODE, axis=len(leaf.stack))
    return rows_of(x, leaf)


def _flat(rows: Any, leaf: ParamLayout) -> Any:
    """Secondary partitions as a state stores them; a scale as it is."""
    return with_values(rows, array_of(rows).reshape(*leaf.stack, -1))
