"""Checks of a traced pass, before it is differentiated or compiled.

**Reads of weights.** In the model's tree a unit's parameters are ``Sharded`` values, whose arrays are shards,
zeros and random seeds. Code that walks the tree (``nnx.state(model, nnx.Param)``,
``module.variables["params"]``, an optax norm) would compute with those. The tree itself cannot prevent it,
since transformations have to slice, stack and pass on the same arrays. So the traced program is checked, in
which weights have checkpoint names: only a unit, which marks them by ``READ_BY_UNIT``, may use the
arrays of a ``Sharded`` value.

**Branches.** A unit's weights are gathered from all devices. If a device does not take the branch that calls
the unit, or leaves a loop before the others, the others wait for it forever. So the condition of such a
branch has to be equal on the devices that a collective within it joins. The traced program is followed for
values that differ: a device's rows of the batch, its number and its random bits, and everything computed from
them. They are equal again once they are summed or gathered over the mesh.

**Shared rows.** If devices share rows, the program is also followed for values that differ within a row:
parts of its tokens, and random bits. A part cannot be divided again, and a loss of whole rows needs whole
rows. A layer that mixes tokens takes a part of a result that it has computed from whole rows. The loss has to
take parts, and something in the model has to bring the parts of a row together.
"""

import dataclasses
import functools
import itertools
import operator
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
from jax.extend import core
from jaxtyping import PyTree

from zerojax import schedule
from zerojax.adapters.loss import ATTENDED, IN_ORDER, OWN_TOKENS, WHOLE_ROWS
from zerojax.comm.in_order import collective_axes
from zerojax.dataflow import MOVES, Analysis, equations_within
from zerojax.errors import ConfigurationError
from zerojax.schedule.unit import CALLED, READ_BY_UNIT, SHARDED, WHOLE
from zerojax.schedule.user_code import FORWARD_MODE, assigned, line_of_equation, read_outside
from zerojax.sharding.mesh import AXES, BY_ROWS, LOCAL
from zerojax.sharding.param_tree import Path
from zerojax.sharding.strategy import DIFFERING
from zerojax.train.batch import Batch, batch_specs
from zerojax.train.model_pass import RETURNED, ModelPass, Outcome
from zerojax.train.spec import TrainSpec
from zerojax.weights import Weight

_RULES = f" at {schedule.__path__[0]}{os.sep}"
"""Where JAX says that the backward rules of units and stacks are, also in their forward-mode derivatives."""
Axes = frozenset[str]
"""The mesh axes along which a value differs between devices, or over which a collective joins them.

``ROW`` may be among them."""
ROW = "row"
"""In place of an axis, for values that differ between the devices that share a row."""
_JOINED = "joined"
"""In place of an axis, for values computed from rows that ``whole_rows`` has put together."""

_NONE: Axes = frozenset()
_EQUALISING = frozenset({"all_gather", "all_gather_invariant", "pmax", "pmin", "psum", "psum_invariant"})
_BRANCHES = {"cond": "jax.lax.cond or switch", "while": "jax.lax.while_loop"}


def check_program(model: ModelPass, batch: Batch, program: jax.stages.Traced) -> Outcome[PyTree[Axes]]:
    """Refuse a pass that reads weights of units outside their calls, assigns to weights, calls units on some
    devices only, or shares rows in part.

    Args:
        model: as the pass begins.
        batch: of the first micro-batch, if there are several passes.
        program: a function of the model, the batch and a seed. Its results begin with an ``Outcome``.

    Returns:
        For each array of the outcome the axes along which it differs; see ``Branches.refuse_divergent``.
    """
    spec, train, jaxpr = model.spec, model.train, program.jaxpr.jaxpr
    calls = refuse_reads(program)
    if model.rule is not None:
        refuse_calls(calls, spec)
    devices, mesh = spec.zero.sequence_parallel, frozenset(spec.axes)
    if devices > 1:
        refuse_unshared(jaxpr, devices)
    branches = Branches(
        mesh | {ROW} if devices > 1 else mesh, spec.strategy.backward_axes & mesh if train else _NONE
    )
    state = dict.fromkeys(model.model_state, _NONE)
    while True:
        axes = branches.refuse_divergent(jaxpr, _differing(model, batch, state))
        found: Outcome[PyTree[Axes]] = jax.tree.unflatten(jax.tree.structure(program.out_info), axes)[0]
        after = state | found.model_state
        if spec.zero.passes == 1 or not train or after == state:
            if devices > 1:
                refuse_unmixed(jaxpr, devices, branches.mixed)
            return found
        state = after  # the next micro-batch begins with it


