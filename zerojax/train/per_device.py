"""One device's part of a step, inside ``shard_map``: forward and backward, last hops.

The order of a training step:

1. ``zerojax.train.pass_weights`` brings weights to the level at which units find them: delta's copies are
   updated (but those of stacks are in 2, layer by layer), stages 0 to 2 gather everything, stage 3 does
   nothing yet.
2. ``accumulate`` runs micro-batches forward and backward, one by one or all through a unit before the next
   (``zerojax.schedule.breadth_first``); units gather and reduce as they are called.
3. ``to_owners`` takes the hops that are taken once per step.

Each loss is weighted by its number of tokens, and the sum over the world divided once by all tokens: the
result is the mean over all tokens, however they are spread.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.errors import TraceContextError
from jax import lax
from jaxtyping import Array, Float32, Num, PyTree

from zerojax.adapters import Bound, ModelState, call_loss
from zerojax.adapters.own_tokens import sharing_rows
from zerojax.adapters.weight_sum import master_weights
from zerojax.adapters.world_sum import over_world
from zerojax.comm.reduction import GradientReduction, Values
from zerojax.errors import ConfigurationError
from zerojax.schedule.breadth_first import over_micro_batches
from zerojax.schedule.layer_update import LayerState, LayerUpdate, with_facts
from zerojax.schedule.partition import is_float
from zerojax.schedule.sharded import InOneBranch, is_sharded, translated_errors
from zerojax.schedule.unit import numbered_calls
from zerojax.sharding.layout import to_stored
from zerojax.sharding.mesh import AXES, LOCAL
from zerojax.sharding.param_tree import Path
from zerojax.sharding.strategy import DIFFERING
from zerojax.sharding.wire_format import Seed, mix
from zerojax.train.backward_update import BackwardUpdate
from zerojax.train.batch import Batch, map_batch, split_rows, unmarked
from zerojax.train.blocks import Blocks, flat_blocks, reduce_by_group, without_padding
from zerojax.train.branches import ROW, Axes, Branches
from zerojax.train.copies import ByPath
from zerojax.train.pass_weights import PassWeights, Placed, place_weights
from zerojax.train.shared_rows import refuse_unmixed, refuse_unshared
from zerojax.train.spec import ParamGroup, TrainSpec
from zerojax.train.weight_reads import refuse_assigned, refuse_calls, refuse_reads


class Sums(NamedTuple):
    """Sums over tokens of the loss and of each scalar in the loss function's aux; and the token count."""

    loss: Float32[Array, "*micro"]
    tokens: Float32[Array, "*micro"]
    aux: dict[str, Num[Array, "*micro"]]


class Outcome(NamedTuple):
    """The results of forward passes, besides gradients.

    Attributes:
        sums: over this device's tokens.
        model_state: from one pass, the entries of ``TrainState.model_state`` that the model changed; from
            ``accumulate``, all of them.
        copies: from one pass, the secondary partitions that units hold afterwards; from ``accumulate``,
            ``TrainState.copies``.
        probes: from one pass, of stacks that the backward pass updates (``zerojax.schedule.layer_update``).
    """

    sums: Sums
    model_state: ModelState
    copies: ByPath
    probes: dict[Path, Array]


Forward = Callable[[TrainSpec, Placed, ModelState, Batch, Seed], tuple[Array, Outcome]]
type Run[T] = Callable[[Any, Batch, Array], T]
"""A function of a bound model, rows of a batch, and a key."""
Sinks = dict[Path, Num[Array, "..."] | LayerState]
"""By path, zeros whose cotangents are gradients, or what the backward pass updates."""
type _Hop = Callable[[GradientReduction, Values, Seed, Values | None], tuple[Values, Values | None]]
"""A method of ``GradientReduction`` that takes sums over nodes; see ``reduce_node``."""
TOKENS = "tokens"


