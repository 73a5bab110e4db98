"""Programs for the devices of a mesh, which emulated devices run one at a time, a collective after another.

XLA:CPU runs independent operations at once, also two collectives, or a collective and a loop. JAX gives
all collectives one channel: a gather may then be joined with another gather, and devices that reach two
collectives in different orders wait for each other forever. No compiler option prevents it, and barriers are
gone when XLA:CPU looks for what is independent. So every collective reads a value of the one before it. GPUs
run collectives in the order of the program, and need none of this.
"""

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from zerojax.matmul.replay import as_it_is, equations_within, evaluate
from zerojax.sharding.memory import in_host
from zerojax.sharding.mesh import AXES, on_cpus

# XLA takes what these call into the program around them.
_INLINED = frozenset({primitives.closed_call_p.name, "custom_jvp_call", "custom_vjp_call", "jit"})
_SILENT = frozenset({"axis_index", "pbroadcast", "pvary"})


def on_mesh[*Args, T: PyTree[Array]](
    run: Callable[[*Args], T],
    mesh: Mesh,
    *,
    in_specs: PyTree[PartitionSpec],
    out_specs: PyTree[PartitionSpec],
) -> Callable[[*Args], T]:
    """``jax.shard_map`` without its check of replication, whose collectives run in one order on CPUs too."""
    run = in_order(run) if on_cpus(mesh.devices.flat) else run
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def one_at_a_time[T](mesh: Mesh, results: T) -> T:
    """The results of a program, which emulated devices have finished.

    XLA:CPU accepts 32 programs of a device. At the next one a thread waits for room, and when all threads
    wait, none is left for a device that others wait for: a loop that reads no result would hang after tens of
    steps.
    """
    emulated = mesh.devices.size > 1 and on_cpus(mesh.devices.flat)
    return jax.block_until_ready(results) if emulated else results


def in_order[*Args, T: PyTree[Array]](run: Callable[[*Args], T]) -> Callable[[*Args], T]:
    """The same function, whose collectives run one after another.

    It is a function of arrays, inside ``shard_map``; derivatives are taken within it.
    """

    def ordered(*args: *Args) -> T:
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
        order = _Order()
        # XLA sums norms of sharded arrays by collectives of its own.
        results = order.after_last(order.evaluate(traced, jax.tree.leaves(args)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


def collective_axes(equation: core.JaxprEqn) -> tuple[str, ...]:
    """The mesh axes over which an equation is a collective, in the mesh's order; none if it is not."""
    if equation.primitive.name in _SILENT:
        return ()
    named = equation.params.get("axis_name", equation.params.get("axes", ()))
    named = named if isinstance(named, Sequence) and not isinstance(named, str) else (named,)
    return tuple(axis for axis in AXES if axis in named)


class _Order:
    """Evaluates equations so that each collective, and each block with collectives, needs the one before it.

    A block is a loop, a conditional or what is rematerialised, with an order of its own inside.
    """

    def __init__(self) -> None:
        self._last: Sequence[Array] = ()  # results of the last collective or block
        # By id, the values that need all of these; held, so that no other value gets the id of one.
        self._behind: dict[int, Array] = {}

    def evaluate(self, jaxpr: core.ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
        """Evaluate a program."""
        return evaluate(jaxpr.jaxpr, jaxpr.consts, args, self._run)

    def after_last(self, values: Sequence[Array]) -> list[Array]:
        """Values that need the last collective or block."""
        others = {id(x) for x in _numbers(values)} - self._behind.keys()
        if not self._last or not others:
            return list(values)
        firsts = [lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()) for x in self._last]
        token = functools.reduce(operator.add, [jnp.real(x).astype(jnp.int32) for x in firsts])
        # Compilers do not know that 2 is no square, modulo powers of two either.
        never = token * token == 2
        return [
            lax.select(never, jnp.zeros_like(x), jnp.asarray(x)) if id(x) in others else x for x in values
        ]

    def _run(self, equation: core.JaxprEqn, given: list[Array]) -> Sequence[Array]:
        inner = [jaxpr for jaxpr in core.jaxprs_in_params(equation.params) if _communicates(jaxpr)]
        if inner and equation.primitive.name in _INLINED:
            return self.evaluate(inner[0], given)
        if inner:
            params = {name: _ordered(value) for name, value in equation.params.items()}
            results = as_it_is(equation.replace(params=params), self.after_last(given))
            self._last = _numbers(results) or self._last
            # A loop of one step is no loop to XLA, so a result may need only some of the collectives inside.
            self._behind = {}
            return results
        if collective_axes(equation):
            return [self._collective(equation, x) for x in given]
        results = as_it_is(equation, given)
        if any(id(x) in self._behind for x in given):
            self._behind |= {id(x): x for x in results}
        return results

    def _collective(self, equation: core.JaxprEqn, x: Array) -> Array:
        """Of one operand: XLA has no sum of several."""
        (result,) = as_it_is(equation, self.after_last([x]))
        self._last = _numbers([result]) or self._last
        self._behind = {id(y): y for y in self._last}
        return result


def _ordered(value: object) -> object:
    """A parameter of an equation, whose jaxprs are evaluated in order."""
    match value:
        case tuple():
            return tuple(map(_ordered, value))
        case core.ClosedJaxpr() if _communicates(value.jaxpr):
            return jax.make_jaxpr(lambda *args: _Order().evaluate(value, args))(*value.in_avals)
    return value


def _communicates(jaxpr: core.Jaxpr) -> bool:
    """Whether a program has collectives."""
    return any(map(collective_axes, equations_within(jaxpr)))


def _numbers(values: Sequence[Array]) -> list[Array]:
    """Those that one can compute with: neither empty, nor arrays of keys, nor in host memory."""
    numbers = [x for x in values if jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_]
    return [x for x in numbers if np.size(x) > 0 and not in_host(x)]
