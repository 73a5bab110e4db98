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
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from zerojax import schedule
from zerojax.errors import ConfigurationError
from zerojax.matmul.replay import scan_counts
from zerojax.schedule.layer_update import LayerState
from zerojax.schedule.origins import MOVES, changed
from zerojax.schedule.sharded import FORWARD_MODE, READ_BY_UNIT, assigned, is_sharded, read_outside
from zerojax.schedule.user_code import line_of_equation
from zerojax.sharding.param_tree import Path

Names = list[str | None]
"""For each value the name of the weight that it belongs to, or None."""
Reads = Counter[str]
"""How often units read the values of a name."""
_RULES = f" at {schedule.__path__[0]}{os.sep}"
"""Where JAX says that the backward rules of units and stacks are."""


def refuse_reads(jaxpr: core.Jaxpr, weights: Mapping[Path, Any]) -> None:
    """Check every use of ``Sharded`` weights in a program.

    ``weights``, the program's first argument, are arrays or ShapeDtypeStructs, or ``Sharded`` values of them.

    Raises:
        ConfigurationError: something computes with a ``Sharded`` weight, or returns it; the message names it.
    """
    names: Names = []
    for weight in jax.tree.leaves(weights, is_leaf=is_sharded):
        names += [weight.leaf.name if is_sharded(weight) else None] * len(jax.tree.leaves(weight))
    names += [None] * (len(jaxpr.invars) - len(names))
    for name in _follow(jaxpr, names)[0]:
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
    names: Names = [followed.get(id(x)) for x in jax.tree.leaves(weights)]
    names += [None] * (len(jaxpr.invars) - len(names))
    reads = _follow(jaxpr, names)[1]
    for stack in stacks.values():
        if not reads[stack]:
            raise ConfigurationError(
                f"the loss does not call the Stack {stack!r}, whose layers are updated in their backward "
                "pass: freeze its weights (ZeroConfig.frozen), or set update_in_backward=False."
            )
        if reads[stack] > 1:
            raise ConfigurationError(
                f"the loss calls the Stack {stack!r} more than once, itself or a copy of it (nnx.clone), or "
                "in a loop or one branch of several, so a layer's gradient is not final in its backward "
                "pass: set update_in_backward=False."
            )


def refuse_assigned(jaxpr: core.Jaxpr, weights: Mapping[Path, Any], replaced: Mapping[Path, Any]) -> None:
    """Check that weights outside units leave a program as they entered it.

    ``weights`` are as for ``refuse_reads``; ``replaced``, the program's last result, are weights that
    transformations have returned, or assignments.

    Raises:
        ConfigurationError: the loss assigned to one; the message names it.
    """
    entered = [keys[0].key for keys, _ in jax.tree_util.tree_leaves_with_path(weights)]
    left = [keys[0].key for keys, _ in jax.tree_util.tree_leaves_with_path(replaced)]
    if paths := changed(jaxpr, entered, left):
        raise ConfigurationError(assigned("/".join(paths[0]), "the loss"))


def _follow(jaxpr: core.Jaxpr, names: Names) -> tuple[Names, Reads]:
    """The names of a jaxpr's results, given those of its arguments, and what units read in it."""
    known = {var: name for var, name in zip(jaxpr.invars, names, strict=True) if name is not None}
    reads: Reads = Counter()
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "custom_lin" and _RULES in params["bwd"].debug_info.func_src_info:
            raise ConfigurationError(FORWARD_MODE)
        given = [None if isinstance(var, core.Literal) else known.get(var) for var in equation.invars]
        if not any(given):
            continue
        if params.get("name") == READ_BY_UNIT:
            reads.update(filter(None, given))
            continue
        results, inside = _results(equation, given)
        known |= {var: name for var, name in zip(equation.outvars, results, strict=True) if name}
        reads += inside
    return [None if isinstance(var, core.Literal) else known.get(var) for var in jaxpr.outvars], reads


def _results(equation: core.JaxprEqn, given: Names) -> tuple[Names, Reads]:
    """As ``_follow``, of one equation; refuses one that computes with a weight."""
    params = equation.params
    match equation.primitive.name:
        case "scan":
            names, reads = _through_loop(params["jaxpr"].jaxpr, given, *scan_counts(equation))
            return names, _times(params["length"], reads)
        case "while":
            test, body = params["cond_nconsts"], params["body_nconsts"]
            carry = given[test + body :]
            _follow(params["cond_jaxpr"].jaxpr, [*given[:test], *carry])
            names, reads = _through_loop(params["body_jaxpr"].jaxpr, given[test:], body, len(carry))
            return names, _times(2, reads)
        case "cond":
            branches, counts = zip(
                *(_follow(branch.jaxpr, given[1:]) for branch in params["branches"]), strict=True
            )
            most, least = functools.reduce(operator.or_, counts), functools.reduce(operator.and_, counts)
            # What some branches do not read is read neither once nor never.
            reads = _times(2, most - least) + least
            return [next(filter(None, names), None) for names in zip(*branches, strict=True)], reads
        case name if name in MOVES:
            return [next(filter(None, given))] * len(equation.outvars), Counter()
    inside = list(core.jaxprs_in_params(params))
    if len(inside) == 1 and len(inside[0].invars) == len(given):
        return _follow(inside[0], given)
    weight = next(filter(None, given))
    where = line_of_equation(equation.source_info)
    raise ConfigurationError(f"{read_outside(weight)} It was read by {equation.primitive.name} at {where}.")


def _times(factor: int, reads: Reads) -> Reads:
    return Counter({name: factor * count for name, count in reads.items()})


def _through_loop(
    body: core.Jaxpr, given: Sequence[str | None], constants: int, carried: int
) -> tuple[Names, Reads]:
    """Follow a loop's body until no more carries turn out to hold a weight."""
    entering = list(given)
    while True:
        leaving, reads = _follow(body, entering)
        held = [a or b for a, b in zip(entering[constants:], leaving[:carried], strict=False)]
        if held == entering[constants : constants + carried]:
            return leaving, reads
        entering[constants : constants + carried] = held