def accumulate(
    spec: TrainSpec,
    weights_for: Callable[[Sequence[ParamGroup]], PassWeights],
    model_state: ModelState,
    batch: Batch,
    seed: Seed,
    update: BackwardUpdate | None = None,
) -> tuple[Blocks, dict[Path, LayerState], Outcome]:
    """Run forward and backward over this device's micro-batches.

    ``weights_for`` goes from the units that update delta's copies themselves to the weights that the passes
    begin with. ``update`` is that of the stacks that the backward pass updates.

    Returns:
        Gradient sums at ``grad_level``; what has become of ``update.sinks``; and the other results. Delta's
        copies are up to date but for those of units that were not called.

    Raises:
        ConfigurationError: a stack cannot be updated in the backward pass, as the loss calls it.
    """
    zero = spec.zero
    sinks: Sinks = spec.by_path(spec.strategy.zero_sink)
    if update is not None:
        sinks |= update.sinks
    rows, at = _micro_batches(batch, zero.accumulate)
    first = at([x[0] for x in rows])
    rule = None if update is None else update.rule

    def checked(updating: Sequence[ParamGroup]) -> PassWeights:
        weights = weights_for(updating)
        _check(spec, weights, sinks, model_state, first, seed, _loss_of(spec), rule=rule)
        return weights

    try:
        weights = checked(spec.updating)
    except (TraceContextError, InOneBranch) as error:
        if update is not None:
            raise ConfigurationError(_TRANSFORMED) from error
        # Flax lets nothing leave a function that JAX itself transforms (jax.checkpoint, jax.grad, lax.cond),
        # and all branches of nnx.cond change the same. If a Stack is called in one, copies are updated
        # before the pass, not in it.
        if not spec.updating:
            raise
        weights = checked(())

    def run(forward: Forward, model_state: ModelState, batch: Batch, seed: Seed) -> tuple[Outcome, Sinks]:
        def loss(sinks: Sinks) -> tuple[Array, Outcome]:
            placed = place_weights(spec, weights, sinks, seed, rule=rule)
            total, outcome = forward(spec, placed, model_state, batch, seed)
            if update is not None:
                metrics, count = means(over(spec.world.axes, outcome.sums))
                facts = update.facts(metrics["loss"], count)
                total = with_facts(total, list(outcome.probes.values()), facts)
            return total, outcome

        (_, outcome), grads = jax.value_and_grad(loss, has_aux=True)(sinks)
        return outcome, grads

    updated: ByPath = {}
    if zero.passes == 1:
        forward = _forward if zero.accumulate == 1 else _forward_in_breadth
        (sums, changed, updated, _), grads = run(forward, model_state, batch, mix(seed, 0))
    else:

        def body(
            carry: tuple[tuple[Sinks, Sums], ModelState], xs: tuple[list[Array], Array]
        ) -> tuple[tuple[tuple[Sinks, Sums], ModelState], None]:
            total, changed = carry
            rows, index = xs
            outcome, grads = run(_forward, model_state | changed, at(rows), mix(seed, index))
            return (jax.tree.map(jnp.add, total, (grads, outcome.sums)), outcome.model_state), None

        shapes, _ = jax.eval_shape(functools.partial(run, _forward), model_state, first, seed)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sinks, shapes.sums))
        before = {name: model_state[name] for name in shapes.model_state}
        ((grads, sums), changed), _ = lax.scan(body, (zeros, before), (rows, jnp.arange(zero.accumulate)))
    model_state = model_state | _shared(changed)
    fresh = {path: copy for path, copy in updated.items() if path in weights.updating}
    done = {path: x for path, x in grads.items() if isinstance(x, LayerState)}
    grads = {path: x for path, x in grads.items() if not isinstance(x, LayerState)}
    return grads, done, Outcome(sums, model_state, weights.copies | fresh, {})


_TRANSFORMED = (
    "the loss calls a Stack in a function that JAX transforms (jax.checkpoint, jax.grad, lax.cond), or in "
    "one branch of several (nnx.cond), and its layers are updated in their backward pass: set "
    "update_in_backward=False."
)


def evaluate(
    spec: TrainSpec, weights: PassWeights, model_state: ModelState, batch: Batch, seed: Seed
) -> Sums:
    """Run forward only; returns the sums over the world."""
    sinks = spec.by_path(spec.strategy.zero_sink)
    _check(spec, weights, sinks, model_state, batch, seed, _loss_of(spec), train=False)
    placed = place_weights(spec, weights, sinks, seed, train=False)
    _, outcome = _forward(spec, placed, model_state, batch, seed, train=False)
    return over(AXES, outcome.sums)


