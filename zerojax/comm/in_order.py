"""Programs for the devices of a mesh, in which emulated devices run their collectives in one order.

XLA:CPU runs independent operations at once. It starts the collectives of a computation in one order on every
device, but takes a loop for started when its first collective is: what follows the loop then runs beside the
rest of it. Devices that reach two collectives in different orders wait for each other forever, and since JAX
gives all collectives one channel, a gather may also be joined with another of its kind. No compiler option
prevents it, and barriers are gone when XLA:CPU looks for what is independent. So what must come later reads
a value of what came earlier. GPUs run collectives in the order of the program, and need none of this.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from zerojax.matmul.replay import as_it_is, evaluate
from zerojax.sharding.mesh import AXES, on_cpus

# XLA takes what these call into the program around them.
_CALLS = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "jit"})
_LOOPS = frozenset({"cond", "scan", "while"})
_SILENT = frozenset({"axis_index", "pbroadcast", "pvary"})


def on_mesh(run: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``jax.shard_map`` without its check of replication, whose collectives run in one order on CPUs too."""
    run = in_order(run) if on_cpus(mesh.devices.flat) else run
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def in_order(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose loops with collectives run neither beside other collectives nor each other.

    Args:
        run: a function of arrays, inside ``shard_map``; derivatives are taken within it.
    """

    def ordered(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
        order = _Order()
        results = order.evaluate(traced, jax.tree.leaves(args))
        # XLA sums norms of sharded arrays by collectives of its own.
        results = order.after_all(traced.jaxpr.outvars, results)
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
    """Evaluates equations in the order of a program.

    Collectives outside loops need no more among themselves than XLA's order. So a collective has to come
    after the last loop before it, and a loop after that and all collectives in between. Most do already.
    """

    def __init__(self) -> None:
        self._awaited: dict[int, Any] = {}  # by bit: results of the last loop, and of the collectives since
        self._loop = 0  # the bits of the last loop
        self._behind: dict[Any, int] = {}  # by variable: the bits of what it waits for
        self._bit = 1

    def evaluate(self, jaxpr: core.ClosedJaxpr, args: Sequence[Any], behind: Sequence[int] = ()) -> list[Any]:
        """Evaluate a program; its arguments are behind what the bits stand for."""
        self._behind |= dict(zip(jaxpr.jaxpr.invars, behind, strict=False))
        return evaluate(jaxpr.jaxpr, jaxpr.consts, args, self._run)

    def after_all(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """A program's results, after its last loop."""
        return self._after(self._loop, self._bits(variables), values)

    def _run(self, equation: core.JaxprEqn, given: list[Any]) -> Sequence[Any]:
        name, behind = equation.primitive.name, self._bits(equation.invars)
        holds, loop = _holds_collectives(equation), name in _LOOPS
        if holds and name in _CALLS:
            (inner,) = core.jaxprs_in_params(equation.params)
            results = self.evaluate(inner, given, behind)
            self._behind |= dict(zip(equation.outvars, self._bits(inner.outvars), strict=True))
            return results
        if not holds and not collective_axes(equation):
            self._behind |= dict.fromkeys(equation.outvars, _all(behind))
            return as_it_is(equation, given)
        needed = _all(self._awaited) if holds else self._loop
        if not loop or needed & ~_all(_read_by_loop(equation, behind)):
            given = self._after(needed, behind, given)
        params = {name: _ordered(value) for name, value in equation.params.items()}
        results = as_it_is(equation.replace(params=params), given)
        own = [self._bit << i for i in range(len(results))]
        self._bit <<= len(results)
        if holds:
            self._awaited, self._loop = {}, sum(own)
        self._awaited |= dict(zip(own, results, strict=True))
        for var, bit in zip(equation.outvars, own, strict=True):
            self._behind[var] = needed | (sum(own) if loop else bit)
        return results

    def _bits(self, variables: Sequence[Any]) -> list[int]:
        return [0 if isinstance(var, core.Literal) else self._behind.get(var, 0) for var in variables]

    def _after(self, needed: int, behind: Sequence[int], values: Sequence[Any]) -> list[Any]:
        """Values that are there after what the needed bits stand for."""
        missing = [needed & ~bits for bits in behind]
        tokens = {
            bits: _token([value for bit, value in self._awaited.items() if bit & bits])
            for bits in set(missing)
        }
        return [_after(tokens[bits], x) for bits, x in zip(missing, values, strict=True)]


def _all(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


def _read_by_loop(equation: core.JaxprEqn, given: Sequence[Any]) -> list[Any]:
    """Those of a loop's operands that it reads, and so waits for, as far as is known."""
    if equation.primitive.name != "scan":
        return []
    body = equation.params["jaxpr"].jaxpr
    read = {var for inner in body.eqns for var in inner.invars if not isinstance(var, core.Literal)}
    return [x for var, x in zip(body.invars, given, strict=True) if var in read]


def _ordered(value: Any) -> Any:
    """A parameter of an equation, whose jaxprs are evaluated in order."""
    match value:
        case tuple():
            return tuple(map(_ordered, value))
        case core.ClosedJaxpr() if any(map(_holds_collectives, value.jaxpr.eqns)):
            return jax.make_jaxpr(lambda *args: _Order().evaluate(value, args))(*value.in_avals)
    return value


def _holds_collectives(equation: core.JaxprEqn) -> bool:
    """Whether an equation has collectives inside: a loop, a conditional or a call."""
    return any(map(_communicates, core.jaxprs_in_params(equation.params)))


def _communicates(jaxpr: core.Jaxpr) -> bool:
    return any(collective_axes(equation) or _holds_collectives(equation) for equation in jaxpr.eqns)


def _token(values: Sequence[Any]) -> Int32[Array, ""] | None:
    """A number for which all values are needed; None without any."""
    firsts = [
        lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()).astype(jnp.int32)
        for x in values
        if _has_numbers(x)
    ]
    return sum(firsts[1:], start=firsts[0]) if firsts else None


def _after(token: Int32[Array, ""] | None, x: Any) -> Any:
    """A value for which the token is needed: n (n + 1) is never odd, which compilers do not know."""
    if token is None or not _has_numbers(x):
        return x
    never = (token * (token + 1)) % 2 != 0
    return lax.select(never, jnp.zeros_like(x), jnp.asarray(x))


def _has_numbers(x: Any) -> bool:
    """Whether it is neither empty nor an array of keys."""
    return (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_) and np.size(x) > 0
