"""A unit: the module whose weights are gathered just before use and dropped after.

A unit's parameters reach the model as ``Sharded`` values, which carry all that a gather needs. Calling the
unit goes through ``call_unit``: one ``custom_vjp`` that gathers the weights, runs the module, and in the
backward pass gathers again, runs the module's own vjp and reduces the gradients to their owners.

The ``ShardingStrategy`` decides where its weights come from and where its gradients go.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zerojax.comm.collectives import UnitComm, Values
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import LoRA, LowRankOperand
from zerojax.matmul.operand import Codes, Fp8Operand, LayerOperand, Scaled
from zerojax.matmul.replay import at_matmuls
from zerojax.schedule.breadth_first import all_batched, map_microbatches, with_batching_rule
from zerojax.schedule.partition import split_arrays
from zerojax.schedule.remat import rematerialised
from zerojax.schedule.sharded import Sharded, taken
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import AXES
from zerojax.sharding.param_tree import Path
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.sharding.wire_format import Seed, mix

Body = Callable[..., Any]

_calls: ContextVar[Iterator[int]] = ContextVar("numbers of calls")


@contextlib.contextmanager
def numbered_calls() -> Generator[None]:
    """Within this context each call of a unit has its number, so that its adapters drop other elements."""
    token = _calls.set(itertools.count())
    try:
        yield
    finally:
        _calls.reset(token)


def materialise(weights: Sequence[Sharded]) -> Values:
    """Gather weights that belong to no unit; they stay whole until the backward pass ends.

    Their gradients are reduced once, after all uses have contributed.
    """
    if not weights:
        return ()
    parts = take_apart(weights)
    comm = parts.comm
    secondary = comm.to_secondary(comm.strategy.source, parts.sources, parts.frozen)
    whole: Any = _to_whole(comm, secondary, parts.sinks, parts.seed)
    by_path = {leaf.path: x for leaf, x in zip(comm.every, whole, strict=True)}
    return tuple(
        lax.stop_gradient(by_path[w.leaf.path]) if w.leaf.frozen else by_path[w.leaf.path] for w in weights
    )


def call_unit(body: Body, weights: Sequence[Sharded], inputs: Any) -> Any:
    """Run ``body(weights, inputs)`` on gathered weights.

    Args:
        body: a pure function of whole leaves of unsharded shape and of ``inputs``; it may close over
            nothing that is traced.
        weights: the unit's parameters.
        inputs: a pytree of arrays: activations, the unit's other state.

    Returns:
        The result of ``body``, in which strings and Python's numbers stay what they are. Cotangents of
        ``inputs`` are ordinary, those of the weights go to their sinks.
    """
    joins: list[Callable[[Sequence[Array]], Any]] = []

    def arrays_of(weights: Any, inputs: Any) -> Sequence[Array]:
        arrays, join = split_arrays(body(weights, inputs))
        joins.append(join)
        return arrays

    parts = take_apart(weights)
    comm = parts.comm
    on_whole = on_operands(arrays_of, weights)
    layer = as_layer(lambda whole, inputs: on_whole(whole, *inputs), comm.strategy)
    inputs = (parts.inputs, inputs)

    def in_breadth(size: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        """Run one micro-batch after another."""
        del size
        *weights_mapped, inputs_mapped = mapped
        refuse_mapped(weights_mapped)
        if not any(jax.tree.leaves(inputs_mapped)):
            out = call_gathered(comm, layer, *args)
            return out, all_batched(out, False)
        out = call_gathered(comm, map_microbatches(layer, (inputs_mapped,)), *args)
        return out, all_batched(out, True)

    run = with_batching_rule(in_breadth, functools.partial(call_gathered, comm, layer))
    arrays = run((parts.sources, parts.frozen), parts.sinks, parts.seed, inputs)
    return joins[-1](arrays)


def on_operands(body: Body, weights: Sequence[Sharded]) -> Body:
    """``body(weights, *args)`` as a function of what ``UnitComm.to_whole`` returns.

    Args:
        body: a pure function of whole weights; it may close over nothing that is traced.
        weights: the unit's parameters, of which only what is static is read.

    Returns:
        The same of ``(whole, inputs, *args)``, with the ``inputs`` of ``take_apart``.
    """
    run = at_matmuls(body)
    slots = [(w.leaf, tuple(part.leaf.path for part in w.adapter), w.lora) for w in weights]
    trained, frozen = _flattened(weights)
    every = [part.leaf for part in (*trained, *frozen)]
    strategy = (*trained, *frozen)[0].strategy

    def with_inputs(whole: Sequence[Any], inputs: UnitInputs, *args: Any) -> Any:
        by_path = {leaf.path: x for leaf, x in zip(every, whole, strict=True)}

        def operand(leaf: ParamLayout, adapter: tuple[Path, ...], lora: LoRA | None) -> Any:
            value = by_path[leaf.path]
            if isinstance(value, Codes):
                value = Fp8Operand(*value, inputs.scales[leaf.name], leaf.name, trained=not leaf.frozen)
            elif strategy.in_place and leaf.stack:
                value = LayerOperand(value)
            if leaf.frozen:
                value = lax.stop_gradient(value)
            if lora is None:
                return value
            a, b = (by_path[path] for path in adapter)
            seed = mix(inputs.seeds, leaf.index, lax.axis_index(AXES)) if lora.dropout else jnp.uint32(0)
            return LowRankOperand.of(value, a, b, seed, lora, leaf.name)

        return run(tuple(operand(*slot) for slot in slots), *args)

    return with_inputs


def as_layer(body: Body, strategy: ShardingStrategy) -> Body:
    """``body`` under the name that profiles show, rematerialised as the strategy says."""
    return jax.named_scope("layer")(rematerialised(body, strategy.remat))


def refuse_mapped(weights: Any) -> None:
    """Refuse to map a unit over its own weights in breadth.

    Args:
        weights: whether they are mapped: a pytree of bools.

    Raises:
        ConfigurationError: one is.
    """
    if any(jax.tree.leaves(weights)):
        raise ConfigurationError(
            "a unit is mapped over its own weights (by jax.vmap in the model?), which micro-batches in "
            'breadth do not allow: set accumulate_order="depth".'
        )


class UnitInputs(NamedTuple):
    """What a unit's body reads beside whole weights.

    Attributes:
        scales: of the operands of fp8 products, by name.
        seeds: of its adapters' dropout; one per layer, if the unit is stacked.
    """

    scales: dict[str, Array]
    seeds: Seed


class UnitParts(NamedTuple):
    """The parameters of a unit, by what happens to them.

    Attributes:
        comm: their communication.
        sources: of the trained ones, and of those frozen ones that cross nodes as they do.
        sinks: of the trained ones.
        seed: salts stochastic rounding.
        copies: delta's, of the trained ones, if the unit updates them itself; else None.
        frozen: secondary partitions of the other frozen ones.
        inputs: for the unit's body.
    """

    comm: UnitComm
    sources: tuple[Any, ...]
    sinks: Values
    seed: Seed
    copies: Values | None
    frozen: tuple[Any, ...]
    inputs: UnitInputs


def take_apart(weights: Sequence[Sharded]) -> UnitParts:
    """The parameters of a unit, adapters included, by what happens to them."""
    trained, frozen = _flattened(weights)
    strategy = (trained or frozen)[0].strategy
    comm = UnitComm(strategy, tuple(w.leaf for w in trained), tuple(w.leaf for w in frozen))
    copies = tuple(weight.copy for weight in trained if weight.copy is not None)
    scales = {w.leaf.name: taken(w.source.scale) for w in (*trained, *frozen) if isinstance(w.source, Scaled)}
    seed = weights[0].seed
    seeds = taken(seed)
    if any(weight.lora is not None and weight.lora.dropout for weight in weights):
        seeds = mix(seeds, next(_calls.get()))
    held = [w.source for w in frozen]
    crossing = held if strategy.frozen == "primary" else []
    return UnitParts(
        comm,
        (*(w.source for w in trained), *crossing),
        tuple(w.sink for w in trained if w.sink is not None),
        seed,
        copies or None,
        () if crossing else tuple(held),
        UnitInputs(scales, seeds),
    )


def _flattened(weights: Sequence[Sharded]) -> tuple[list[Sharded], list[Sharded]]:
    """A unit's trained parameters, adapters included, and the frozen ones: the order of whole weights."""
    every = [part for weight in weights for part in (weight, *weight.adapter)]
    return [w for w in every if not w.leaf.frozen], [w for w in every if w.leaf.frozen]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_whole(comm: UnitComm, secondary: Values, sinks: Values, seed: Seed) -> Values:
    """Whole parameters, whose gradients of any order go to the sinks."""
    del sinks, seed
    return comm.to_whole(secondary)


