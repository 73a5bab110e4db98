"""The communication of a training step: every collective of the traced program, with dtype, count and bytes.

The counts are of the jaxpr. It needs no compiler and has the dtypes as they are sent, while XLA:CPU widens
some of them. Not counted are the sums that XLA adds for norms of sharded arrays (gradient norm, clipping): a
few bytes per leaf.

A gather or a sum over a group of A devices counts as a ring in the order of the mesh, an all-to-all as direct
messages:

=============== ================================ ==================
collective      bytes that each device sends     b is
=============== ================================ ==================
all_gather      (A - 1) b                        one device's part
all_to_all      (A - 1) / A b                    the whole operand
reduce_scatter  (A - 1) / A b                    the whole operand
psum, pmax, ... 2 (A - 1) / A b                  the operand
ppermute        b                                the operand
=============== ================================ ==================

Over both axes, one of every ``local`` links of a ring leaves the node. The messages of an all-to-all count by
their target.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec
from rich.console import Group, RenderableType
from rich.table import Table

from zerojax.adapters.loss import EXCHANGE
from zerojax.comm.in_order import collective_axes
from zerojax.errors import ConfigurationError
from zerojax.formatting import html, numeric, plain_text, size
from zerojax.sharding.layers import ONE_TURN
from zerojax.sharding.mesh import BY_ROWS, LOCAL, NODE, MeshShape
from zerojax.train.batch import batch_specs, processes_a_row
from zerojax.train.state import TrainState
from zerojax.train.step import trace_train_step

_ALL_REDUCES = frozenset({"psum", "psum_invariant", "pmax", "pmin"})
_GATHERS = frozenset({"all_gather", "all_gather_invariant"})
_KNOWN = _ALL_REDUCES | _GATHERS | {"all_to_all", "reduce_scatter"}

PHASES = {
    "weights forward": "gathers before the forward pass or within it",
    "weights backward": "gathers of the backward pass",
    "delta": "the change of the weights, once per optimizer step",
    "resync": "the whole weights instead of the delta, every delta_resync steps",
    "fragment": "local updates: the nodes' changes of a fragment, and the change of its outer weights",
    "gradients": "the hops of the gradients",
    "gradient sums": "sums sent to all nodes, of matrices that the optimizer needs whole",
    "attention": "heads and their gradients, between the devices of a node that share rows",
    "tokens": "tokens and their gradients, to the devices with their experts and back",
    "optimizer": "matrices sent to be orthogonalised, and back",
    "scales": "the largest magnitudes of the weights of fp8 matmuls",
    "metrics": "sums of losses, counts and model state",
    "other": "collectives in the model or the loss",
}
"""The purposes of collectives, and what each includes."""
_SCOPES = {
    "gradients": {"reduce_local", "reduce_node", "all_gather_sum"},
    "fragment": {"exchange_fragment"},
    "gradient sums": {"sums_to_nodes"},
    "attention": {EXCHANGE},
    "tokens": {"gather_tokens", "return_tokens"},
    "optimizer": {"orthogonalise"},
    "delta": {"gather_delta"},
    "resync": {"gather_exact"},
    "weights forward": {"gather_node", "gather_local"},
    "scales": {"scales"},
    "metrics": {"metrics"},
}
"""The name scopes of each phase. A collective belongs to the first phase with a scope around it."""


@dataclass(frozen=True)
class JaxprCollective:
    """One collective of the step; equal ones are merged.

    Attributes:
        primitive: its name in JAX.
        axes: mesh axes that it runs over.
        dtype: on the wire.
        elements: number of elements of the operand on one device.
        count: executions per step, loop trips included.
        phase: one of ``PHASES``.
        usual: False if only some steps run it, in the true branch of a conditional. No total counts it.
        local_bytes: bytes that one device sends within its node, times ``count``.
        node_bytes: bytes that one device sends to other nodes, times ``count``.
    """

    primitive: str
    axes: tuple[str, ...]
    dtype: str
    elements: int
    count: int
    phase: str
    usual: bool
    local_bytes: float
    node_bytes: float


@dataclass(frozen=True, repr=False)
class CommReport:
    """The bytes that a training step sends; ``print`` it.

    Attributes:
        nodes: extent of the mesh over ``node``.
        local: extent over ``local``.
        parameters: number of elements of the model's parameters.
        collectives: the step's collectives in the order of the program.
    """

    nodes: int
    local: int
    parameters: int
    collectives: tuple[JaxprCollective, ...]

    @property
    def local_bytes(self) -> float:
        """Bytes that one device sends within its node per step."""
        return sum(c.local_bytes for c in self.collectives if c.usual)

    @property
    def node_bytes(self) -> float:
        """Bytes that one device sends to other nodes per step."""
        return sum(c.node_bytes for c in self.collectives if c.usual)

    @property
    def between_nodes(self) -> float:
        """Bytes that all devices of one node send to other nodes per step: the load of its network link."""
        return self.node_bytes * self.local

    @property
    def model_bytes(self) -> int:
        """M: the model in 2-byte elements."""
        return 2 * self.parameters

    @property
    def zero3_bytes(self) -> float:
        """Bytes that ZeRO-3 in bf16 sends between nodes, per node and step: 3M (N-1)/N for N nodes."""
        return 3 * self.model_bytes * (self.nodes - 1) / self.nodes

    def phases(self) -> dict[str, tuple[float, float]]:
        """For each phase the bytes that one device sends: (within its node, to other nodes)."""
        return {
            phase: (sum(c.local_bytes for c in own), sum(c.node_bytes for c in own))
            for phase in PHASES
            if (own := [c for c in self.collectives if c.phase == phase and c.usual])
        }

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        totals = ("local_bytes", "node_bytes", "between_nodes", "model_bytes", "zero3_bytes")
        phases = {
            phase: {"local_bytes": local, "node_bytes": node}
            for phase, (local, node) in self.phases().items()
        }
        return {
            **dataclasses.asdict(self),
            **{name: getattr(self, name) for name in totals},
            "phases": phases,
        }

    def __rich__(self) -> RenderableType:
        numbers = numeric("in the node", "between nodes")
        phases = Table("phase", *numbers, title="By phase; bytes that one device sends per step")
        for phase, sent in self.phases().items():
            phases.add_row(phase, *map(size, sent))
        phases.add_section()
        phases.add_row("total", size(self.local_bytes), size(self.node_bytes))
        return Group(self._collectives_table(), phases, self.summary())

    def __str__(self) -> str:
        return plain_text(self)

    def __repr__(self) -> str:
        """The mesh and the totals."""
        sent = f"{size(self.local_bytes)} within the node and {size(self.node_bytes)} to others"
        return f"<CommReport of {self.nodes} x {self.local} devices: each sends {sent} a step; print it>"

    def _repr_html_(self) -> str:
        """The tables, for notebooks."""
        return html(self)

    def summary(self) -> str:
        """The total between nodes against M and ZeRO-3, in a sentence."""
        if self.nodes == 1:
            return "one node: nothing crosses the network"
        return (
            f"between nodes, per node and step: {size(self.between_nodes)} = "
            f"{self.between_nodes / self.model_bytes:.4g} M (M = 2 bytes x {self.parameters:,} parameters); "
            f"ZeRO-3 in bf16 sends 3 M x {self.nodes - 1}/{self.nodes} = {size(self.zero3_bytes)}, "
            f"so this is {self.between_nodes / self.zero3_bytes:.1%} of it"
        )

    def _collectives_table(self) -> Table:
        table = Table(
            *("phase", "collective", "axis", "dtype"),
            *numeric("elements", "count", "in the node", "between nodes"),
            title="Collectives of a training step; bytes that one device sends",
        )
        for c in self.collectives:
            sent = [size(c.local_bytes), size(c.node_bytes)]
            if not c.usual:
                sent = [f"({value})" for value in sent]
            cells = (c.phase, c.primitive, "+".join(c.axes), c.dtype, f"{c.elements:,}", str(c.count))
            table.add_row(*cells, *sent)
        if not all(c.usual for c in self.collectives):
            table.caption = "(in parentheses: not in every step, and in no total)"
        return table


def comm_report(state: TrainState, batch: Any) -> CommReport:
    """Count the bytes that a training step sends, without running or compiling it.

    Args:
        state: a filled or abstract state.
        batch: a batch for ``train_step``, or ShapeDtypeStructs with the global batch's shapes.

    Raises:
        ConfigurationError: the loss has a collective that cannot be counted, such as one in a while loop.

    Examples:
        >>> report = zerojax.comm_report(state, batch)
        >>> sorted(report.phases())  # each with bytes within and between nodes
        ['gradients', 'metrics', 'weights backward', 'weights forward']
    """
    program = state.spec
    parts = jax.process_count() // processes_a_row(program.zero.sequence_parallel)
    shapes = jax.tree.map(partial(_of_all_processes, parts), batch, batch_specs(batch))
    traced = trace_train_step(state, shapes)
    counts = Counter[JaxprCollective]()
    for one in _walk(traced.jaxpr.jaxpr, _Place()):
        counts[dataclasses.replace(one, count=0)] += one.count
    return CommReport(
        nodes=program.world.nodes,
        local=program.world.local,
        parameters=sum(leaf.count for leaf in (*program.leaves, *program.frozen)),
        collectives=tuple(_counted(key, count, program.world) for key, count in counts.items()),
    )


@dataclass(frozen=True)
class _Place:
    """A position in the program: how often it runs, in which name scopes, and whether in usual steps."""

    count: int = 1
    names: str = ""
    usual: bool = True

    def inside(self, equation: core.JaxprEqn, *, times: int = 1, usual: bool = True) -> "_Place":
        names = f"{self.names}/{equation.source_info.name_stack}"
        return _Place(self.count * times, names, self.usual and usual)


def _walk(jaxpr: core.Jaxpr, place: _Place) -> Iterator[JaxprCollective]:
    """Every collective of a jaxpr and of its sub-jaxprs, with ``count`` set and no bytes yet."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if axes := collective_axes(equation):
            yield from _read(equation, axes, place.inside(equation))
        elif name == "cond":
            yield from _walk_branches(equation, place)
        elif name == "while" and not _has_one_turn(equation):
            inner = place.inside(equation)
            if any(True for sub in core.jaxprs_in_params(equation.params) for _ in _walk(sub, inner)):
                raise ConfigurationError(
                    "a collective in a while loop cannot be counted, because the number of iterations is "
                    "unknown. Use lax.scan, or lax.fori_loop with static bounds."
                )
        else:
            times = equation.params["length"] if name == "scan" else 1
            for sub in core.jaxprs_in_params(equation.params):
                yield from _walk(sub, place.inside(equation, times=times))


