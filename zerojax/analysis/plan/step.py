"""The plan printed at the start of a run: formulas for the memory and communication of a step.

Planning traces and compiles nothing. ``comm_report`` counts the same bytes in the traced program, and the
tests compare the two.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Group as Rows
from rich.console import RenderableType

from zerojax.analysis.plan.hops import ByLink, HopPlan, hops_of, hops_table, usual_bytes
from zerojax.analysis.plan.memory import PredictedMemory, predict_memory
from zerojax.analysis.plan.units import (
    Fp8Plan,
    UnitPlan,
    fp8_of,
    fp8_table,
    settings_of,
    units_of,
    units_table,
)
from zerojax.formatting import plain_text, size
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState


@dataclass(frozen=True)
class Plan:
    """The sharding, memory and communication of a training step; ``print`` it.

    Attributes:
        nodes: extent of the mesh over ``node``.
        local: extent of the mesh over ``local``.
        parameters: number of elements of the model's parameters.
        settings: the options that differ from plain ZeRO-3, and their effect on this mesh.
        units: the model's units, whose weights are gathered together.
        fp8: the weights with matmuls in fp8, and the other ones; None without fp8.
        hops: the step's hops. Left out are sums of losses and model state, and scales of fp8 weights: a few
            bytes.
        memory: one device's memory by kind, without activations.
    """

    nodes: int
    local: int
    parameters: int
    settings: tuple[str, ...]
    units: tuple[UnitPlan, ...]
    fp8: Fp8Plan | None
    hops: tuple[HopPlan, ...]
    memory: PredictedMemory

    @property
    def local_bytes(self) -> int:
        """Bytes that one device sends within its node per step."""
        return usual_bytes(self.hops).local

    @property
    def node_bytes(self) -> int:
        """Bytes that one device sends to other nodes per step."""
        return usual_bytes(self.hops).node

    @property
    def between_nodes(self) -> int:
        """Bytes that one node sends to others per step."""
        return self.node_bytes * self.local

    def phases(self) -> dict[str, ByLink[int]]:
        """For each phase the bytes that one device sends."""
        phases = dict.fromkeys(hop.phase for hop in self.hops if hop.usual)
        return {phase: usual_bytes([hop for hop in self.hops if hop.phase == phase]) for phase in phases}

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        totals = ("local_bytes", "node_bytes", "between_nodes")
        found = dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}
        return found if self.fp8 is None else found | {"fp8": self.fp8.to_dict()}

    def __rich__(self) -> RenderableType:
        settings = [f"- {setting}" for setting in self.settings]
        fp8 = () if self.fp8 is None else (fp8_table(self.fp8),)
        tables = (units_table(self.units, self.parameters), *fp8, hops_table(self.hops), self.memory.table())
        return Rows(*settings, *tables, self.summary())

    def __str__(self) -> str:
        return plain_text(self)

    def summary(self) -> str:
        """The total between nodes as a multiple of M, in a sentence."""
        if self.nodes == 1:
            return "one node: nothing crosses the network"
        share = self.between_nodes / (2 * self.parameters)
        return (
            f"between nodes, per node and step: {size(self.between_nodes)} = {share:.4g} M "
            f"(M = 2 bytes x {self.parameters:,} parameters)"
        )


def plan_state(of: TrainState | TrainSpec) -> Plan:
    """Plan the training step of a filled or abstract state, or of its spec."""
    spec = of.spec if isinstance(of, TrainState) else of
    return Plan(
        nodes=spec.world.nodes,
        local=spec.world.local,
        parameters=sum(leaf.count for leaf in (*spec.leaves, *spec.frozen)),
        settings=tuple(settings_of(spec)),
        units=units_of(spec),
        fp8=fp8_of(spec),
        hops=hops_of(spec),
        memory=predict_memory(spec),
    )


def describe_plan(state: TrainState | TrainSpec) -> str:
    """The plan of a state's training step as text, for a log."""
    return str(plan_state(state))
