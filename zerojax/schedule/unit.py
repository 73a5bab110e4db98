"""A unit: a module whose weights are gathered just before use and dropped afterwards.

A unit's parameters reach the model as ``Sharded`` values, which carry everything that a gather needs. A call
of the unit goes through ``call_unit``, a ``custom_vjp`` that gathers the weights and runs the module. Its
backward pass gathers again, runs the module's own vjp and reduces the gradients to their owners.

A ``Weight`` knows from which level it is gathered. The ``ShardingStrategy`` says where its gradient ends.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Num, PyTree

from zerojax.comm.reduction import GradientReduction
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import LoRA
from zerojax.matmul.low_rank import LowRankOperand, with_adapters
from zerojax.matmul.operand import Fp8Operand, LayerOperand
from zerojax.matmul.replay import Value, at_matmuls
from zerojax.schedule.breadth_first import Flags, all_batched, map_microbatches, with_batching_rule
from zerojax.schedule.layer_update import LayerState, LayerUpdate
from zerojax.schedule.remat import rematerialised
from zerojax.schedule.transforms import Pullback, partition, pullback, split_arrays
from zerojax.schedule.user_code import read_outside
from zerojax.sharding.layout import ParamLayout, Values
from zerojax.sharding.mesh import AXES
from zerojax.sharding.param_tree import Path
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.sharding.wire_format import Seed, mix
from zerojax.weights import Weight, Weights, gradients_of, to_full, to_secondary

Arrays = PyTree[Array]
"""Activations, a module's other state, or its results."""
Inputs = tuple[Arrays, ...]
"""The arguments of a unit's ``Body`` besides its weights."""
Sinks = tuple[Array | LayerState, ...]
"""One for each trained parameter of a unit; either all are ``LayerState`` or none is."""
Body = Callable[..., Arrays]
"""A pure function of a unit's whole weights and of pytrees of arrays."""

READ_BY_UNIT = "zerojax: a weight read by its unit"
"""The ``checkpoint_name`` of a ``Sharded`` weight's arrays where its unit reads them.

``zerojax.train.loss_checks`` allows no other reads."""
SHARDED = "zerojax: the sharded weight "
"""The ``checkpoint_name`` of a ``Sharded`` weight's arrays in a model, with the weight's name behind it."""
WHOLE = "zerojax: the whole weight "
"""The ``checkpoint_name`` of a whole weight in a model, with the weight's name behind it."""
CALLED = "zerojax: a call of the stack with "
"""The ``checkpoint_name`` of the input of a stack that its backward pass updates, with a weight's name."""

CALLS: ContextVar[Iterator[int]] = ContextVar("numbers of calls")
"""Numbers for the calls of units in a pass, so that adapters drop different elements in each call."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sharded:
    """One parameter as its unit receives it: a value in the model, which scans slice like any other.

    Attributes:
        weight: at the level where the unit receives it.
        sink: zeros at ``ShardingStrategy.grad_level``, whose cotangent is the gradient. None if it is frozen.
        seed: salts stochastic rounding; one per layer, if the parameter is stacked.
        strategy: how it travels.
        adapter: A and B of its low-rank adapter, if it has one.
        lora: the adapter's settings.
        update: how the backward pass of its stack updates it, if its sink is a ``LayerState``.
        probe: the probe that a stack returned for ``with_facts``, in one weight of the stack.
    """

    weight: Weight
    sink: Num[Array, "..."] | LayerState | None
    seed: Seed
    strategy: ShardingStrategy = field(metadata={"static": True})
    adapter: tuple["Sharded", ...] = ()
    lora: LoRA | None = field(default=None, metadata={"static": True})
    update: LayerUpdate | None = None
    probe: Array | None = None

    def updated(self, replicas: Mapping[Path, Weight]) -> "Sharded":
        """The parameter and its adapter with refreshed replicas as their weights."""
        adapter = tuple(part.updated(replicas) for part in self.adapter)
        return replace(self, weight=replicas.get(self.weight.layout.path, self.weight), adapter=adapter)

    def __jax_array__(self) -> Array:
        """Refuse use outside a unit's call, where the whole weight does not exist."""
        raise ConfigurationError(read_outside(self.weight.layout.name))

    def __repr__(self) -> str:
        """The parameter's name, which ``translated_errors`` looks for in messages."""
        return f"Sharded({self.weight.layout.name!r})"


# Flax applies the operators of a parameter to its value.
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
_OTHERS = ["getitem", "setitem", "array", "neg", "pos", "abs", "lt", "le", "gt", "ge"]
for _operator in [*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS]:
    setattr(Sharded, f"__{_operator}__", lambda self, *_: self.__jax_array__())


def is_sharded(value: object) -> TypeGuard[Sharded]:
    """Whether a value is a unit's parameter as its unit receives it."""
    return isinstance(value, Sharded)


