"""Runs a module's forward pass with weights that are not arrays, such as fp8 codes, in its matmuls.

The module is traced with ordinary arrays, and the traced program is evaluated equation by equation with the
weights in their place. Equations that only move or cast a weight pass it on. A ``dot_general`` of a weight is
replaced by the product for its form: of fp8 codes (``zerojax.matmul.fp8``), with a low-rank adapter
(``zerojax.matmul.low_rank``), or of a layer in its stack (``LayerOperand``). What reads codes by itself, as
the grouped products of experts do, is given them (``call_reader``). The module itself does not change, so it
may be NNX or Linen, and use ``jnp.dot``, ``einsum`` or a nested ``jit``.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Concatenate, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.extend.core import primitives
from jaxtyping import Array, PyTree

from zerojax.dataflow import as_it_is, called, evaluate, inner_of
from zerojax.errors import ConfigurationError
from zerojax.matmul.low_rank import LowRankOperand
from zerojax.matmul.operand import Fp8Operand, LayerOperand
from zerojax.matmul.tiles import LOOP, over_tiles

_READERS: dict[str, Callable[..., Array]] = {}
"""Functions that read ``Fp8Operand``s themselves, by the names under which they are called."""


def call_reader(function: Callable[..., object], static: Hashable, *args: PyTree[Array]) -> Array:
    """``function(static, *args)`` in a module's forward pass, given ``Fp8Operand``s by ``at_matmuls``.

    The function is pure, returns an array, and is correct with ``Fp8Operand``s in place of some arrays. The
    ``repr`` of ``static`` tells it from others.
    """
    leaves, tree = jax.tree.flatten(args)
    return _reader(function, static, tree)(*leaves)


@functools.cache
def _reader(function: Callable[..., object], static: Hashable, tree: Hashable) -> Callable[..., Array]:
    """``function`` of flattened arguments, compiled under a name that is the same in every process.

    A jaxpr that calls it has this name.
    """

    def run(*leaves: Value) -> Array:
        return cast(Array, function(static, *jax.tree.unflatten(tree, leaves)))

    digest = hashlib.sha256(f"{static!r} {tree}".encode()).hexdigest()
    run.__name__ = f"{getattr(function, '__name__', 'reader')}_{digest[:12]}"
    _READERS[run.__name__] = run
    return jax.jit(run)


def whole_weight(weight: Array) -> Array:
    """A kernel ``[inputs, outputs]`` for reads that are no products.

    Of codes, or with an adapter, it is their product with the identity, so it costs one where it is called.
    """
    return jnp.copy(weight)


whole = jax.jit(whole_weight)
_MOVES = frozenset(("copy", "name", "reshape", "rev", "slice", "split", "squeeze", "transpose"))
Operand = Fp8Operand | LowRankOperand | LayerOperand
Value = Array | Operand
"""What an equation reads: an array, or a weight that only a product reads."""


def at_matmuls[**P, T: PyTree[Array]](
    body: Callable[Concatenate[Sequence[Array], P], T],
) -> Callable[Concatenate[Sequence[Value], P], T]:
    """``body(weights, *args)``, whose weights may be an ``Operand`` where a product reads them.

    ``body`` is pure, and closes over nothing that is traced.

    Returns:
        The same function of such weights. It raises ConfigurationError, naming the weight and the line, if
        anything but a product reads one.
    """

    def run(weights: Sequence[Value], *args: P.args, **kwargs: P.kwargs) -> T:
        arrays = [weight for weight in weights if not isinstance(weight, Operand)]
        if len(arrays) == len(weights):
            return body(arrays, *args, **kwargs)
        like = tuple(weight.aval if isinstance(weight, Operand) else weight for weight in weights)
        traced, shapes = jax.make_jaxpr(body, return_shape=True)(like, *args, **kwargs)
        given: list[Value] = [*weights, *jax.tree.leaves((args, kwargs))]
        results = _as_arrays(evaluate(traced, given, _results))
        for result in results:
            if isinstance(result, Operand):
                raise ConfigurationError(_read_elsewhere(result, "is returned by its unit"))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _results(equation: core.JaxprEqn, given: Sequence[Value]) -> Sequence[Value]:
    """Evaluate one equation, whose operands may be weights."""
    primitive = equation.primitive
    params = equation.params
    weights = [value for value in given if isinstance(value, Operand)]
    if not weights:
        return as_it_is(equation, [value for value in given if not isinstance(value, Operand)])
    match primitive.name:
        case "dot_general" if len(weights) == 1 and not any(params["dimension_numbers"][1]):
            if (out := _product(equation, *given)) is not None:
                return [out]
        case "convert_element_type" if jnp.issubdtype(params["new_dtype"], jnp.floating):
            return [weights[0].astype(params["new_dtype"])]
        case name if name in _MOVES and len(given) == 1:
            if (moved := weights[0].moved(primitive, params)) is not None:
                return moved
        case "jit" if (reader := _READERS.get(params["name"])) and all(
            isinstance(weight, Fp8Operand) for weight in weights
        ):
            return [reader(*given)]
        case "jit" if params["name"] == LOOP:
            return evaluate(params["jaxpr"], given, _results_of_loop)
        case "jit" if params["name"] == whole_weight.__name__ and not isinstance(weights[0], LayerOperand):
            product = jax.make_jaxpr(lambda w: jnp.eye(len(w), dtype=w.dtype) @ w)(weights[0].aval)
            return evaluate(product, given, _results)
        case primitives.remat_p.name:
            run = jax.checkpoint(
                lambda *args: evaluate(params["jaxpr"], args, _results),
                policy=params["policy"], prevent_cse=params["prevent_cse"],
            )  # fmt: skip
            return run(*given)
    if (program := called(equation)) is not None:
        return evaluate(program, given, _results)
    refused = [weight for weight in weights if not isinstance(weight, LayerOperand)]
    if len(refused) < len(weights):
        return _results(equation, _as_arrays(given))
    where = source_info_util.summarize(equation.source_info)
    raise ConfigurationError(_read_elsewhere(refused[0], f"is read by {primitive.name} at {where}"))


def _results_of_loop(equation: core.JaxprEqn, given: list[Value]) -> Sequence[Value]:
    """The same within a loop over tiles (``over_tiles``), whose constants may be weights."""
    match equation.primitive.name:
        case "custom_vjp_call" if (program := called(equation, with_rule=True)) is not None:
            return evaluate(program, given, _results_of_loop)
        case "scan" if (inner := inner_of(equation)) is not None:
            count = inner.carried.start

            def body(consts: Sequence[Value], tile: Sequence[Array]) -> list[Value]:
                number, *own = tile
                read = [w.in_tile(number) if isinstance(w, LowRankOperand) else w for w in consts]
                return evaluate(inner.programs[0], [*read, *own], _results)

            tiles = [x for x in given[count:] if not isinstance(x, Operand)]
            return over_tiles(body, given[:count], [jnp.arange(equation.params["length"]), *tiles])
    return _results(equation, given)


def _as_arrays(values: Sequence[Value]) -> list[Array | Fp8Operand | LowRankOperand]:
    """With layers of stacks as arrays."""
    return [value.weight if isinstance(value, LayerOperand) else value for value in values]


def _product(equation: core.JaxprEqn, lhs: Value, rhs: Value) -> Array | None:
    """``dot_general`` of a weight and an array, without batch axes. None if the weight has no product."""
    (lhs_axes, rhs_axes), _ = equation.params["dimension_numbers"]
    if not isinstance(lhs, Operand):
        assert isinstance(rhs, Operand)
        return rhs.product(lhs, lhs_axes, rhs_axes, equation)
    assert not isinstance(rhs, Operand)
    out = lhs.product(rhs, rhs_axes, lhs_axes, equation)
    if out is None:
        return None
    # The weight's axes came last, and belong first.
    first = rhs.ndim - len(rhs_axes)
    return lax.transpose(out, (*range(first, out.ndim), *range(first)))


def _read_elsewhere(weight: Fp8Operand | LowRankOperand, how: str) -> str:
    way_out = weight.way_out.format(name=weight.name)
    return (
        f"the weight {weight.name!r} {weight.kind}, which only a matmul can read, and it {how}: leave it "
        f"out by {way_out}."
    )
