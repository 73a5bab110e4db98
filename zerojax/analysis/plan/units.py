"""The units of a plan with their leaves, wire formats and fp8 matmuls, and the effect of the options."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Column, Table

from zerojax.formatting import numeric
from zerojax.sharding.fragments import Fragments
from zerojax.sharding.layout import ParamLayout
from zerojax.train.spec import TrainSpec


@dataclass(frozen=True)
class LeafPlan:
    """Leaves of one kind: the same in every layer, or in every unit of the same kind.

    Attributes:
        name: their path, with numbers replaced by "*".
        shape: of one leaf.
        copies: number of leaves.
        weights: wire formats of the weights over ``node`` and over ``local``. With local updates the first is
            the format of the outer weights' change.
        grads: wire formats of the gradients over ``local`` and over ``node``. With local updates the second
            is the format of a node's change of a fragment.
        left_out: why their matmuls are not in fp8; None if they are.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    weights: tuple[str, str]
    grads: tuple[str, str]
    left_out: str | None

    @property
    def elements(self) -> int:
        """The number of elements of all these leaves."""
        return self.copies * math.prod(self.shape)


@dataclass(frozen=True)
class UnitPlan:
    """Units of one kind.

    Attributes:
        name: their path, with numbers replaced by "*"; None for leaves outside units, which are gathered at
            the start of the pass.
        copies: number of units, counting each layer of a stack.
        elements: number of elements of one unit.
        leaves: the leaves of all these units.
    """

    name: str | None
    copies: int
    elements: int
    leaves: tuple[LeafPlan, ...]


@dataclass(frozen=True)
class Fp8Plan:
    """The weights of a model, where ``ZeroConfig.matmul_dtype`` is "fp8".

    Attributes:
        rows: every kind of weight, in the model's order.
        in_units: number of elements of all units.
    """

    rows: tuple[LeafPlan, ...]
    in_units: int

    @property
    def chosen(self) -> tuple[LeafPlan, ...]:
        """The kinds with matmuls in fp8."""
        return tuple(row for row in self.rows if row.left_out is None)

    @property
    def weights(self) -> int:
        """The number of weights with matmuls in fp8, layers included."""
        return sum(row.copies for row in self.chosen)

    @property
    def share(self) -> float:
        """The share of the units' elements with matmuls in fp8."""
        return sum(row.elements for row in self.chosen) / max(1, self.in_units)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return dataclasses.asdict(self) | {"weights": self.weights, "share": self.share}


def settings_of(spec: TrainSpec) -> Iterator[str]:
    """Sentences about the options in effect, and about options without effect on this mesh."""
    zero, world = spec.zero, spec.world
    sharded = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, parameters")
    where = "within each node of" if zero.every else "on"
    mesh = f"{world.nodes} x {world.local} devices"
    yield f"stage {zero.stage} {where} {mesh}; sharded: {sharded[zero.stage]}"
    if zero.every:
        yield (
            f"local updates: each node trains its own weights, and exchanges 1/{zero.every} of its changes "
            f"in each step; delay {zero.outer_delay}, mixing {zero.outer_mixing:g}"
        )
    if zero.accumulate > 1:
        breadth = zero.accumulate_order == "breadth"
        yield f"{zero.accumulate} micro-batches per step{', all through a unit before the next' * breadth}"
    if zero.weights_delta:
        resync = f", whole every {zero.delta_resync} steps" if zero.delta_resync else ""
        yield f"weights between nodes: their change, in {zero.weight_formats.node}, once per step{resync}"
    elif zero.hpz:
        yield "hpZ: each node keeps the gathered weights for the backward pass"
    if zero.stage >= 2 and zero.node_hop_once and not zero.every:
        yield "gradients between nodes: once per step"
    if zero.grads_hops == 1:
        yield "gradients in one hop, from every device to every other"
    quantized = "the nodes' changes" if zero.every else "gradients"
    if zero.rotation:
        yield f"{quantized} rotated by a {zero.rotation}-wide Hadamard matrix"
    if zero.rounding == "stochastic":
        yield f"{quantized} rounded stochastically, reproducibly"
    if zero.error_feedback:
        yield "error feedback on the node hop"
    if zero.host:
        yield f"in host memory: {', '.join(zero.host)}"
    if zero.update_in_backward:
        yield "layers of stacks updated in the backward pass"
    if spec.frozen:
        frozen, own = (sum(leaf.count for leaf in leaves) for leaves in (spec.frozen, spec.leaves))
        formats = ", ".join(dict.fromkeys(leaf.weights.local.fmt for leaf in spec.frozen))
        where = "each node" if spec.strategy.frozen == "secondary" else "all nodes together"
        yield f"frozen: {frozen:,} of {frozen + own:,} parameters, stored once in {where}, in {formats}"
    if experts := [p for p in spec.adapter.parameters if p.of_experts]:
        count, parts = experts[0].shape[0], {leaf.parts for leaf in (*spec.leaves, *spec.frozen)} - {1}
        if parts:
            yield (
                f"experts: {count // max(parts)} of {count} on each device of a node, which gets the node's "
                "tokens for them; their weights and gradients do not travel within a node"
            )
        elif world.local > 1:
            yield f"experts: all {count} gathered for every device, like other weights"
    if spec.lora is not None:
        pieces = [
            spec.lora.pieces_of(leaf.name, leaf.shape[-1])
            for leaf in spec.frozen
            if leaf.path in spec.adapters
        ]
        kinds = dict.fromkeys(f"of rank {one.rank}, scaled by {one.scale:g}" for own in pieces for one in own)
        yield f"trained: low-rank adapters {'; '.join(kinds)}"
    if zero.matmul_dtype == "fp8":
        yield "matmuls with weights of units: in fp8, forward and backward"
    if zero.chunks > 1:
        yield f"gradient hops overlapped in {zero.chunks} chunks"
    if world.nodes == 1:
        named = {"weights": zero.weights, "grads[1]": zero.grads[1]}
        yield f"one node: no hop over node{_without_effect(named)}"
    if world.local == 1:
        yield f"one device per node: no hop over local{_without_effect({'grads[0]': zero.grads[0]})}"


