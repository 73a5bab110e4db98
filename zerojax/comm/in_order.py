"""Programs for the devices of a mesh. Emulated devices run one program and one collective at a time.

XLA:CPU runs independent operations at the same time, including two collectives, or a collective and a loop.
JAX gives all collectives one channel. So a gather may be joined with another gather, and devices that reach
two collectives in different orders wait for each other forever. No compiler option prevents it, and XLA:CPU
has removed barriers before it looks for independent operations. So every collective reads a value of the one
before it. GPUs run collectives in the order of the program, and need none of this.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, PyTree

import pallas_kernels
from zerojax.dataflow import as_it_is, called, interpret, with_dtype
from zerojax.sharding.mesh import AXES, platform_of

type Atom = core.Var | core.Literal
_SILENT = frozenset({"axis_index", "pbroadcast", "pvary"})


def on_mesh[*Args, T: PyTree[Array]](
    run: Callable[[*Args], T],
    mesh: Mesh,
    *,
    in_specs: PyTree[PartitionSpec],
    out_specs: PyTree[PartitionSpec],
) -> Callable[[*Args], T]:
    """``jax.shard_map`` without its check of replication. Collectives run in one order, on CPUs too.

    Derivatives must be taken inside ``run``.
    """
    ordered, platform = run, platform_of(mesh.devices.flat)
    if platform == "cpu":
        # The results wait because XLA sums norms of sharded arrays by collectives that it adds.
        ordered = rewritten(run, lambda jaxpr: _Order().ordered(jaxpr, results_wait=True))

    def on_platform(*args: *Args) -> T:
        # XLA crashes on programs that read an empty argument (jaxlib 0.11.2).
        args = jax.tree.map(lambda x: x if x.size else jnp.empty_like(x), args)
        with pallas_kernels.for_platform(platform):
            return ordered(*args)

    return jax.shard_map(on_platform, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def rewritten[*Args, T](
    function: Callable[[*Args], T], rewrite: Callable[[core.Jaxpr], core.Jaxpr]
) -> Callable[[*Args], T]:
    """The function with another program: ``rewrite`` is given the one that it traces to.

    JAX copies the new program's equations into the trace. Evaluating them would take as long as tracing.
    """

    def run(*args: *Args) -> T:
        outer, shapes = jax.make_jaxpr(jax.jit(function), return_shape=True)(*args)

        def call(equation: core.JaxprEqn, given: list[Array]) -> Sequence[Array]:
            params = equation.params
            params = params | {"jaxpr": rewrite(params["jaxpr"]), "inline": jax.Inline.JAX_EARLY}
            return as_it_is(equation.replace(params=params), given)

        given = [*outer.consts, *jax.tree.leaves(args)]
        return jax.tree.unflatten(jax.tree.structure(shapes), interpret(outer, given, call, with_dtype))

    return run


def one_at_a_time[T](mesh: Mesh, results: T) -> T:
    """Returns the results of a program. On emulated devices it first waits until they are computed.

    XLA:CPU accepts 32 programs for each device. At the next one a thread waits for room. Once all threads
    wait, none is left for a device that the others wait for. A loop that reads no result would hang after
    tens of steps.
    """
    emulated = mesh.devices.size > 1 and platform_of(mesh.devices.flat) == "cpu"
    return jax.block_until_ready(results) if emulated else results


def collective_axes(equation: core.JaxprEqn) -> tuple[str, ...]:
    """The mesh axes over which an equation is a collective, in the mesh's order; none if it is not."""
    if equation.primitive.name in _SILENT:
        return ()
    named = equation.params.get("axis_name", equation.params.get("axes", ()))
    named = named if isinstance(named, Sequence) and not isinstance(named, str) else (named,)
    return tuple(axis for axis in AXES if axis in named)