def _differing(model: ModelPass, batch: Batch, state: Mapping[str, Axes]) -> list[Axes]:
    """The mesh axes along which the arguments of a program differ between devices; a seed does not."""
    equal = jax.tree.map(lambda _: _NONE, model)
    weights: dict[Path, Weight] = {}
    for path, weight in model.given.weights.items():
        in_part = weight.layout.parts > 1 if weight.level == "full" else weight.layout.in_every_node
        axes = DIFFERING["secondary" if in_part else weight.level]
        scale = None if weight.scale is None else _NONE  # equal everywhere
        differing = jax.tree.map(lambda _, axes=axes: axes, weight)
        weights[path] = dataclasses.replace(differing, scale=scale)
    given = equal.given._replace(weights=weights)
    rows = jax.tree.map(lambda to: frozenset(AXES) if to == BY_ROWS else _NONE, batch_specs(batch))
    return jax.tree.leaves((dataclasses.replace(equal, given=given, model_state=state), rows, _NONE))


def refuse_reads(program: jax.stages.Traced) -> Counter[str]:
    """Check every use of weights in a pass.

    Returns:
        The number of calls of stacks; see ``_Labels``.

    Raises:
        ConfigurationError: something computes with a ``Sharded`` weight, or returns it; the pass has assigned
            to a whole weight; or it takes forward-mode derivatives through a unit.
    """
    jaxpr = program.jaxpr.jaxpr
    derivatives = (one for one in equations_within(jaxpr) if one.primitive.name == "custom_lin")
    if any(_RULES in one.params["bwd"].debug_info.func_src_info for one in derivatives):
        raise ConfigurationError(FORWARD_MODE)
    analysis = _Labels(Counter())
    labels = analysis.follow(jaxpr, [None] * len(jaxpr.invars))
    outcome: Outcome[PyTree[str]] = jax.tree.unflatten(jax.tree.structure(program.out_info), labels)[0]
    for path, label in outcome.replaced.items():
        if label != WHOLE + "/".join(path):
            raise ConfigurationError(assigned("/".join(path), "the loss"))
    return analysis.state


def refuse_calls(calls: Counter[str], spec: TrainSpec) -> None:
    """Refuse a pass that does not call, on every way through it, each stack that is updated there once.

    Args:
        calls: as ``refuse_reads`` returns them.
        spec: the train spec.

    Raises:
        ConfigurationError: naming the stack.
    """
    for group in spec.updated_in_backward:
        stack, count = group.unit, sum(calls[CALLED + leaf.name] for leaf in group.leaves)
        if not count:
            raise ConfigurationError(
                f"the loss does not call the Stack {stack!r}, whose layers are updated in their backward "
                "pass: freeze its weights (ZeroConfig.frozen), or set update_in_backward=False."
            )
        if count > 1:
            raise ConfigurationError(
                f"the loss calls the Stack {stack!r} more than once (a copy by nnx.clone counts), or in a "
                "loop or one branch of several. A layer's gradient is then not final in its backward "
                "pass: set update_in_backward=False."
            )