def _has_one_turn(loop: core.JaxprEqn) -> bool:
    """Whether a while loop is one of ``zerojax.sharding.layers.by_dma``."""
    return str(loop.source_info.name_stack).rstrip(")").endswith(ONE_TURN)


def _walk_branches(equation: core.JaxprEqn, place: _Place) -> Iterator[JaxprCollective]:
    """The collectives of a conditional. Its false branch is the usual one, as in ``updated_copies``."""
    branches = [
        list(_walk(branch.jaxpr, place.inside(equation, usual=index == 0)))
        for index, branch in enumerate(equation.params["branches"])
    ]
    usual, *others = branches
    yield from usual
    for branch in others:
        if [dataclasses.replace(c, usual=place.usual) for c in branch] != usual:
            yield from branch


def _read(equation: core.JaxprEqn, axes: tuple[str, ...], place: _Place) -> Iterator[JaxprCollective]:
    name = equation.primitive.name
    known = name in _KNOWN or (name == "ppermute" and axes == (LOCAL,))
    if not known or equation.params.get("axis_index_groups") is not None:
        raise ConfigurationError(
            f"the collective {name!r} over {axes} cannot be counted. Use one of {', '.join(sorted(_KNOWN))} "
            "over whole mesh axes, or ppermute within a node."
        )
    for operand in equation.invars:
        aval: Any = operand.aval
        phase = _phase(place)
        yield JaxprCollective(
            name, axes, aval.dtype.name, aval.size, place.count, phase, place.usual, 0.0, 0.0
        )


