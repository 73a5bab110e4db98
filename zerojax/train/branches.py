"""Follows what differs between devices, to refuse branches and loops that they could take differently.

A unit's weights are gathered from all devices. If a device does not take the branch that calls the unit, or
leaves a loop before the others, the others wait for it forever. So the condition of such a branch has to be
equal on the devices that a collective within it joins. The traced program is followed for values that differ:
a device's rows of the batch, its number and its random bits, and everything computed from them. They are
equal again once they are summed or gathered over the mesh.

If devices share rows, the program is also followed for values that differ within a row: parts of its tokens,
and random bits. A part cannot be divided again, and a loss of whole rows needs whole rows. A layer that mixes
tokens takes a part of a result that it has computed from whole rows. The loss has to take parts, and
something in the model has to bring the parts of a row together.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence

from jax.extend import core

from zerojax.adapters.loss import ATTENDED, IN_ORDER, OWN_TOKENS, WHOLE_ROWS
from zerojax.comm.in_order import collective_axes
from zerojax.dataflow import Analysis, equations_within
from zerojax.errors import ConfigurationError
from zerojax.schedule.sharded import READ_BY_UNIT
from zerojax.schedule.user_code import line_of_equation
from zerojax.sharding.mesh import LOCAL

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
    if devices > 1 and OWN_TOKENS not in _names(jaxpr):
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
    if devices > 1 and not mixed and ATTENDED not in _names(jaxpr):
        raise ConfigurationError(
            f"sequence_parallel={devices}: the model never calls zerojax.attention, so no token sees the "
            "tokens on other devices of its row. Call it in place of the model's attention. Give whole rows "
            "to a layer that mixes tokens in another way, such as a convolution: "
            "own_tokens(layer(whole_rows(x)))."
        )


def _names(jaxpr: core.Jaxpr) -> set[object]:
    return {equation.params.get("name") for equation in equations_within(jaxpr)}
