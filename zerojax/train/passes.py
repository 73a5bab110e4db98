"""One device's part of a step, inside ``shard_map``: forward and backward, last hops.

The order of a training step:

1. ``zerojax.train.pass_weights`` brings weights to the level at which units receive them. Delta's replicas
   are refreshed, except in stacks, where 2 does it layer by layer. Stages 0 to 2 gather everything, stage 3
   nothing yet.
2. ``accumulate`` runs micro-batches forward and backward, one by one or all through a unit before the next
   (``zerojax.schedule.breadth_first``). Units gather and reduce as they are called. A ``ModelPass`` is one
   run of the model. It is traced once, and checked before it is differentiated (``loss_checks``).
3. ``zerojax.train.blocks.to_owners`` sends gradients over the hops that are made once per step.

Each loss is weighted by its number of tokens, and the sum over all devices is divided once by all tokens. The
result is the mean over all tokens, however they are spread.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.errors import TraceContextError
from jax import lax
from jaxtyping import Array, Num, PyTree

from zerojax.adapters.adapter import ModelState
from zerojax.adapters.loss import is_array
from zerojax.errors import ConfigurationError
from zerojax.schedule.layer_update import LayerState, LayerUpdate, as_encoded, as_floats
from zerojax.schedule.transforms import is_float
from zerojax.schedule.user_code import InOneBranch
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import AXES
from zerojax.sharding.param_tree import Path
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.sharding.wire_format import Seed, mix
from zerojax.train.batch import Batch, have_rows, micro_batches
from zerojax.train.blocks import Blocks
from zerojax.train.fields import Shards
from zerojax.train.loss_checks import ROW, Axes, check_program
from zerojax.train.model_pass import ModelPass, Outcome, Placed, Sinks, Sums, mean_over
from zerojax.train.pass_weights import pass_weights
from zerojax.train.spec import ParamGroup, TrainSpec, with_spec, without_spec

_TRANSFORMED = (
    "the loss calls a Stack in a function that JAX transforms (jax.checkpoint, jax.grad, lax.cond), or in "
    "one branch of several (nnx.cond). Its layers cannot be updated in their backward pass then: set "
    "update_in_backward=False."
)


def zero_sinks(spec: TrainSpec) -> dict[Path, Num[Array, "..."]]:
    """Sinks whose cotangents are gradients: zeros with their shapes at ``grad_level``, for all layers."""
    strategy = spec.strategy
    if strategy.grad_level == "full":
        dtype = strategy.grad_dtype
        return {leaf.path: jnp.zeros(leaf.on_device.unsharded_shape, dtype) for leaf in spec.leaves}
    shapes = {leaf.path: (*leaf.stack, grad_size(strategy, leaf)) for leaf in spec.leaves}
    return {path: jnp.zeros(shape, jnp.float32) for path, shape in shapes.items()}


def grad_size(strategy: ShardingStrategy, leaf: ParamLayout) -> int:
    """Elements on one device of one layer's gradient at ``grad_level``, if that is not "full"."""
    if strategy.grad_level == "secondary":
        return leaf.secondary
    return leaf.owned if strategy.sums_in_pass else leaf.shard