def _to_whole_fwd(comm: UnitComm, secondary: Values, sinks: Values, seed: Seed) -> tuple[Values, Seed]:
    return _to_whole(comm, secondary, sinks, seed), seed


def _delivered(comm: UnitComm, grads: Values, seed: Seed) -> Values:
    """Gradients at the sinks. They are not differentiated again: kernels that encode have no derivative.

    Nothing is lost by that: a loss with a gradient in it takes it with respect to activations, and discards
    the weights' gradients that arise on the way.
    """
    return comm.to_sink(lax.stop_gradient(grads), seed)


def _to_whole_bwd(comm: UnitComm, seed: Seed, grads: Values) -> Any:
    return None, _delivered(comm, grads, seed), None


_to_whole.defvjp(_to_whole_fwd, _to_whole_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def call_gathered(
    comm: UnitComm, body: Body, sources: tuple[Values, Values], sinks: Values, seed: Seed, inputs: Any
) -> Any:
    """``call_unit`` for weights that ``take_apart`` has taken apart; ``sources`` are trained and frozen."""
    del sinks, seed
    trained, frozen = taken(sources)
    if trained or comm.strategy.keep != "full":
        # Without the barrier the compiler may gather every unit's weights before the first is used.
        (trained, frozen), inputs = lax.optimization_barrier(((trained, frozen), inputs))
    return body(comm.to_whole(comm.to_secondary(comm.strategy.source, trained, frozen)), inputs)


def _call_fwd(
    comm: UnitComm, body: Body, sources: tuple[Values, Values], sinks: Values, seed: Seed, inputs: Any
) -> Any:
    strategy = comm.strategy
    held, inputs = lax.optimization_barrier((taken(sources), inputs))
    started = comm.to_secondary(strategy.source, *lax.stop_gradient(held))
    # A scan's own input is kept as it came, and so is not stacked a second time for the backward pass.
    kept = sources[0] if strategy.source == strategy.keep else started[: len(comm.leaves)]
    vjp: Any
    out, vjp = jax.vjp(body, _to_whole(comm, started, sinks, seed), inputs)
    # Whole weights are not residuals: the backward pass gathers them again.
    _, *others = vjp.args_res
    return out, ((kept, sources[1]), sinks, vjp.replace(args_res=[None, *others]), seed)


def _call_bwd(comm: UnitComm, body: Body, residuals: Any, cotangent: Any) -> Any:
    del body
    kept, sinks, vjp, seed = residuals
    kept, seed = taken((kept, seed))
    # The second gather waits for the cotangent and is not merged with the first.
    kept, vjp, cotangent = lax.optimization_barrier((kept, vjp, cotangent))
    secondary = comm.to_secondary(comm.strategy.keep, *lax.stop_gradient(kept))
    # If the loss has a gradient of its own in it, this gather has a gradient, too.
    whole = _to_whole(comm, secondary, sinks, mix(seed, 1))
    grads, inputs = vjp.replace(args_res=[whole, *vjp.args_res[1:]])(cotangent)
    return None, _delivered(comm, grads, seed), None, inputs


call_gathered.defvjp(_call_fwd, _call_bwd)