def _without_effect(named: Mapping[str, str | None]) -> str:
    """A remark that these settings have no effect; "" if all are None."""
    idle = [f"{name}={value!r}" for name, value in named.items() if value is not None]
    return f"; {', '.join(idle)} without effect" if idle else ""


def units_of(spec: TrainSpec) -> tuple[UnitPlan, ...]:
    """The groups of a train spec; equal groups are merged."""
    kinds: dict[Any, int] = {}
    for group in spec.groups:
        leaves = tuple(
            (
                kind_of(leaf.path),
                leaf.shape,
                (_over_node(spec, leaf), leaf.weights.local.fmt),
                ("", "") if leaf.frozen else (leaf.grads.local.fmt, leaf.grads.node.fmt),
                spec.zero.without_fp8(leaf.name, leaf.shape, group.unit, of_experts=leaf.of_experts),
            )
            for leaf in group.every
        )
        name = None if group.unit is None else kind_of(group.unit.split("/"))
        key = name, sum(leaf.size for leaf in group.every), leaves
        kinds[key] = kinds.get(key, 0) + (group.layers)
    return tuple(
        UnitPlan(name, copies, elements, tuple(_by_kind(leaves, copies)))
        for (name, elements, leaves), copies in kinds.items()
    )


def _over_node(spec: TrainSpec, leaf: ParamLayout) -> str:
    """The wire format of a weight between nodes; "" if it stays in the node."""
    if leaf.frozen:
        return "" if spec.strategy.frozen == "secondary" else leaf.weights.node.fmt
    return Fragments.of(spec.zero, leaf).change.fmt if spec.zero.every else leaf.weights.node.fmt


def _by_kind(leaves: Sequence[Any], copies: int) -> Iterator[LeafPlan]:
    for kind in dict.fromkeys(leaves):
        name, shape, *others = kind
        yield LeafPlan(name, shape, copies * leaves.count(kind), *others)


def fp8_of(spec: TrainSpec) -> Fp8Plan | None:
    """The weights of a train spec by kind; None without fp8."""
    if spec.zero.matmul_dtype != "fp8":
        return None
    units = units_of(spec)
    in_units = sum(unit.copies * unit.elements for unit in units if unit.name is not None)
    return Fp8Plan(tuple(leaf for unit in units for leaf in unit.leaves), in_units)


def kind_of(path: Sequence[str]) -> str:
    """A path, joined by "/", with numbers replaced by "*"."""
    return "/".join("*" if part.isdigit() else part for part in path)


def units_table(units: Sequence[UnitPlan], parameters: int) -> Table:
    """Units and leaves with their formats. The title has the number of the model's ``parameters``."""
    table = Table(
        Column("unit, and its leaves", overflow="fold"),
        *numeric("copies", "shape", "elements"),
        *("weights: node", "local", "gradients: local", "node"),
        title=f"Units: weights gathered together ({parameters:,} parameters)",
    )
    for unit in units:
        label = "(outside units)" if unit.name is None else unit.name or "(the model)"
        table.add_row(label, str(unit.copies), "", f"{unit.copies * unit.elements:,}")
        for leaf in unit.leaves:
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            name = leaf.name.removeprefix(f"{unit.name}/")
            table.add_row(
                f"  {name}", str(leaf.copies), shape, f"{leaf.elements:,}", *leaf.weights, *leaf.grads
            )
        table.add_section()
    return table


def fp8_table(plan: Fp8Plan) -> Table:
    """The weights with matmuls in fp8, then the other weights by reason."""
    title = f"Matmuls in fp8: {plan.weights} weights, {plan.share:.2%} of the units' parameters"
    table = Table("", Column("weights", overflow="fold"), *numeric("copies", "elements"), title=title)
    for why in dict.fromkeys([None, *(row.left_out for row in plan.rows)]):
        same = [row for row in plan.rows if row.left_out == why]
        table.add_row(
            "in fp8" if why is None else f"left out: {why}",
            ", ".join(dict.fromkeys(row.name for row in same)),
            str(sum(row.copies for row in same)),
            f"{sum(row.elements for row in same):,}",
        )
    return table
