"""What a training step will hold and send, from formulas: the plan that a run starts with.

Nothing is traced or compiled. ``zerojax.wire`` counts the same bytes in the program itself, so that each
checks the other. For a leaf of n layers, of which a device owns s elements, on N nodes of L devices, with
w, v the row bytes of its weights' formats over ``node`` and ``local``, and g, h those of its gradients'
over ``local`` and ``node``, one device sends per time:

================== ================= ======================
hop                over              bytes
================== ================= ======================
gather_node        node              n (N-1) w(s)
gather_local       local             n (L-1) N v(s)
reduce_local       local             n (L-1) g(N s)
reduce_node        node              n (N-1) h(s)
reduce in one hop  node and local    n (N L - 1) h(s)
================== ================= ======================
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group as Rows
from rich.console import RenderableType
from rich.table import Table

from zerojax.adapters.from_nnx import NNXAdapter
from zerojax.codec import Codec
from zerojax.layout import Leaf
from zerojax.memory import Memory, predict_memory
from zerojax.program import Group, Program
from zerojax.report import plain_text, size
from zerojax.state import TrainState


@dataclass(frozen=True)
class LeafPlan:
    """Leaves of one kind: the same in every layer, or in every unit of the same kind.

    Attributes:
        name: their path, numbers in it replaced by "*".
        shape: of one of them.
        copies: how many there are.
        weights: wire formats of their gather over ``node`` and over ``local``.
        grads: wire formats of their gradient's hops over ``local`` and over ``node``.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    weights: tuple[str, str]
    grads: tuple[str, str]


@dataclass(frozen=True)
class UnitPlan:
    """What is gathered together, and how often it occurs.

    Attributes:
        name: its path, numbers in it replaced by "*"; None for what belongs to no unit and is gathered
            at the start of the pass.
        copies: how many units of this kind there are, layers included.
        elements: of one of them.
        leaves: what it consists of.
    """

    name: str | None
    copies: int
    elements: int
    leaves: tuple[LeafPlan, ...]


@dataclass(frozen=True)
class HopPlan:
    """One hop of one phase.

    Attributes:
        phase: one of ``zerojax.wire.PHASES``.
        axis: "node", "local" or "node+local".
        formats: wire formats, of the most elements first.
        local_bytes: that one device sends within its node per step.
        node_bytes: that one device sends to other nodes per step.
        usual: False for the resync, which only some steps have; it is in no total.
    """

    phase: str
    axis: str
    formats: tuple[str, ...]
    local_bytes: int
    node_bytes: int
    usual: bool = True


@dataclass(frozen=True)
class Plan:
    """What is sharded, what it takes and what it sends; ``print`` it.

    Attributes:
        nodes: extent of the mesh over ``node``.
        local: extent over ``local``.
        parameters: elements of the model.
        settings: the options that differ from plain ZeRO-3, and what they mean here.
        units: what is gathered together.
        hops: what is sent. Sums of losses and of model state, a few bytes, are left out.
        memory: of one device, by kind, without activations.
    """

    nodes: int
    local: int
    parameters: int
    settings: tuple[str, ...]
    units: tuple[UnitPlan, ...]
    hops: tuple[HopPlan, ...]
    memory: Memory

    @property
    def local_bytes(self) -> int:
        """Bytes that one device sends within its node per step."""
        return sum(hop.local_bytes for hop in self.hops if hop.usual)

    @property
    def node_bytes(self) -> int:
        """Bytes that one device sends to other nodes per step."""
        return sum(hop.node_bytes for hop in self.hops if hop.usual)

    @property
    def between_nodes(self) -> int:
        """Bytes that one node sends to others per step."""
        return self.node_bytes * self.local

    def phases(self) -> dict[str, tuple[int, int]]:
        """Per phase the bytes that one device sends: (within its node, to others)."""
        total: dict[str, tuple[int, int]] = {}
        for hop in self.hops:
            if hop.usual:
                local, node = total.get(hop.phase, (0, 0))
                total[hop.phase] = local + hop.local_bytes, node + hop.node_bytes
        return total

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        totals = ("local_bytes", "node_bytes", "between_nodes")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}

    def __rich__(self) -> RenderableType:
        """Tables of units, of hops and of memory, between the settings and the total."""
        settings = [f"- {setting}" for setting in self.settings]
        tables = (_units_table(self), _hops_table(self), self.memory.table())
        return Rows(*settings, *tables, self.summary())

    def __str__(self) -> str:
        """The same as plain text."""
        return plain_text(self)

    def summary(self) -> str:
        """The total between nodes against M, in a sentence."""
        if self.nodes == 1:
            return "one node: nothing crosses the network"
        share = self.between_nodes / (2 * self.parameters)
        return (
            f"between nodes, per node and step: {size(self.between_nodes)} = {share:.3f} M "
            f"(M = 2 bytes x {self.parameters:,} parameters)"
        )