def accumulate(
    spec: TrainSpec,
    shards: Shards,
    batch: Batch,
    states: Mapping[Path, LayerState],
    rule: LayerUpdate | None = None,
) -> tuple[Blocks, dict[Path, LayerState], Outcome[Sums]]:
    """Run forward and backward over this device's micro-batches.

    With a ``rule`` the backward pass updates the ``states``, by the path of their weights.

    Returns:
        Gradient sums at ``grad_level``; ``states`` after the update; and the other results. Delta's replicas
        are refreshed, except for units that were not called.

    Raises:
        ConfigurationError: a stack cannot be updated in the backward pass, because of how the loss calls it.
    """
    zero, seed = spec.zero, shards.step_seed
    sinks: Sinks = zero_sinks(spec) | jax.tree.map(as_floats, dict(states))
    # Traced once for all micro-batches.
    linearised = jax.jit(with_spec(spec, ModelPass.linearised), inline=True)
    begin = functools.partial(_begin, spec, shards, sinks, rule, linearised)
    if zero.passes == 1:
        model, _ = begin(batch)
        (sums, changed, updated, *_), grads = _gradients(linearised, model, batch, mix(seed, 0))
    else:
        rows, at = micro_batches(batch, zero.accumulate)
        model, shapes = begin(at([x[0] for x in rows]))
        (sums, changed, updated, *_), grads = _in_depth(linearised, model, shapes, rows, at, seed)
    model_state = shards.model_state | _shared(spec, changed)
    replicas = {path: updated.get(path, replica) for path, replica in model.given.replicas.items()}
    done = {path: x for path, x in grads.items() if isinstance(x, LayerState)}
    done = jax.tree.map(lambda x, before: as_encoded(x, before.dtype), done, dict(states))
    grads = {path: x for path, x in grads.items() if not isinstance(x, LayerState)}
    return grads, done, Outcome(sums, model_state, replicas, [], {})


def _begin(
    spec: TrainSpec,
    shards: Shards,
    sinks: Sinks,
    rule: LayerUpdate | None,
    linearised: jax.stages.Wrapped,
    batch: Batch,
) -> tuple[ModelPass, Outcome[Any]]:
    """The model, checked with the first micro-batch, and the shapes of a pass's outcome."""

    def checked(updating: Sequence[ParamGroup]) -> tuple[ModelPass, Outcome[Any]]:
        model = ModelPass(
            pass_weights(spec, shards, updating=updating), sinks, shards.model_state, spec, rule
        )
        traced = linearised.trace(without_spec(model), batch, mix(shards.step_seed, 0))
        check_program(model, batch, traced)
        return model, traced.out_info[0]

    try:
        return checked(spec.updating)
    except (TraceContextError, InOneBranch) as error:
        if rule is not None:
            raise ConfigurationError(_TRANSFORMED) from error
        # Flax lets nothing leave a function that JAX itself transforms (jax.checkpoint, jax.grad, lax.cond),
        # and all branches of nnx.cond must change the same variables. If a Stack is called in one, replicas
        # are refreshed before the pass, not in it.
        if not spec.updating:
            raise
        return checked(())


def _gradients(
    linearised: jax.stages.Wrapped, model: ModelPass, batch: Batch, seed: Seed
) -> tuple[Outcome[Sums], Sinks]:
    """Run one pass forward and backward."""
    outcome, vjp = linearised(without_spec(model), batch, seed)
    (grads,) = vjp(jnp.ones_like(outcome.results.loss))
    return outcome, grads


def _in_depth(
    linearised: jax.stages.Wrapped,
    model: ModelPass,
    shapes: Outcome[Any],
    rows: list[Array],
    at: Callable[[Sequence[Array]], Batch],
    seed: Seed,
) -> tuple[Outcome[Sums], Sinks]:
    """Run one micro-batch after another; the first arguments are as in ``accumulate``.

    Returns the sums, with the state after the last micro-batch, and the gradients.
    """
    spec, model_state = model.spec, model.model_state

    def body(
        carry: tuple[tuple[Sinks, Sums, ModelState], ModelState], xs: tuple[list[Array], Array]
    ) -> tuple[tuple[tuple[Sinks, Sums, ModelState], ModelState], None]:
        total, before = carry
        rows, index = xs
        own = dataclasses.replace(model, model_state=model_state | before)
        outcome, grads = _gradients(linearised, own, at(rows), mix(seed, index))
        counts = _counts(spec, outcome.model_state)
        total = jax.tree.map(jnp.add, total, (grads, outcome.results, counts))
        return (total, outcome.model_state | jax.tree.map(jnp.zeros_like, counts)), None

    counted = _counts(spec, shapes.model_state)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (model.sinks, shapes.results, counted))
    before = {name: model_state[name] for name in shapes.model_state}
    (total, changed), _ = lax.scan(body, (zeros, before), (rows, jnp.arange(spec.zero.accumulate)))
    grads, sums, counts = total
    return Outcome(sums, changed | counts, {}, [], {}), grads