def _phase(place: _Place) -> str:
    """The phase of a collective, by the name scopes around it (as in ``zerojax.weights``)."""
    scopes = set(re.findall(r"\w+", place.names))
    phase = next((phase for phase, own in _SCOPES.items() if scopes & own), "other")
    return "weights backward" if phase == "weights forward" and "transpose" in scopes else phase


def _counted(key: JaxprCollective, count: int, world: MeshShape) -> JaxprCollective:
    payload = key.elements * np.dtype(key.dtype).itemsize
    local, node = _sent(key.primitive, key.axes, payload, world)
    return dataclasses.replace(key, count=count, local_bytes=count * local, node_bytes=count * node)


def _sent(primitive: str, axes: tuple[str, ...], payload: int, world: MeshShape) -> tuple[float, float]:
    """Bytes that one device sends in one collective: (within its node, to other nodes)."""
    nodes = world.nodes if NODE in axes else 1
    local = world.local if LOCAL in axes else 1
    group = nodes * local
    if primitive == "ppermute":
        return payload, 0.0
    if primitive == "all_to_all":
        return payload * (local - 1) / group, payload * (nodes - 1) * local / group
    if primitive in _GATHERS:
        ring = float(payload * (group - 1))
    else:
        ring = payload * (group - 1) / group * (2 if primitive in _ALL_REDUCES else 1)
    crossing = 0.0 if nodes == 1 else 1 / local
    return ring * (1 - crossing), ring * crossing


def _of_all_processes(parts: int, x: Any, to: PartitionSpec) -> Any:
    """The global shape of an array that is spread by rows. A host array is one of ``parts`` equal parts."""
    if to != BY_ROWS:
        return x
    parts = parts if isinstance(x, np.ndarray) else 1
    return jax.ShapeDtypeStruct((x.shape[0] * parts, *x.shape[1:]), x.dtype)