def plan_state(of: TrainState | Program) -> Plan:
    """What a training step of a state, real or abstract, will hold and send."""
    program = of.program if isinstance(of, TrainState) else of
    return Plan(
        nodes=program.world.nodes,
        local=program.world.local,
        parameters=sum(leaf.count for leaf in program.leaves),
        settings=tuple(_settings(program)),
        units=_units(program),
        hops=_merged(list(_hops(program))),
        memory=predict_memory(program),
    )


def describe(state: TrainState | Program) -> str:
    """The plan of a state as text: ``log.say(plan.describe(state))`` is all that a trainer needs."""
    return str(plan_state(state))


def _settings(program: Program) -> Iterator[str]:
    """What is on, and what has no effect on this mesh."""
    zero, world = program.zero, program.world
    sharded = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, parameters")
    yield f"stage {zero.stage} on {world.nodes} x {world.local} devices; sharded: {sharded[zero.stage]}"
    if zero.accumulate > 1:
        yield f"{zero.accumulate} micro-batches per step"
    if zero.weights_delta:
        resync = f", whole every {zero.delta_resync} steps" if zero.delta_resync else ""
        yield f"weights between nodes: what changed, in {zero.weight_formats[0]}, once per step{resync}"
    elif zero.hpz:
        yield "hpZ: each node keeps a copy for the backward pass"
    if zero.stage >= 2 and zero.node_hop_once:
        yield "gradients between nodes: once per step"
    if zero.grads_hops == 1:
        yield "gradients in one hop, every device to every other"
    if zero.rotation:
        yield f"gradients rotated by a {zero.rotation}-wide Hadamard matrix"
    if zero.rounding == "stochastic":
        yield "gradients rounded stochastically, reproducibly"
    if zero.error_feedback:
        yield "error feedback on the node hop"
    if zero.chunks > 1:
        yield f"gradient hops overlapped in {zero.chunks} chunks"
    if world.nodes == 1:
        named = {"weights": zero.weights, "grads[1]": zero.grads[1]}
        yield f"one node: there is no hop over node{_without_effect(named)}"
    if world.local == 1:
        yield f"one device per node: there is no hop over local{_without_effect({'grads[0]': zero.grads[0]})}"


def _without_effect(named: dict[str, str | None]) -> str:
    """Which of the settings that were made have nothing to do."""
    idle = [f"{name}={value!r}" for name, value in named.items() if value is not None]
    return f"; {', '.join(idle)} without effect" if idle else ""


def _units(program: Program) -> tuple[UnitPlan, ...]:
    """Groups of the same kind taken together."""
    kinds: dict[Any, int] = {}
    for group in program.groups:
        leaves = tuple(
            (_pattern(leaf.path), leaf.shape, _formats(leaf.weights), _formats(leaf.grads))
            for leaf in group.leaves
        )
        name = None if group.unit is None else _pattern(group.unit.split("/"))
        key = name, sum(leaf.size for leaf in group.leaves), leaves
        kinds[key] = kinds.get(key, 0) + (group.layers or 1)
    return tuple(
        UnitPlan(name, copies, elements, tuple(_by_kind(leaves, copies)))
        for (name, elements, leaves), copies in kinds.items()
    )


def _by_kind(leaves: Sequence[Any], copies: int) -> Iterator[LeafPlan]:
    for kind in dict.fromkeys(leaves):
        name, shape, weights, grads = kind
        yield LeafPlan(name, shape, copies * leaves.count(kind), weights, grads)


def _pattern(path: Sequence[str]) -> str:
    return "/".join("*" if part.isdigit() else part for part in path)


def _formats(codecs: tuple[Codec, Codec]) -> tuple[str, str]:
    return codecs[0].fmt, codecs[1].fmt


def _hops(program: Program) -> Iterator[tuple[HopPlan, int]]:
    """Every hop of every leaf, with the number of elements that take it."""
    for group in program.groups:
        for leaf in group.leaves:
            send = _sender(leaf)
            yield from _weight_hops(program, group, leaf, send)
            yield from _gradient_hops(program, leaf, send)


Send = Callable[..., tuple[HopPlan, int]]


def _sender(leaf: Leaf) -> Send:
    """Makes the hops of one leaf."""
    world, layers = leaf.world, leaf.layers or 1

    def send(
        phase: str, axis: str, codec: Codec, *, times: float = 1, elements: int, usual: bool = True
    ) -> tuple[HopPlan, int]:
        row = round(layers * times) * codec.row_bytes(elements)
        to_nodes, to_local = world.nodes - 1, world.local - 1
        node = {"node": to_nodes, "local": 0, "node+local": to_nodes * world.local}[axis]
        local = {"node": 0, "local": to_local, "node+local": to_local}[axis]
        return HopPlan(phase, axis, (codec.fmt,), local * row, node * row, usual), leaf.count

    return send


