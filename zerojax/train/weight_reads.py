"""Refuses a loss that reads a unit's weights outside a call of the unit, or assigns to weights.

In the model's tree a unit's parameters are ``Sharded`` values, whose arrays are shards, zeros and random
seeds. Code that walks the tree (``nnx.state(model, nnx.Param)``, ``module.variables["params"]``, an optax
norm) would compute with those. The tree itself cannot prevent it, since transformations have to slice, stack
and pass on the same arrays. So the traced program is checked: only a unit, which marks them by
``zerojax.schedule.sharded.read_by_unit``, may use the arrays of a ``Sharded`` value.
"""

import functools
import operator
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from zerojax import schedule
from zerojax.dataflow import MOVES, Analysis, changed, equations_within
from zerojax.errors import ConfigurationError
from zerojax.schedule.layer_update import LayerState
from zerojax.schedule.sharded import FORWARD_MODE, READ_BY_UNIT, assigned, is_sharded, read_outside
from zerojax.schedule.user_code import line_of_equation
from zerojax.sharding.param_tree import Path

_RULES = f" at {schedule.__path__[0]}{os.sep}"
"""Where JAX says that the backward rules of units and stacks are."""


def refuse_reads(jaxpr: core.Jaxpr, weights: Mapping[Path, Any]) -> None:
    """Check every use of ``Sharded`` weights in a program.

    ``weights``, the program's first argument, are arrays or ShapeDtypeStructs, or ``Sharded`` values of them.

    Raises:
        ConfigurationError: something computes with a ``Sharded`` weight, or returns it; the message names it.
    """
    names: list[str | None] = []
    for weight in jax.tree.leaves(weights, is_leaf=is_sharded):
        names += [weight.leaf.name if is_sharded(weight) else None] * len(jax.tree.leaves(weight))
    names += [None] * (len(jaxpr.invars) - len(names))
    if any(map(_of_forward_mode, equations_within(jaxpr))):
        raise ConfigurationError(FORWARD_MODE)
    for name in _Names(Counter()).follow(jaxpr, names):
        if name is not None:
            raise ConfigurationError(f"{read_outside(name)} It was returned by the loss function.")


def refuse_calls(jaxpr: core.Jaxpr, weights: Mapping[Path, Any], stacks: Mapping[Path, str]) -> None:
    """Check that a program calls once, on every way through it, each stack that its backward pass updates.

    ``weights`` are as for ``refuse_reads``; ``stacks`` has the names of such stacks, by the path of one
    weight of each.

    Raises:
        ConfigurationError: it does not; the message names the stack.
    """
    held = filter(is_sharded, jax.tree.leaves(weights, is_leaf=is_sharded))
    parts = [part for weight in held for part in (weight, *weight.adapter) if part.leaf.path in stacks]
    # Of each stack one array is followed: a call reads all of them, some more than once.
    sinks = {stacks[part.leaf.path]: part.sink for part in parts}
    followed = {id(sink.squares): stack for stack, sink in sinks.items() if isinstance(sink, LayerState)}
    names: list[str | None] = [followed.get(id(x)) for x in jax.tree.leaves(weights)]
    names += [None] * (len(jaxpr.invars) - len(names))
    analysis = _Names(Counter())
    analysis.follow(jaxpr, names)
    for stack in stacks.values():
        if not analysis.state[stack]:
            raise ConfigurationError(
                f"the loss does not call the Stack {stack!r}, whose layers are updated in their backward "
                "pass: freeze its weights (ZeroConfig.frozen), or set update_in_backward=False."
            )
        if analysis.state[stack] > 1:
            raise ConfigurationError(
                f"the loss calls the Stack {stack!r} more than once (a copy by nnx.clone counts), or in a "
                "loop or one branch of several. A layer's gradient is then not final in its backward "
                "pass: set update_in_backward=False."
            )


def refuse_assigned(jaxpr: core.Jaxpr, weights: Mapping[Path, Any], replaced: Mapping[Path, Any]) -> None:
    """Refuse a program that changes weights outside units.

    ``weights`` are as for ``refuse_reads``; ``replaced``, the program's last result, are weights that
    transformations have returned, or assignments.

    Raises:
        ConfigurationError: the loss assigned to one; the message names it.
    """
    entered = [keys[0].key for keys, _ in jax.tree_util.tree_leaves_with_path(weights)]
    left = [keys[0].key for keys, _ in jax.tree_util.tree_leaves_with_path(replaced)]
    if paths := changed(jaxpr, entered, left):
        raise ConfigurationError(assigned("/".join(paths[0]), "the loss"))


def _of_forward_mode(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a forward-mode derivative of a unit or a stack."""
    return (
        equation.primitive.name == "custom_lin" and _RULES in equation.params["bwd"].debug_info.func_src_info
    )


class _Names(Analysis[str | None, Counter[str]]):
    """For each value the name of its weight, or None; and the number of reads of weights by each unit."""

    nothing = None

    def join(self, values: Iterable[str | None]) -> str | None:
        return next(filter(None, values), None)

    def step(self, equation: core.JaxprEqn, given: list[str | None]) -> list[str | None]:
        name, weight = equation.primitive.name, self.join(given)
        if equation.params.get("name") == READ_BY_UNIT:
            self.state = self.state + Counter(filter(None, given))
            weight = None
        if weight is None or name in MOVES:
            return given if name == "optimization_barrier" else [weight] * len(equation.outvars)
        where = line_of_equation(equation.source_info)
        raise ConfigurationError(f"{read_outside(weight)} It was read by {name} at {where}.")

    def merged(self, states: Sequence[Counter[str]]) -> Counter[str]:
        most, least = functools.reduce(operator.or_, states), functools.reduce(operator.and_, states)
        # What some branches do not read is read neither once nor never.
        return least + _times(2, most - least)

    def repeated(self, equation: core.JaxprEqn, before: Counter[str]) -> Counter[str]:
        rounds = {"while": 2, "scan": equation.params.get("length", 1)}.get(equation.primitive.name, 1)
        return before + _times(rounds, self.state - before)


def _times(factor: int, reads: Counter[str]) -> Counter[str]:
    return Counter({name: factor * count for name, count in reads.items()})