def predict[T: PyTree[Array]](
    spec: TrainSpec,
    weights: PassWeights,
    model_state: ModelState,
    batch: Batch,
    seed: Seed,
    fn: Callable[[Any, Batch], T],
    *,
    adapters: bool,
) -> T:
    """What ``fn(model, batch)`` returns for this device's rows: arrays whose leading axis is those rows.

    Raises:
        ConfigurationError: an array has another leading axis, or differs between the devices of a row.
    """
    sinks = spec.by_path(spec.strategy.zero_sink)

    def call(model: Any, batch: Batch, _: Array) -> T:
        return fn(model, batch)

    differing = _check(spec, weights, sinks, model_state, batch, seed, call, train=False)
    placed = place_weights(spec, weights, sinks, seed, train=False, adapters=adapters)
    _, result = _call(spec, placed, model_state, batch, seed, call, train=False)
    rows = {x.shape[0] for x in split_rows(batch)[0]}
    for x, axes in zip(jax.tree.leaves(result), differing, strict=True):
        if ROW in axes:
            raise ConfigurationError(
                f"predict_step: fn returned an array of shape {jnp.shape(x)} that differs between the "
                f"{spec.zero.sequence_parallel} devices of a row (sequence_parallel), such as what it has of "
                "its own tokens: let fn return whole rows of it, zerojax.whole_rows(x)."
            )
        if not jnp.ndim(x) or x.shape[0] not in rows:
            raise ConfigurationError(
                f"predict_step: fn returned an array of shape {jnp.shape(x)} for a batch of {max(rows)} rows "
                "a device: the leading axis of each result is the batch."
            )
    return result


def to_owners(spec: TrainSpec, grads: Blocks, residual: Blocks, seed: Seed) -> tuple[Blocks, Blocks]:
    """Take gradients over the hops that are taken once per step.

    ``grads`` are sums at ``grad_level``; residuals, with error feedback, ``[.., secondary]``, else there are
    none.

    Returns:
        The sums over the world, stored like the parameters; and the next residuals.
    """
    strategy = spec.strategy
    if strategy.grad_level == "primary":
        if not strategy.sums_in_pass:
            grads, residual = _to_all_nodes(spec, grads, residual, seed)
        return _without_padding(spec, grads), residual
    if strategy.grad_level == "secondary":
        grads, residual = _take_hop(spec, GradientReduction.reduce_node, grads, residual, seed)
        grads, residual = _to_all_nodes(spec, grads, residual, seed)
        return _without_padding(spec, grads), _without_padding(spec, residual, LOCAL)

    def reduce(reduction: GradientReduction, own: Seed, whole: Values) -> Values:
        sums = reduction.reduce(whole, own)
        return reduction.all_gather_sum(sums) if spec.zero.stage == 0 else sums

    sums = reduce_by_group(spec, reduce, grads, seed=seed)
    if spec.zero.stage == 0:
        stored = {leaf.path: to_stored(sums[leaf.path], leaf) for leaf in spec.leaves}
        return flat_blocks(stored, spec.leaves), residual
    return _without_padding(spec, sums), residual


def means(sums: Sums) -> tuple[dict[str, Array], Array]:
    """Means over all tokens from sums over the world, and the number of tokens."""
    totals = sums.aux | {"loss": sums.loss}
    metrics = {name: total / sums.tokens for name, total in totals.items()}
    return metrics | ({TOKENS: sums.tokens} if TOKENS in sums.aux else {}), sums.tokens