def _weight_hops(program: Program, group: Group, leaf: Leaf, send: Send) -> Iterator[tuple[HopPlan, int]]:
    zero, route = program.zero, program.route
    over_node, over_local = leaf.weights
    shard, secondary = leaf.shard, leaf.secondary

    def both(phase: str, times: float, *, node: bool) -> Iterator[tuple[HopPlan, int]]:
        if node:
            yield send(phase, "node", over_node, times=times, elements=shard)
        # A secondary row is encoded shard by shard; blocks divide shards, so that the bytes are the same.
        yield send(phase, "local", over_local, times=times, elements=secondary)

    if zero.stage in (1, 2):
        yield from both("weights forward", 1, node=True)
    if zero.stage < 3:
        return
    if zero.weights_delta:
        yield send("delta", "node", over_node, elements=shard)
        if zero.delta_resync:
            yield send("resync", "node", over_local, elements=shard, usual=False)
    micro = zero.accumulate
    yield from both("weights forward", micro, node=route.source == "primary")
    if group.unit is not None:
        yield from both(
            "weights backward", micro * _gathered_again(program, group), node=route.keep == "primary"
        )


def _gathered_again(program: Program, group: Group) -> float:
    """Which part of a group the backward pass gathers: the pipelined stack still has its last layer."""
    pipelined = group.layers is not None and isinstance(program.adapter, NNXAdapter)
    return 1 - 1 / group.layers if pipelined and group.layers else 1


def _gradient_hops(program: Program, leaf: Leaf, send: Send) -> Iterator[tuple[HopPlan, int]]:
    zero, route = program.zero, program.route
    first, second = leaf.grads
    micro = 1 if route.sink == "full" else zero.accumulate
    if zero.grads_hops == 1:
        yield send("gradients", "node+local", second, times=micro, elements=leaf.shard)
    else:
        once = 1 if route.sink == "secondary" else micro
        yield send("gradients", "local", first, times=micro, elements=leaf.secondary)
        yield send("gradients", "node", second, times=once, elements=leaf.shard)
    if zero.stage == 0:
        yield send("gradients", "node", second, elements=leaf.shard)
        yield send("gradients", "local", second, elements=leaf.secondary)


def _merged(hops: list[tuple[HopPlan, int]]) -> tuple[HopPlan, ...]:
    """One per phase and axis, in the order in which they come; hops that send nothing are left out."""
    totals: dict[tuple[str, str, bool], tuple[int, int, dict[str, int]]] = {}
    for hop, elements in hops:
        local, node, formats = totals.get((hop.phase, hop.axis, hop.usual), (0, 0, {}))
        for fmt in hop.formats:
            formats[fmt] = formats.get(fmt, 0) + elements
        sums = local + hop.local_bytes, node + hop.node_bytes, formats
        totals[hop.phase, hop.axis, hop.usual] = sums
    return tuple(
        HopPlan(phase, axis, tuple(sorted(formats, key=lambda fmt: -formats[fmt])), local, node, usual)
        for (phase, axis, usual), (local, node, formats) in totals.items()
        if local or node
    )


def _units_table(plan: Plan) -> Table:
    table = Table(title=f"Units: what is gathered together ({plan.parameters:,} parameters)")
    table.add_column("unit, and its leaves", overflow="fold")
    for name in ("copies", "shape", "elements"):
        table.add_column(name, justify="right")
    for name in ("weights: node", "local", "gradients: local", "node"):
        table.add_column(name)
    for unit in plan.units:
        label = "(outside units)" if unit.name is None else unit.name or "(the model)"
        table.add_row(label, str(unit.copies), "", f"{unit.copies * unit.elements:,}")
        for leaf in unit.leaves:
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            elements = leaf.copies * math.prod(leaf.shape)
            name = leaf.name.removeprefix(f"{unit.name}/")
            table.add_row(f"  {name}", str(leaf.copies), shape, f"{elements:,}", *leaf.weights, *leaf.grads)
        table.add_section()
    return table


def _hops_table(plan: Plan) -> Table:
    table = Table(title="Expected bytes that one device sends per step")
    for name in ("phase", "over", "formats"):
        table.add_column(name)
    for name in ("in the node", "between nodes"):
        table.add_column(name, justify="right")
    for hop in plan.hops:
        sent = [size(hop.local_bytes), size(hop.node_bytes)]
        if not hop.usual:
            sent = [f"({value})" for value in sent]
        table.add_row(hop.phase, hop.axis, ", ".join(hop.formats), *sent)
    table.add_section()
    table.add_row("total", "", "", size(plan.local_bytes), size(plan.node_bytes))
    if not all(hop.usual for hop in plan.hops):
        table.caption = "(in parentheses: not in every step, and in no total)"
    return table