class _Labels(Analysis[str | None, Counter[str]]):
    """Weights by their ``checkpoint_name`` in the model, as long as they are only moved.

    For each value the name of its weight, or None for all others; and the number of calls of stacks that the
    backward pass updates. ``Sharded`` weights that anything but a unit reads are refused.
    """

    nothing = None

    def join(self, values: Iterable[str | None]) -> str | None:
        distinct = set(values)
        sharded = sorted(label for label in distinct if label and label.startswith(SHARDED))
        return sharded[0] if sharded else distinct.pop() if len(distinct) == 1 else None

    def step(self, equation: core.JaxprEqn, given: list[str | None]) -> list[str | None]:
        primitive, name = equation.primitive.name, str(equation.params.get("name"))
        if primitive == "optimization_barrier":
            return given
        if name.startswith((SHARDED, WHOLE)):
            return [name]
        if name.startswith(CALLED):
            self.state = self.state + Counter([name])
        sharded = self.join(label for label in given if label and label.startswith(SHARDED))
        if primitive in MOVES:
            return [sharded or given[0]] * len(equation.outvars)
        if sharded and name != READ_BY_UNIT:
            where = f"read by {primitive} at {line_of_equation(equation.source_info)}"
            where = "returned by the loss function" if name == RETURNED else where
            raise ConfigurationError(f"{read_outside(sharded.removeprefix(SHARDED))} It was {where}.")
        return [None] * len(equation.outvars)

    def merged(self, states: Sequence[Counter[str]]) -> Counter[str]:
        most, least = functools.reduce(operator.or_, states), functools.reduce(operator.and_, states)
        # What some branches do not call is called neither once nor never.
        return most + (most - least)

    def repeated(self, equation: core.JaxprEqn, before: Counter[str]) -> Counter[str]:
        rounds = {"while": 2, "scan": equation.params.get("length", 1)}.get(equation.primitive.name, 1)
        calls = self.state - before
        return before + Counter({name: rounds * count for name, count in calls.items()})


class Branches(Analysis[Axes, None]):
    """The branches and loops of programs that run on one mesh.

    Attributes:
        mixed: the lines of code, so far, that take parts of values computed from rows that ``whole_rows`` has
            put together.
    """

    nothing = _NONE

    def __init__(self, mesh: Axes, backward: Axes) -> None:
        """``mesh`` has the axes of more than one device, and ``ROW`` if devices share rows.

        ``backward`` has the axes over which the backward pass of a unit communicates. It is not traced.
        """
        super().__init__(state=None)
        self._mesh, self._backward = mesh, backward
        self.mixed: set[str] = set()

    def refuse_divergent(self, jaxpr: core.Jaxpr, differing: Sequence[Axes]) -> list[Axes]:
        """Check every branch and loop of a program.

        The program is one device's, before it is differentiated. What it closes over is equal everywhere.

        Returns:
            The axes along which each result differs; none, if no branch or loop communicates and no devices
            share rows.

        Raises:
            ConfigurationError: a condition differs along an axis over which something in the branch or loop
                communicates, or an argument of ``own_tokens`` differs; the message names the line.
        """
        branches = (one for one in equations_within(jaxpr) if one.primitive.name in _BRANCHES)
        if ROW not in self._mesh and not any(map(self._within, branches)):
            return [_NONE] * len(jaxpr.outvars)
        return self.follow(jaxpr, [axes & self._mesh for axes in differing])

    def join(self, values: Iterable[Axes]) -> Axes:
        """All axes of any."""
        return _NONE.union(*values)

    def step(self, equation: core.JaxprEqn, given: list[Axes]) -> list[Axes]:
        """The axes along which the results of an equation differ."""
        params, every = equation.params, self.join(given)
        match equation.primitive.name:
            case "optimization_barrier":
                return given
            case "axis_index":
                axis = params["axis_name"]
                return [self._mesh & _with_row((axis,) if isinstance(axis, str) else axis)]
            case "name" if params["name"] == WHOLE_ROWS:
                return [(each - {ROW}) | {_JOINED} for each in given]
            case "name" if ROW in self._mesh:
                self._check_parts(equation, every)
            case name if name in _EQUALISING and params.get("axis_index_groups") is None:
                return [each - _with_row(collective_axes(equation)) for each in given]
        for program in core.jaxprs_in_params(params):
            self.follow(program, [every] * len(program.invars))
        return [every | (self._mesh & frozenset(collective_axes(equation)))] * len(equation.outvars)

    def _check_parts(self, equation: core.JaxprEqn, differing: Axes) -> None:
        """Check whether a named value is of whole rows or of parts of them, where devices share rows."""
        if equation.params["name"] == OWN_TOKENS and _JOINED in differing:
            self.mixed.add(line_of_equation(equation.source_info))
        _refuse_other_parts(equation, shared=ROW not in differing)

    def decided(self, equation: core.JaxprEqn, condition: Axes, results: list[Axes]) -> list[Axes]:
        """Refuse a branch or loop whose condition differs where something in it communicates."""
        if condition & self._within(equation):
            raise ConfigurationError(
                f"the {_BRANCHES[equation.primitive.name]} at {line_of_equation(equation.source_info)} has a "
                "unit or a collective in it, and its condition depends on a device's own rows or random "
                "bits. Devices that take another branch keep the others waiting forever. Make the condition "
                'equal on all devices, by a scalar in the batch or jax.lax.pmax(..., ("node", "local")), or '
                "compute every way and choose by jnp.where."
            )
        return [condition | each for each in results]

    def _within(self, equation: core.JaxprEqn) -> Axes:
        """The axes over which the programs in an equation communicate, their backward passes included."""
        inside = itertools.chain(*map(equations_within, core.jaxprs_in_params(equation.params)))
        return self.join(map(self._communicates, inside))

    def _communicates(self, equation: core.JaxprEqn) -> Axes:
        backward = self._backward if equation.params.get("name") == READ_BY_UNIT else _NONE
        return backward | (self._mesh & frozenset(collective_axes(equation)))