def _check(
    spec: TrainSpec,
    weights: PassWeights,
    sinks: Sinks,
    model_state: ModelState,
    batch: Batch,
    seed: Seed,
    run: Run[Any],
    *,
    train: bool = True,
    rule: LayerUpdate | None = None,
) -> list[Axes]:
    """Trace a function of the model, to refuse it if it reads weights of units outside their calls, assigns
    to weights, calls units on some devices only, or shares rows in part; adds nothing to the program.

    Returns:
        What each of its results differs along; see ``Branches.refuse_divergent``.
    """

    def traced(placed: dict[Path, Any], model_state: ModelState, batch: Batch) -> PyTree[Array]:
        masters = place_weights(spec, weights, sinks, seed).masters
        bound, result = _call(spec, Placed(placed, masters), model_state, batch, seed, run, train=train)
        return bound.model_state(), result, bound.replaced() if train else {}

    placed = jax.eval_shape(lambda: place_weights(spec, weights, sinks, seed, rule=rule).weights)
    closed, (_, _, replaced) = jax.make_jaxpr(traced, return_shape=True)(placed, model_state, batch)
    jaxpr = closed.jaxpr
    refuse_assigned(jaxpr, placed, replaced)
    refuse_reads(jaxpr, placed)
    if rule is not None:
        refuse_calls(jaxpr, placed, {g.leaves[0].path: str(g.unit) for g in spec.updated_in_backward})
    refuse_unshared(jaxpr, spec.zero.sequence_parallel)
    mesh = frozenset(spec.axes)
    followed = mesh | {ROW} if spec.zero.sequence_parallel > 1 else mesh
    branches = Branches(followed, spec.strategy.backward_axes & mesh if train else frozenset())
    differing = [
        _differing(weight)
        for weight in jax.tree.leaves(placed, is_leaf=is_sharded)
        for _ in jax.tree.leaves(weight)
    ]
    rows = jax.tree.leaves(map_batch(lambda _: frozenset(AXES), lambda _: frozenset(), batch))
    state: list[frozenset[str]] = [frozenset()] * len(model_state)
    while True:
        after = branches.refuse_divergent(jaxpr, [*differing, *state, *rows])
        if spec.zero.passes == 1 or not train or after[: len(state)] == state:
            refuse_unmixed(jaxpr, spec.zero.sequence_parallel, branches.mixed)
            return after[len(state) :]
        state = after[: len(state)]  # the next micro-batch begins with it


def _differing(weight: object) -> frozenset[str]:
    """The mesh axes along which the values of a weight in a model differ between devices."""
    if not is_sharded(weight):
        return DIFFERING["full"]
    own_part = weight.leaf.parts > 1
    return DIFFERING["secondary" if own_part and weight.weight.level == "full" else weight.weight.level]


def _loss_of(spec: TrainSpec) -> Run[tuple[Array, dict[str, Array]]]:
    return functools.partial(call_loss, spec.loss_fn)


def _call[T](
    spec: TrainSpec,
    placed: Placed,
    model_state: ModelState,
    batch: Batch,
    seed: Seed,
    run: Run[T],
    *,
    train: bool,
) -> tuple[Bound, T]:
    """Run a function of the model on one micro-batch; returns the model after it, and its result."""
    own = mix(seed, lax.axis_index(AXES))
    key = jax.random.wrap_key_data(jnp.stack([own, mix(own, 1)]), impl="threefry2x32")
    bound = spec.adapter.bind(placed.weights, model_state, train=train, key=key)
    with (
        master_weights(bound.model, placed.masters),
        over_world(spec.axes),
        sharing_rows(spec.zero.sequence_parallel),
        numbered_calls(),
        translated_errors(),
    ):
        return bound, run(bound.model, unmarked(batch), key)


def _forward(
    spec: TrainSpec, placed: Placed, model_state: ModelState, batch: Batch, seed: Seed, *, train: bool = True
) -> tuple[Array, Outcome]:
    """The loss of one micro-batch, times its tokens; and the other results."""
    bound, (value, aux) = _call(spec, placed, model_state, batch, seed, _loss_of(spec), train=train)
    # The loss alone is differentiated, even if the number of tokens is computed from the weights.
    count = lax.stop_gradient(jnp.asarray(aux.get(TOKENS, 1), jnp.float32))
    total = value * count
    sums = Sums(total, count, {name: x * count for name, x in aux.items()})
    changed = {name: x for name, x in bound.model_state().items() if x is not model_state[name]}
    return total, Outcome(jax.tree.map(lax.stop_gradient, sums), changed, bound.secondary(), bound.probes())