@dataclass
class _Order:
    """Rewrites a program so that each collective, and each block with collectives, needs the one before it.

    A block is a loop, a conditional or a rematerialised program, which is ordered by itself.
    """

    _equations: list[core.JaxprEqn] = field(default_factory=list)
    _names: source_info_util.NameStack = field(default_factory=source_info_util.NameStack)
    _last: Sequence[Atom] = ()  # results of the last collective or block
    _behind: set[int] = field(default_factory=set)  # ids of the values that need all of these

    def ordered(self, jaxpr: core.Jaxpr, *, results_wait: bool = False) -> core.Jaxpr:
        """The program in order.

        With ``results_wait`` its results depend on the last collective or block, too.
        """
        results = interpret(jaxpr, [*jaxpr.constvars, *jaxpr.invars], self._run)
        results = self._after_last(results) if results_wait else results
        return jaxpr.replace(eqns=self._equations, outvars=results)

    def _run(self, equation: core.JaxprEqn, given: list[Atom]) -> list[Atom]:
        if any(map(_communicates, core.jaxprs_in_params(equation.params))):
            program = called(equation, with_rule=True)
            return (
                self._block(equation, given) if program is None else self._inlined(equation, program, given)
            )
        if collective_axes(equation):
            return [self._collective(equation, *each) for each in zip(given, equation.outvars, strict=True)]
        results = self._emit(equation, given)
        if any(id(x) in self._behind for x in given):
            self._behind.update(map(id, results))
        return results

    def _block(self, equation: core.JaxprEqn, given: list[Atom]) -> list[Atom]:
        params = {name: _ordered(value) for name, value in equation.params.items()}
        results = self._emit(equation.replace(params=params), self._after_last(given))
        self._last = list(filter(_is_number, results)) or self._last
        # A loop of one step is no loop to XLA, so a result may need only some of the collectives inside.
        self._behind = set()
        return results

    def _inlined(self, equation: core.JaxprEqn, program: core.Jaxpr, given: list[Atom]) -> list[Atom]:
        """XLA inlines these calls, so the collectives in them are ordered together with those around them."""
        outside, self._names = self._names, self._names + equation.source_info.name_stack
        constants = map(core.Literal, program.consts, (var.aval for var in program.constvars))
        results = interpret(program, [*constants, *given], self._run)
        self._names = outside
        return results

    def _collective(self, equation: core.JaxprEqn, x: Atom, result: core.Var) -> Atom:
        """Run a collective on one operand, after the last collective. XLA has no sum of several operands."""
        (made,) = self._emit(equation.replace(outvars=[result]), self._after_last([x]))
        self._last = list(filter(_is_number, [made])) or self._last
        self._behind = set(map(id, self._last))
        return made

    def _emit(self, equation: core.JaxprEqn, given: list[Atom]) -> list[Atom]:
        info = equation.source_info
        info = info.replace(name_stack=self._names + info.name_stack)
        made = [core.Var(var.aval) for var in equation.outvars]
        self._equations.append(equation.replace(invars=given, outvars=made, source_info=info))
        return list(made)

    def _after_last(self, values: Sequence[Atom]) -> list[Atom]:
        """The values, changed so that they depend on the last collective or block."""
        others = {id(x): x for x in values if _is_number(x) and id(x) not in self._behind}
        if not self._last or not others:
            return list(values)
        operands = [*self._last, *others.values()]
        avals = tuple(x.aval for x in operands)
        program = _waiting(len(self._last), avals, jax.sharding.get_abstract_mesh())
        results = dict(zip(others, interpret(program, operands, self._emit), strict=True))
        return [results.get(id(x), x) for x in values]


@functools.cache
def _waiting(count: int, avals: tuple[Any, ...], mesh: AbstractMesh) -> core.Jaxpr:
    """The program that returns the operands behind the first ``count``, and needs those first ones."""
    del mesh  # equations hold the mesh of their trace

    def run(*operands: Array) -> list[Array]:
        firsts = [lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()) for x in operands[:count]]
        token = functools.reduce(operator.add, [jnp.real(x).astype(jnp.int32) for x in firsts])
        # False. Compilers do not know that 2 is no square, modulo powers of two either.
        never = token * token == 2
        return [lax.select(never, jnp.zeros_like(x), x) for x in operands[count:]]

    return jax.make_jaxpr(run)(*avals)


def _ordered(value: object) -> object:
    """A parameter of an equation, whose programs are ordered."""
    if isinstance(value, tuple):
        return tuple(map(_ordered, value))
    return _Order().ordered(value) if isinstance(value, core.Jaxpr) and _communicates(value) else value


_known: WeakKeyDictionary[core.Jaxpr, bool] = WeakKeyDictionary()


def _communicates(jaxpr: core.Jaxpr) -> bool:
    """Whether a program has collectives."""
    if jaxpr not in _known:
        inside = (inner for one in jaxpr.eqns for inner in core.jaxprs_in_params(one.params))
        _known[jaxpr] = any(map(collective_axes, jaxpr.eqns)) or any(map(_communicates, inside))
    return _known[jaxpr]


def _is_number(x: Atom) -> bool:
    """Whether one can compute with a value: it is not empty, nor an array of keys, nor in host memory."""
    aval: Any = x.aval
    computable = jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool_
    return computable and aval.size > 0 and aval.memory_space != jax.memory.Space.Host
