"""The weights with matmuls in fp8, and why other weights have none."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.table import Column, Table

from zerojax.analysis.plan.units import kind_of
from zerojax.formatting import numeric
from zerojax.train.spec import TrainSpec


@dataclass(frozen=True)
class Fp8Row:
    """Weights of one kind: the same in every layer, or in every unit of the same kind.

    Attributes:
        name: their path, with numbers replaced by "*".
        shape: of one weight.
        copies: number of weights, layers included.
        elements: number of elements of all these weights.
        left_out: why their matmuls are not in fp8; None if they are.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    elements: int
    left_out: str | None


@dataclass(frozen=True)
class Fp8Plan:
    """The weights of a model, where ``ZeroConfig.matmul_dtype`` is "fp8".

    Attributes:
        rows: every kind of weight, in the model's order.
        in_units: number of elements of all units.
    """

    rows: tuple[Fp8Row, ...]
    in_units: int

    @property
    def chosen(self) -> tuple[Fp8Row, ...]:
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


def fp8_of(spec: TrainSpec) -> Fp8Plan | None:
    """The weights of a train spec by kind; None without fp8."""
    if spec.zero.matmul_dtype != "fp8":
        return None
    kinds: dict[tuple[str, tuple[int, ...], str | None], int] = {}
    for group in spec.groups:
        for leaf in group.every:
            why = spec.zero.without_fp8(leaf.name, leaf.shape, group.unit, of_experts=leaf.of_experts)
            key = kind_of(leaf.path), leaf.shape, why
            kinds[key] = kinds.get(key, 0) + leaf.layers
    sizes = {(kind_of(leaf.path), leaf.shape): leaf.size for leaf in (*spec.leaves, *spec.frozen)}
    rows = tuple(
        Fp8Row(name, shape, copies, copies * sizes[name, shape], why)
        for (name, shape, why), copies in kinds.items()
    )
    return Fp8Plan(rows, sum(leaf.count for group in spec.unit_groups for leaf in group.every))


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
