"""Refuses a loss that reads a unit's weights outside a call of the unit, or assigns to weights.

In the model's tree a unit's parameters are ``Sharded`` values, whose arrays are shards, zeros and random
seeds. Code that walks the tree (``nnx.state(model, nnx.Param)``, ``module.variables["params"]``, an optax
norm) would compute with those. The tree itself cannot prevent it, since transformations have to slice, stack
and pass on the same arrays. So the traced program is checked: only a unit, which marks them by
``zerojax.schedule.sharded.read_by_unit``, may use the arrays of a ``Sharded`` value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from zerojax.errors import ConfigurationError
from zerojax.matmul.replay import scan_counts
from zerojax.schedule.origins import MOVES, changed
from zerojax.schedule.sharded import FORWARD_MODE, READ_BY_UNIT, assigned, is_sharded, read_outside
from zerojax.schedule.user_code import line_of_equation
from zerojax.sharding.param_tree import Path

Names = list[str | None]
"""For each value the name of the weight that it belongs to, or None."""


def refuse_reads(jaxpr: core.Jaxpr, weights: Mapping[Path, Any]) -> None:
    """Check every use of ``Sharded`` weights in a program.

    Args:
        jaxpr: of a program whose first argument is ``weights``.
        weights: arrays or ShapeDtypeStructs, or ``Sharded`` values of them.

    Raises:
        ConfigurationError: something computes with a ``Sharded`` weight, or returns it; the message names it.
    """
    names: Names = []
    for weight in jax.tree.leaves(weights, is_leaf=is_sharded):
        names += [weight.leaf.name if is_sharded(weight) else None] * len(jax.tree.leaves(weight))
    names += [None] * (len(jaxpr.invars) - len(names))
    for name in _follow(jaxpr, names):
        if name is not None:
            raise ConfigurationError(f"{read_outside(name)} It was returned by the loss function.")


def refuse_assigned(jaxpr: core.Jaxpr, weights: Mapping[Path, Any], replaced: Mapping[Path, Any]) -> None:
    """Check that weights outside units leave a program as they entered it.

    Args:
        jaxpr: of a program whose first argument is ``weights``, and whose last result is ``replaced``.
        weights: as for ``refuse_reads``.
        replaced: arrays or ShapeDtypeStructs of weights that transformations have returned, or assignments.

    Raises:
        ConfigurationError: the loss assigned to one; the message names it.
    """
    entered = [keys[0].key for keys, _ in jax.tree_util.tree_leaves_with_path(weights)]
    left = [keys[0].key for keys, _ in jax.tree_util.tree_leaves_with_path(replaced)]
    if paths := changed(jaxpr, entered, left):
        raise ConfigurationError(assigned("/".join(paths[0]), "the loss"))


def _follow(jaxpr: core.Jaxpr, names: Names) -> Names:
    """The names of a jaxpr's results, given those of its arguments."""
    known = {var: name for var, name in zip(jaxpr.invars, names, strict=True) if name is not None}
    for equation in jaxpr.eqns:
        given = [None if isinstance(var, core.Literal) else known.get(var) for var in equation.invars]
        if any(given) and equation.params.get("name") != READ_BY_UNIT:
            results = _results(equation, given)
            known |= {var: name for var, name in zip(equation.outvars, results, strict=True) if name}
    return [None if isinstance(var, core.Literal) else known.get(var) for var in jaxpr.outvars]


def _results(equation: core.JaxprEqn, given: Names) -> Names:
    """The names of an equation's results; refuses an equation that computes with a weight."""
    params = equation.params
    match equation.primitive.name:
        case "scan":
            return _through_loop(params["jaxpr"].jaxpr, given, *scan_counts(equation))
        case "while":
            test, body = params["cond_nconsts"], params["body_nconsts"]
            carry = given[test + body :]
            _follow(params["cond_jaxpr"].jaxpr, [*given[:test], *carry])
            return _through_loop(params["body_jaxpr"].jaxpr, given[test:], body, len(carry))
        case "cond":
            results = [_follow(branch.jaxpr, given[1:]) for branch in params["branches"]]
            return [next(filter(None, names), None) for names in zip(*results, strict=True)]
        case "custom_lin":
            raise ConfigurationError(FORWARD_MODE)
        case name if name in MOVES:
            return [next(filter(None, given))] * len(equation.outvars)
    inside = list(core.jaxprs_in_params(params))
    if len(inside) == 1 and len(inside[0].invars) == len(given):
        return _follow(inside[0], given)
    weight = next(filter(None, given))
    where = line_of_equation(equation.source_info)
    raise ConfigurationError(f"{read_outside(weight)} It was read by {equation.primitive.name} at {where}.")


def _through_loop(body: core.Jaxpr, given: Sequence[str | None], constants: int, carried: int) -> Names:
    """Follow a loop's body until no more carries turn out to hold a weight."""
    entering = list(given)
    while True:
        leaving = _follow(body, entering)
        held = [a or b for a, b in zip(entering[constants:], leaving[:carried], strict=False)]
        if held == entering[constants : constants + carried]:
            return leaving
        entering[constants : constants + carried] = held