def evaluate(spec: TrainSpec, shards: Shards, batch: Batch) -> Sums:
    """Run forward only; returns the sums over all devices."""

    def forward(model: ModelPass, placed: Placed, batch: Batch, seed: Seed) -> Outcome[Sums]:
        return model.forward(placed, batch, seed)[1]

    return _checked(spec, shards, batch, forward)[0].over(AXES)


def predict[T: PyTree[Array]](
    spec: TrainSpec, shards: Shards, batch: Batch, fn: Callable[[Any, Batch], T], *, adapters: bool
) -> T:
    """The results of ``fn(model, batch)`` for this device's rows: arrays whose leading axis counts these
    rows.

    Raises:
        ConfigurationError: an array has another leading axis, or differs between the devices of a row.
    """

    def call(model: ModelPass, placed: Placed, batch: Batch, seed: Seed) -> Outcome[T]:
        _, result = model.call(placed, batch, seed, lambda bound, batch, _: _arrays(fn(bound, batch)))
        return Outcome(result, {}, {}, [], {})

    result, differing = _checked(spec, shards, batch, call, adapters=adapters)
    rows = {x.shape[0] for x in itertools.compress(jax.tree.leaves(batch), have_rows(batch))}
    for x, axes in zip(jax.tree.leaves(result), jax.tree.leaves(differing), strict=True):
        if ROW in axes:
            raise ConfigurationError(
                f"predict_step: fn returned an array of shape {jnp.shape(x)} that differs between the "
                f"{spec.zero.sequence_parallel} devices of a row (sequence_parallel), such as values for a "
                "device's own tokens. Let fn return whole rows: zerojax.whole_rows(x)."
            )
        if not jnp.ndim(x) or x.shape[0] not in rows:
            raise ConfigurationError(
                f"predict_step: fn returned an array of shape {jnp.shape(x)} for a batch of {max(rows)} rows "
                "a device: the leading axis of each result is the batch."
            )
    return result


def _arrays[T: PyTree[Array]](result: T) -> T:
    """Refuse results of ``predict_step``'s function that are no arrays."""
    if other := [x for x in jax.tree.leaves(result) if not is_array(x)]:
        raise ConfigurationError(
            f"predict_step: fn returned {type(other[0]).__name__!r} among its results: return a pytree of "
            "arrays, whose leading axis is the batch."
        )
    return result


def _checked[T](
    spec: TrainSpec,
    shards: Shards,
    batch: Batch,
    run: Callable[[ModelPass, Placed, Batch, Seed], Outcome[T]],
    *,
    adapters: bool = True,
) -> tuple[T, PyTree[Axes]]:
    """The results of a pass that is not differentiated, and the axes along which they differ."""
    given, seed = pass_weights(spec, shards), shards.step_seed
    model = ModelPass(given, zero_sinks(spec), shards.model_state, spec, train=False, adapters=adapters)

    def on_placed(model: ModelPass, batch: Batch, seed: Seed) -> tuple[Outcome[T]]:
        return (run(model, model.place(seed), batch, seed),)

    program = jax.jit(with_spec(spec, on_placed), inline=True)
    differing = check_program(model, batch, program.trace(without_spec(model), batch, seed))
    (outcome,) = program(without_spec(model), batch, seed)
    return outcome.results, differing.results


def _shared(spec: TrainSpec, model_state: ModelState) -> ModelState:
    """State that devices compute from their own data: the mean over all devices, or the sum of counts."""
    with jax.named_scope("metrics"):
        means = {name: mean_over(x, AXES) if is_float(x) else x for name, x in model_state.items()}
        counts = _counts(spec, model_state)
        return means | (lax.psum(counts, AXES) if counts else {})


def _counts(spec: TrainSpec, model_state: ModelState) -> ModelState:
    """The entries that count tokens; see ``zerojax.adapters.roles``."""
    return {name: x for name, x in model_state.items() if name in spec.adapter.counts}
