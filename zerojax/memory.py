"""What one device holds during a training step, by kind, from formulas.

With N parameters on D devices in nodes of L, bf16 compute and Adam, the kinds come to (ZeRO, section 5, with
fp32 sums at the owners)

=========== ============== ============== ================ ====================
stage       master, Adam   gradient sums  weights whole    gradients whole
=========== ============== ============== ================ ====================
0           12 N           in place       2 N              2 N, then the sums
1           12 N / D       4 N / D        2 N              2 N
2           12 N / D       4 N / D        2 N              one unit
3           12 N / D       4 N / D        two units        two units
=========== ============== ============== ================ ====================

and hpZ or delta weights add 2 N / L. Activations are not in it: they are the model's and the batch's.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from zerojax.layout import Leaf
from zerojax.program import Group, Program
from zerojax.report import size
from zerojax.state import abstract_fields

KINDS = {
    "parameters": "fp32 master weights",
    "optimizer": "the optimizer's state",
    "gradients": "sums, where they end up",
    "secondary": "hpZ's or delta's node-local copy",
    "residual": "error feedback",
    "other": "non-parameter state",
    "weights": "gathered: units in use, or all of them",
    "weight gradients": "not yet summed: of units in use, or of all",
}
"""What a device's memory is taken by."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, at the fullest moment of a step.

    Attributes:
        kinds: by ``KINDS``.
    """

    kinds: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.kinds.values())

    @property
    def lasting(self) -> int:
        """What stays from step to step."""
        names = ("parameters", "optimizer", "residual", "other")
        return sum(self.kinds[name] for name in names)

    def table(self) -> Table:
        """By kind, what takes nothing left out."""
        table = Table(title="Memory of one device in a step, without activations")
        table.add_column("kind")
        table.add_column("what it is")
        table.add_column("bytes", justify="right")
        for kind, count in self.kinds.items():
            if count:
                table.add_row(kind, KINDS[kind], size(count))
        table.add_section()
        table.add_row("total", "", size(self.total))
        return table


def predict_memory(program: Program) -> Memory:
    """The memory of a training step of ``program``, without activations."""
    fields = abstract_fields(program)
    kept = {name: _bytes(fields[name]) for name in ("opt_state", "secondary", "residual", "other")}
    return Memory(
        {
            "parameters": _bytes(fields["params"]),
            "optimizer": kept["opt_state"],
            "gradients": _gradients(program),
            "secondary": kept["secondary"] + _hpz_copy(program),
            "residual": kept["residual"],
            "other": kept["other"],
            "weights": _gathered(program, _weight_bytes),
            "weight gradients": _whole_gradients(program),
        }
    )


def _bytes(tree: Any) -> int:
    """Of one device's shards of a tree of arrays or ShapeDtypeStructs."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )


def _layers(leaf: Leaf) -> int:
    return leaf.layers or 1


def _gradients(program: Program) -> int:
    """Sums at the sink, and a second set of them while micro-batches are added up."""
    route = program.route
    if program.zero.stage == 0:
        return 0  # they take the place of the gradients that they are made of
    owned = sum(4 * _layers(leaf) * leaf.shard for leaf in program.leaves)
    if route.sink == "full":
        return owned
    at_sink = owned * (program.world.nodes if route.sink == "secondary" else 1)
    return at_sink * (2 if program.zero.accumulate > 1 else 1)


def _hpz_copy(program: Program) -> int:
    """What the forward pass leaves for the backward pass; of the last layer of a stack, nothing."""
    if (program.route.source, program.route.keep) != ("primary", "secondary"):
        return 0
    return sum(
        _layers(leaf) * program.world.nodes * leaf.weights[1].row_bytes(leaf.shard)
        for group in program.groups
        if group.unit is not None
        for leaf in group.leaves
    )


def _weight_bytes(program: Program, leaf: Leaf) -> int:
    """Of one layer, whole, as it is computed in."""
    return leaf.padded * program.route.weight_dtype(leaf).itemsize


def _gathered(program: Program, of: Any) -> int:
    """Whole at the same time: everything before stage 3; there two units and what belongs to none."""
    if program.zero.stage < 3:
        return sum(_layers(leaf) * of(program, leaf) for leaf in program.leaves)
    rest = sum(of(program, leaf) for group in program.groups if group.unit is None for leaf in group.leaves)
    return rest + sum(_largest_units(program, of, 2))


def _whole_gradients(program: Program) -> int:
    """Before they are summed: of all parameters at stages 0 and 1, else of units in flight."""
    if program.route.sink == "full":
        item = jnp.dtype(program.route.grad_dtype).itemsize
        every = sum(leaf.count * item for leaf in program.leaves)
        return every * (2 if program.zero.accumulate > 1 else 1)
    if program.zero.stage == 3:
        return _gathered(program, _weight_bytes)
    rest = [leaf for group in program.groups if group.unit is None for leaf in group.leaves]
    return sum(_weight_bytes(program, leaf) for leaf in rest) + sum(_largest_units(program, _weight_bytes, 1))


def _largest_units(program: Program, of: Any, count: int) -> list[int]:
    """Bytes of the ``count`` largest neighbouring units."""

    def whole(group: Group) -> int:
        return sum(of(program, leaf) for leaf in group.leaves)

    units = [
        whole(group) for group in program.groups if group.unit is not None for _ in range(group.layers or 1)
    ]
    return sorted(units, reverse=True)[:count]