def _with_row(axes: Iterable[str]) -> Axes:
    """Mesh axes, with ``ROW`` if the devices that share a row are neighbours on one of them."""
    return frozenset((*axes, ROW) if LOCAL in axes else axes)


def _refuse_other_parts(equation: core.JaxprEqn, *, shared: bool) -> None:
    """Refuse parts of rows where whole ones are needed, and whole ones where parts are.

    The equation is of a program for devices that share rows. ``shared`` says whether all devices of a row
    have the values that the equation reads.
    """
    name = equation.params.get("name")
    line = line_of_equation(equation.source_info) if name in (OWN_TOKENS, IN_ORDER) else ""
    if name == OWN_TOKENS and not shared:
        raise ConfigurationError(
            f"own_tokens at {line} is given parts of rows, or random bits, which differ between the devices "
            "of a row. Cut whole rows once, before a model of your own (zerojax.models take whole rows), and "
            "draw random bits for the parts."
        )
    if name == IN_ORDER and shared:
        raise ConfigurationError(
            f"zerojax.attention at {line} is given whole rows on every device that shares them "
            "(sequence_parallel). Let the loss function take this device's part of the model's inputs, by "
            "zerojax.own_tokens."
        )


def refuse_unshared(jaxpr: core.Jaxpr, devices: int) -> None:
    """Refuse a function that would compute with whole rows on each of ``devices`` devices that share them.

    Raises:
        ConfigurationError: it takes no part of the tokens.
    """
    if OWN_TOKENS not in _names(jaxpr):
        raise ConfigurationError(
            f"sequence_parallel={devices}: the function computes with whole rows on each of the devices "
            "that share them. Let it take this device's part of tokens and labels by zerojax.own_tokens, as "
            "zerojax.models.lm_loss does, or set sequence_parallel=1."
        )


def refuse_unmixed(jaxpr: core.Jaxpr, devices: int, mixed: Collection[str]) -> None:
    """Refuse a function that never brings together the parts of rows that ``devices`` devices share.

    Args:
        jaxpr: of the function.
        devices: number of devices that share a row.
        mixed: the lines of layers that mix tokens by other means than attention (``Branches.mixed``).

    Raises:
        ConfigurationError: nothing brings the parts of rows together.
    """
    if not mixed and ATTENDED not in _names(jaxpr):
        raise ConfigurationError(
            f"sequence_parallel={devices}: the model never calls zerojax.attention, so no token sees the "
            "tokens on other devices of its row. Call it in place of the model's attention. Give whole rows "
            "to a layer that mixes tokens in another way, such as a convolution: "
            "own_tokens(layer(whole_rows(x)))."
        )


def _names(jaxpr: core.Jaxpr) -> set[object]:
    return {equation.params.get("name") for equation in equations_within(jaxpr)}