def _forward_in_breadth(
    spec: TrainSpec, placed: Placed, model_state: ModelState, batch: Batch, seed: Seed
) -> tuple[Array, Outcome]:
    """``_forward`` for all micro-batches at once; the state is their mean, as it is over devices."""

    rows, at = _micro_batches(batch, spec.zero.accumulate)

    def forward(
        rows: list[Array], index: Array
    ) -> tuple[Array, Sums, ModelState, tuple[ByPath, dict[Path, Array]]]:
        total, (sums, changed, updated, probes) = _forward(
            spec, placed, model_state, at(rows), mix(seed, index)
        )
        return total, sums, changed, (updated, probes)

    run = over_micro_batches(forward, out_axes=(0, 0, 0, None))
    totals, sums, changed, (updated, probes) = run(rows, jnp.arange(spec.zero.accumulate))
    total, sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), (totals, sums))
    mean = jax.vmap(lambda x: _mean(x, "micro"), axis_name="micro", out_axes=None)
    changed = {name: mean(x) if is_float(x) else x[0] for name, x in changed.items()}
    return total, Outcome(sums, changed, updated, probes)


def _micro_batches(batch: Batch, count: int) -> tuple[list[Array], Callable[[list[Array]], Batch]]:
    """A batch's rows in ``count`` parts along a new leading axis, and the function from a part to a batch."""
    rows, join = split_rows(batch)
    return [x.reshape(count, x.shape[0] // count, *x.shape[1:]) for x in rows], join


def _shared(model_state: ModelState) -> ModelState:
    """The mean over the world of state that devices compute from their own data (batch statistics)."""
    with jax.named_scope("metrics"):
        return {name: _mean(x, AXES) if is_float(x) else x for name, x in model_state.items()}


def _mean(x: Array, axes: str | tuple[str, ...]) -> Array:
    """The mean over mapped axes, in which elements that are equal everywhere keep their bits.

    It never overflows: what is summed is a fraction of each, in fp32 or more.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_mean(x.real, axes), _mean(x.imag, axes))
    count = lax.axis_size(axes)
    fraction = 2.0 ** -(count - 1).bit_length()  # a power of two, which rounds nothing
    summands = x.astype(jnp.float32 if x.dtype.itemsize < 4 else x.dtype) * fraction
    mean = (lax.psum(summands, axes) / (count * fraction)).astype(x.dtype)
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    wide = bits.astype(jnp.promote_types(bits.dtype, jnp.uint32))  # NCCL reduces no 16-bit integers
    largest, inverted = lax.pmax((wide, ~wide), axes)
    same = lax.bitcast_convert_type(largest.astype(bits.dtype), x.dtype)
    return jnp.where(largest == ~inverted, same, mean)


def over(axes: tuple[str, ...], sums: Sums) -> Sums:
    """Sums over all devices along mesh axes."""
    with jax.named_scope("metrics"):
        return lax.psum(sums, axes)


def _without_padding(spec: TrainSpec, blocks: Blocks, axes: str | tuple[str, ...] = ()) -> Blocks:
    """``without_padding`` for all blocks."""
    mine = (leaf for leaf in spec.leaves if leaf.path in blocks)
    return {**blocks, **{leaf.path: without_padding(leaf, blocks[leaf.path], axes) for leaf in mine}}


def _to_all_nodes(spec: TrainSpec, sums: Blocks, residual: Blocks, seed: Seed) -> tuple[Blocks, Blocks]:
    """Send the owners' sums to all nodes for the leaves of which every node holds the master weight."""
    mine = {leaf.path: sums[leaf.path] for leaf in spec.leaves if leaf.in_every_node}
    kept = {path: residual[path] for path in mine} if residual else {}
    everywhere, kept = _take_hop(spec, GradientReduction.to_all_nodes, mine, kept, seed)
    return sums | everywhere, residual | kept


def _take_hop(
    spec: TrainSpec, hop: _Hop, sums: Blocks, residual: Blocks, seed: Seed
) -> tuple[Blocks, Blocks]:
    """Take a hop with the gradients of all groups; with error feedback ``residual`` has as many paths."""

    def exactly(reduction: GradientReduction, own: Seed, values: Values) -> Values:
        return hop(reduction, values, own, None)[0]

    def with_feedback(
        reduction: GradientReduction, own: Seed, values: Values, residuals: Values
    ) -> Sequence[tuple[Array, Array]]:
        arrived, kept = hop(reduction, values, own, residuals)
        return list(zip(arrived, kept or residuals, strict=True))

    if not residual:
        return reduce_by_group(spec, exactly, sums, seed=seed), residual
    both = reduce_by_group(spec, with_feedback, sums, residual, seed=seed)
    return {path: x for path, (x, _) in both.items()}, {path: r for path, (_, r) in both.items()}