def materialise(weights: Sequence[Sharded]) -> Values:
    """Gather weights outside of units. They stay whole until the backward pass ends.

    Their gradients are reduced once, after all uses have contributed.
    """
    if not weights:
        return ()
    unit, _ = take_apart(weights)
    whole: Weights = _to_whole(unit.strategy, to_secondary(unit.weights), unit.sinks, unit.seed)
    by_path = {w.layout.path: lax.stop_gradient(w.values) if w.layout.frozen else w.values for w in whole}
    return tuple(by_path[w.weight.layout.path] for w in weights)


def call_unit[S, T: PyTree](
    run: Callable[[PyTree, S, tuple[object, ...], Mapping[str, object]], T],
    params: PyTree,
    state: S,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> T:
    """Run ``run(params, state, args, kwargs)``, whose ``params`` are gathered where they are ``Sharded``.

    ``run`` is a pure function of whole parameters of unsharded shape, of the unit's other state, and of
    arguments, which may hold leaves that are no arrays. It closes over nothing that is traced.

    Returns:
        The result of ``run``. Strings and Python numbers in it stay what they are. Cotangents of the weights
        go to their sinks; all others are ordinary ones.
    """
    weights, others, combine = partition(params, is_sharded, is_leaf=is_sharded)
    arrays, join = split_arrays((args, kwargs))
    joins: list[Callable[[Sequence[Array]], T]] = []

    def body(whole: Sequence[Array], state: S, others: Arrays, arrays: Sequence[Array]) -> Sequence[Array]:
        results, join_results = split_arrays(run(combine(whole, others), state, *join(arrays)))
        joins.append(join_results)
        return results

    unit, seeds = take_apart(weights)
    layer = on_operands(body, weights)

    def in_breadth(
        _: int, mapped: tuple[Flags, tuple[Flags, ...]], unit: Unit, inputs: Inputs
    ) -> tuple[Arrays, Flags]:
        """Run one micro-batch after another."""
        of_unit, of_inputs = mapped
        refuse_mapped(of_unit)
        if not any(jax.tree.leaves(of_inputs)):
            out = call_gathered(layer, unit, inputs)
            return out, all_batched(out, False)
        out = call_gathered(map_microbatches(layer, of_inputs), unit, inputs)
        return out, all_batched(out, True)

    call = with_batching_rule(in_breadth, functools.partial(call_gathered, layer))
    results = call(unit, ((seeds, state), others, arrays))
    return joins[-1](results)


def on_operands(body: Body, weights: Sequence[Sharded]) -> Body:
    """``body(weights, state, *args)`` as a function of whole weights in the order of ``take_apart``.

    ``body`` is a pure function of the operands that a model receives for its weights, and closes over nothing
    that is traced. Only static fields of ``weights`` are read.

    Returns:
        A function of ``(whole, (seeds, state), *args)``, with the ``seeds`` from ``take_apart``, in the name
        scope "layer". Its vjp keeps what the rematerialisation policy says.
    """
    slots = [(w.weight.layout, tuple(part.weight.layout.path for part in w.adapter), w.lora) for w in weights]
    in_place = weights[0].strategy.in_place
    plain = not in_place and all(w.lora is None and not w.weight.layout.fp8 for w in weights)
    run = body if plain else at_matmuls(body)

    def layer(whole: Weights, own: tuple[Seed, Arrays], *args: Arrays) -> Arrays:
        seeds, state = own
        by_path = {w.layout.path: w for w in whole}

        def operand(leaf: ParamLayout, adapter: tuple[Path, ...], lora: LoRA | None) -> Value:
            weight = by_path[leaf.path]
            value = LayerOperand(weight.values) if in_place and leaf.stack else weight.operand()
            if leaf.frozen:
                value = lax.stop_gradient(value)
            if lora is None:
                return value
            a, b = (by_path[path].values for path in adapter)
            if a.ndim == 3:
                whole = value.decoded() if isinstance(value, Fp8Operand) else weight.values
                return with_adapters(lax.stop_gradient(whole), a, b, lora, leaf.name)
            seed = mix(seeds, leaf.index, lax.axis_index(AXES)) if lora.dropout else jnp.uint32(0)
            return LowRankOperand.of(value, a, b, seed, lora, leaf.name)

        return run(tuple(operand(*slot) for slot in slots), state, *args)

    return jax.named_scope("layer")(rematerialised(layer, weights[0].strategy.remat))


def refuse_mapped(weights: Flags) -> None:
    """Refuse to map a unit over its own weights in breadth.

    Raises:
        ConfigurationError: at least one weight is mapped.
    """
    if any(jax.tree.leaves(weights)):
        raise ConfigurationError(
            "a unit is mapped over its own weights (by jax.vmap in the model?), which micro-batches in "
            'breadth do not allow: set accumulate_order="depth".'
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unit:
    """A unit's parameters, adapters included, grouped by their use; for a ``Stack``, of all layers.

    Attributes:
        weights: trained weights first, with the ones that every node holds last among them; then frozen
            weights. Each is at its own level.
        sinks: zeros whose cotangents are the gradients of the trained weights.
        seed: salts stochastic rounding; one per layer, if the unit is stacked.
        update: how the backward pass updates the trained weights, whose sinks are then ``LayerState``s; or
            None.
        strategy: how weights and gradients travel.
    """

    weights: Weights
    sinks: Sinks
    seed: Seed
    update: LayerUpdate | None
    strategy: ShardingStrategy = field(metadata={"static": True})

    def cotangent(self, sinks: Sinks) -> "Unit":
        """The cotangent of the unit, in which only the sinks have values."""
        none: PyTree[Array] = None
        return replace(self, weights=none, sinks=sinks, seed=none, update=none)


def take_apart(weights: Sequence[Sharded]) -> tuple[Unit, Seed]:
    """The parameters of a unit as a ``Unit``, and the seeds of its adapters' dropout."""
    every = [part for weight in weights for part in (weight, *weight.adapter)]
    ordered = sorted(every, key=lambda part: (part.weight.layout.frozen, part.weight.layout.in_every_node))
    seed = weights[0].seed
    seeds = checkpoint_name(seed, READ_BY_UNIT)
    if any(weight.lora is not None and weight.lora.dropout for weight in weights):
        seeds = mix(seeds, next(CALLS.get()))
    trained = tuple(part.sink for part in ordered if part.sink is not None)
    held = tuple(part.weight for part in ordered)
    update = next((part.update for part in ordered if part.update is not None), None)
    return Unit(held, trained, seed, update, weights[0].strategy), seeds


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_whole(strategy: ShardingStrategy, secondary: Weights, sinks: Sinks, seed: Seed) -> Weights:
    """Whole weights, whose gradients of any order go to the sinks."""
    del sinks, seed
    return to_full(secondary)


def _delivered(strategy: ShardingStrategy, cotangents: Weights, seed: Seed) -> Values:
    """Gradients at the sinks. They cannot be differentiated again, because kernels that encode have no
    derivative.

    That loses nothing: a loss that contains a gradient takes it with respect to activations, and discards the
    gradients of weights that are computed on the way.
    """
    gradients = lax.stop_gradient(gradients_of(cotangents))
    if strategy.grad_level == "full":
        return tuple(x.astype(strategy.grad_dtype) for x in gradients)
    return GradientReduction.of(strategy, [w.layout for w in cotangents]).reduce(gradients, seed)


def _to_whole_bwd(strategy: ShardingStrategy, seed: Seed, cotangents: Weights) -> tuple[None, Values, None]:
    return None, _delivered(strategy, cotangents, seed), None


_to_whole.defvjp(lambda *args: (_to_whole(*args), args[-1]), _to_whole_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def call_gathered(body: Body, unit: Unit, inputs: Inputs) -> Arrays:
    """Gather a ``Unit``'s weights, and run ``body(whole, *inputs)``."""
    weights = checkpoint_name(unit.weights, READ_BY_UNIT)
    if not all(w.layout.frozen and w.level == "full" for w in weights):
        # Without the barrier the compiler may gather every unit's weights before the first is used.
        weights, inputs = lax.optimization_barrier((weights, inputs))
    return body(to_full(to_secondary(weights)), *inputs)


class _Residuals(NamedTuple):
    """What a unit keeps for its backward pass.

    Attributes:
        unit: with the weights at the levels from which they are gathered again.
        vjp: the module's vjp, without whole weights.
    """

    unit: Unit
    vjp: Pullback


def _call_fwd(body: Body, unit: Unit, inputs: Inputs) -> tuple[Arrays, _Residuals]:
    held = checkpoint_name(unit.weights, READ_BY_UNIT)
    held, inputs = lax.optimization_barrier((held, inputs))
    secondary = to_secondary(lax.stop_gradient(held))
    out, vjp = pullback(body, _to_whole(unit.strategy, secondary, unit.sinks, unit.seed), *inputs)
    # Whole weights are not residuals: the backward pass gathers them again.
    _, *others = vjp.args_res
    each = zip(unit.weights, secondary, strict=True)
    kept = tuple(own if own.reaches(unit.strategy.keep) else gathered for own, gathered in each)
    return out, _Residuals(replace(unit, weights=kept), vjp.replace(args_res=[None, *others]))


def _call_bwd(body: Body, residuals: _Residuals, cotangent: Arrays) -> tuple[Unit, Inputs]:
    del body
    unit, vjp = residuals
    kept, seed = checkpoint_name((unit.weights, unit.seed), READ_BY_UNIT)
    # The second gather waits for the cotangent and is not merged with the first.
    kept, vjp, cotangent = lax.optimization_barrier((kept, vjp, cotangent))
    # If the loss contains a gradient, this gather is differentiated, too.
    secondary = to_secondary(lax.stop_gradient(kept))
    whole = _to_whole(unit.strategy, secondary, unit.sinks, mix(seed, 1))
    of_whole, *of_inputs = vjp.replace(args_res=[whole, *vjp.args_res[1:]])(cotangent)
    return unit.cotangent(_delivered(unit.strategy, of_whole, seed)), tuple(of_inputs)


call_gathered.defvjp(_call_fwd, _call_bwd)
