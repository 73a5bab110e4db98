"""Follows what differs between devices, to refuse branches and loops that they could take differently.

A unit's weights are gathered from all devices. If a device does not take the branch that calls the unit, or
leaves a loop before the others, those wait for it forever. So the condition of such a branch has to be equal
on the devices that a collective within it joins. What differs is followed through the traced program: rows of
the batch, a device's own number and random bits, and all that is computed of them, until it is summed or
gathered over the mesh.

Where devices share rows, it is also followed what differs between those of a row: parts of its tokens, until
they are whole again, and random bits. A part has no parts of its own, and results of rows are of whole ones.
A layer that mixes tokens takes parts of what it has computed of rows that were put together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from zerojax.adapters.loss import IN_ORDER, OWN_TOKENS, WHOLE_ROWS
from zerojax.comm.in_order import collective_axes
from zerojax.errors import ConfigurationError
from zerojax.matmul.replay import equations_within, scan_counts
from zerojax.schedule.sharded import READ_BY_UNIT
from zerojax.schedule.user_code import line_of_equation
from zerojax.sharding.mesh import LOCAL

Axes = frozenset[str]
"""The mesh axes along which a value differs between devices, or over which a collective joins them; and
``ROW``."""
ROW = "row"
"""In place of an axis, for what differs between the devices that share a row."""
_JOINED = "joined"
"""Likewise, for what is computed of rows that ``whole_rows`` has put together."""

_NONE: Axes = frozenset()
_EQUALISING = frozenset({"all_gather", "all_gather_invariant", "pmax", "pmin", "psum", "psum_invariant"})
_BRANCHES = {"cond": "jax.lax.cond or switch", "while": "jax.lax.while_loop"}


@dataclass(frozen=True)
class Branches:
    """The branches and loops of programs that run on one mesh.

    Attributes:
        mesh: its axes of more than one device; and ``ROW`` where devices share rows.
        backward: the axes that a unit's backward pass communicates over, which is not traced; none without
            one.
        mixed: the lines of the programs, so far, that take parts of what is computed of rows that
            ``whole_rows`` has put together.
    """

    mesh: Axes
    backward: Axes
    mixed: set[str] = field(default_factory=set)

    def refuse_divergent(self, jaxpr: core.Jaxpr, differing: Sequence[Axes]) -> list[Axes]:
        """Check every branch and loop of a program.

        The program is one device's, before it is differentiated. What it closes over is equal everywhere.

        Returns:
            The axes along which each result differs; none, if no branch or loop communicates and no devices
            share rows.

        Raises:
            ConfigurationError: a condition differs along an axis over which something in the branch or loop
                communicates, or ``own_tokens`` is given what differs; the message names the line.
        """
        branches = (one for one in equations_within(jaxpr) if one.primitive.name in _BRANCHES)
        if ROW not in self.mesh and not any(map(self._within, branches)):
            return [_NONE] * len(jaxpr.outvars)
        return self._follow(jaxpr, [axes & self.mesh for axes in differing])

    def _communicates(self, jaxpr: core.Jaxpr) -> Axes:
        """The axes of all collectives in a program, and of the backward passes of its units."""
        axes = _NONE
        for equation in equations_within(jaxpr):
            axes |= frozenset(collective_axes(equation)) & self.mesh
            if equation.params.get("name") == READ_BY_UNIT:
                axes |= self.backward
        return axes

    def _within(self, equation: core.JaxprEqn) -> Axes:
        """The axes that the programs in an equation communicate over."""
        return _NONE.union(*map(self._communicates, core.jaxprs_in_params(equation.params)))

    def _follow(self, jaxpr: core.Jaxpr, given: Sequence[Axes]) -> list[Axes]:
        known: dict[Any, Axes] = dict(zip(jaxpr.invars, given, strict=True))

        def read(var: Any) -> Axes:
            return _NONE if isinstance(var, core.Literal) else known.get(var, _NONE)

        for equation in jaxpr.eqns:
            results = self._results(equation, [read(var) for var in equation.invars])
            known |= dict(zip(equation.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _results(self, equation: core.JaxprEqn, given: list[Axes]) -> list[Axes]:
        params, name = equation.params, equation.primitive.name
        match name:
            case "cond":
                condition, *operands = given
                self._refuse(equation, condition)
                results = [self._follow(branch.jaxpr, operands) for branch in params["branches"]]
                return [condition.union(*axes) for axes in zip(*results, strict=True)]
            case "while":
                return self._through_while(equation, given)
            case "scan":
                constants, carried = scan_counts(equation)
                return self._through_scan(params["jaxpr"].jaxpr, given, constants, carried)
            case "axis_index":
                axis = params["axis_name"]
                return [self.mesh & _with_row((axis,) if isinstance(axis, str) else axis)]
            case "optimization_barrier":
                return given
        every = _NONE.union(*given)
        if params.get("name") == WHOLE_ROWS:
            return [(each - {ROW}) | {_JOINED} for each in given]
        if params.get("name") == OWN_TOKENS and _JOINED in every:
            self.mixed.add(line_of_equation(equation.source_info))
        if ROW in self.mesh:
            _refuse_other_parts(equation, shared=ROW not in every)
        if axes := frozenset(collective_axes(equation)):
            if name in _EQUALISING and params.get("axis_index_groups") is None:
                return [each - _with_row(axes) for each in given]
            return [every | (axes & self.mesh)] * len(equation.outvars)
        inside = list(core.jaxprs_in_params(params))
        if len(inside) == 1:
            shape = (len(inside[0].invars), len(inside[0].outvars))
            if shape == (len(given), len(equation.outvars)):
                return self._follow(inside[0], given)
        return [every] * len(equation.outvars)

    def _through_scan(
        self, body: core.Jaxpr, given: Sequence[Axes], constants: int, carried: int
    ) -> list[Axes]:
        common, carry, each = (
            given[:constants],
            list(given[constants:][:carried]),
            given[constants + carried :],
        )
        while True:
            leaving = self._follow(body, [*common, *carry, *each])
            wider = [a | b for a, b in zip(carry, leaving, strict=False)]
            if wider == carry:
                return [*carry, *leaving[carried:]]
            carry = wider

    def _through_while(self, equation: core.JaxprEqn, given: Sequence[Axes]) -> list[Axes]:
        params = equation.params
        test, body = params["cond_nconsts"], params["body_nconsts"]
        carry = list(given[test + body :])
        while True:
            (condition,) = self._follow(params["cond_jaxpr"].jaxpr, [*given[:test], *carry])
            leaving = self._follow(params["body_jaxpr"].jaxpr, [*given[test : test + body], *carry])
            wider = [a | b | condition for a, b in zip(carry, leaving, strict=True)]
            if wider == carry:
                self._refuse(equation, condition)
                return carry
            carry = wider

    def _refuse(self, equation: core.JaxprEqn, condition: Axes) -> None:
        """Refuse a branch or loop whose condition differs where something in it communicates."""
        if condition & self._within(equation):
            raise ConfigurationError(
                f"the {_BRANCHES[equation.primitive.name]} at {line_of_equation(equation.source_info)} has a "
                "unit or a collective in it, and its condition depends on a device's own rows or random "
                "bits: devices that go another way would keep the others waiting forever. Make the condition "
                'equal on all devices, by a scalar in the batch or jax.lax.pmax(..., ("node", "local")), or '
                "compute every way and choose by jnp.where."
            )


def _with_row(axes: Iterable[str]) -> Axes:
    """Mesh axes, with ``ROW`` if they have the one that the devices of a row are neighbours on."""
    return frozenset((*axes, ROW) if LOCAL in axes else axes)


def _refuse_other_parts(equation: core.JaxprEqn, *, shared: bool) -> None:
    """Refuse parts of rows where whole ones are needed, and whole ones where parts are.

    The equation is of a program for devices that share rows; ``shared`` says whether all of a row have what
    it reads.
    """
    name = equation.params.get("name")
    line = line_of_equation(equation.source_info) if name in (OWN_TOKENS, IN_ORDER) else ""
    if name == OWN_TOKENS and not shared:
        raise ConfigurationError(
            f"own_tokens at {line} is given parts of rows, or random bits, which differ between the devices "
            "of a row: cut whole rows once, before a model of your own (those of zerojax.models take whole "
            "rows), and draw random bits for the parts."
        )
    if name == IN_ORDER and shared:
        raise ConfigurationError(
            f"zerojax.attention at {line} is given whole rows on each of the devices that share them "
            "(sequence_parallel): let the loss function take this device's part of what the model reads, by "
            "zerojax.own_tokens."
        )
