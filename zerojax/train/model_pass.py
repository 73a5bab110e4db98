"""One run of the model on a device, inside ``shard_map``: its weights in place, its call, its loss."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float32, Num

from zerojax.adapters.adapter import Bound, ModelState
from zerojax.adapters.loss import CONTEXT, LossContext, call_loss
from zerojax.schedule.breadth_first import over_micro_batches
from zerojax.schedule.layer_update import LayerState, LayerUpdate, with_facts
from zerojax.schedule.transforms import Pullback, holding, is_float
from zerojax.schedule.unit import CALLS, SHARDED, WHOLE, Sharded, is_sharded, materialise
from zerojax.schedule.user_code import translated_errors
from zerojax.sharding.mesh import AXES
from zerojax.sharding.param_tree import Path
from zerojax.sharding.wire_format import Seed, mix
from zerojax.train.batch import Batch, micro_batches, unmarked
from zerojax.train.pass_weights import ByPath, PassWeights
from zerojax.train.spec import ParamGroup, TrainSpec

type Run[T] = Callable[[Any, Batch, Array], T]
"""A function of a bound model, rows of a batch, and a key."""
Sinks = Mapping[Path, Num[Array, "..."] | LayerState]
"""By path, zeros whose cotangents are gradients, or arrays that the backward pass updates."""
TOKENS = "tokens"
RETURNED = "zerojax: returned by the loss"
"""The ``checkpoint_name`` of the results of a function of the model, and of the state that it changed."""
type Placed = dict[Path, Any]
"""The weights in a loss function's model: per path, ``Sharded`` in units and whole elsewhere."""


class Sums(NamedTuple):
    """Sums over tokens of the loss and of each scalar in the loss function's aux; and the token count."""

    loss: Float32[Array, "*micro"]
    tokens: Float32[Array, "*micro"]
    aux: dict[str, Num[Array, "*micro"]]

    def means(self) -> dict[str, Array]:
        """Means over all tokens: "loss" and each scalar of aux. Only "tokens", if aux has it, stays a sum."""
        totals = self.aux | {"loss": self.loss}
        means = {name: total / self.tokens for name, total in totals.items()}
        return means | ({TOKENS: self.tokens} if TOKENS in self.aux else {})

    def over(self, axes: tuple[str, ...]) -> "Sums":
        """The sums over all devices along mesh axes."""
        with jax.named_scope("metrics"):
            return lax.psum(self, axes)


class Outcome[T](NamedTuple):
    """The results of passes, besides gradients.

    Attributes:
        results: sums over this device's tokens, or the results of another function of the model.
        model_state: from one pass, the entries of ``TrainState.model_state`` that the model changed; from
            ``accumulate``, all of them.
        replicas: from one pass, the secondary partitions that units refreshed; from ``accumulate``,
            ``TrainState.replicas``.
        probes: from one pass, of stacks that the backward pass updates (``zerojax.schedule.layer_update``).
        replaced: from one pass, the weights outside units that other arrays replaced, even of equal values.
    """

    results: T
    model_state: ModelState
    replicas: ByPath
    probes: list[Array]
    replaced: dict[Path, Num[Array, "..."]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelPass:
    """How a device runs the model.

    Attributes:
        given: the weights with which it begins.
        sinks: of the trained weights.
        model_state: ``TrainState.model_state``.
        spec: the train spec.
        rule: how the backward pass updates weights whose sinks are ``LayerState``s.
        train: whether the model is in its training mode, and the backward pass follows.
        adapters: whether frozen weights have their adapters.
    """

    given: PassWeights
    sinks: Sinks
    model_state: ModelState
    spec: TrainSpec = field(metadata={"static": True})
    rule: LayerUpdate | None = None
    train: bool = field(default=True, metadata={"static": True})
    adapters: bool = field(default=True, metadata={"static": True})

    def place(self, seed: Seed) -> Placed:
        """Every weight in the form that the model receives; with ``adapters`` False, without adapters.

        Their checkpoint names show ``zerojax.train.loss_checks`` what the loss does with them.
        """
        spec = self.spec
        placed: Placed = {}
        for number, group in enumerate(spec.groups):
            own = mix(seed, number)
            if group.stack:
                own = jax.vmap(lambda i, own=own: mix(own, i))(jnp.arange(group.layers)).reshape(group.stack)
            sharded: dict[Path, Sharded] = {}
            for path in (leaf.path for leaf in group.every):
                sink = self.sinks.get(path)
                update = self.rule if isinstance(sink, LayerState) else None
                sharded[path] = Sharded(self.given.weights[path], sink, own, spec.strategy, update=update)
            placed |= place_group(spec, group, sharded, train=self.train, adapters=self.adapters)
        return {
            path: checkpoint_name(weight, f"{SHARDED if is_sharded(weight) else WHOLE}{'/'.join(path)}")
            for path, weight in placed.items()
        }

    def call[T](self, placed: Placed, batch: Batch, seed: Seed, run: Run[T]) -> tuple[Bound, T]:
        """Run a function of the model on one micro-batch.

        Returns the model after the call, and the result.
        """
        spec = self.spec
        own = mix(seed, lax.axis_index(AXES))
        key = jax.random.wrap_key_data(jnp.stack([own, mix(own, 1)]), impl="threefry2x32")
        bound = spec.adapter.bind(placed, self.model_state, train=self.train, key=key)
        # ``jax.jit`` sorts paths; ``zerojax.weight_sum`` adds the weights up in the model's order.
        masters = {leaf.path: self.given.masters[leaf.path] for leaf in spec.leaves}
        weights = masters, self.sinks, spec.strategy.grad_level
        context = LossContext(bound.model, *weights, spec.axes, spec.zero.sequence_parallel)
        with holding(CONTEXT, context), holding(CALLS, itertools.count()), translated_errors():
            return bound, checkpoint_name(run(bound.model, unmarked(batch), key), RETURNED)

    def forward(self, placed: Placed, batch: Batch, seed: Seed) -> tuple[Array, Outcome[Sums]]:
        """The loss of one micro-batch times its tokens, and the pass's other results."""
        bound, (value, aux) = self.call(placed, batch, seed, functools.partial(call_loss, self.spec.loss_fn))
        # The loss alone is differentiated, even if the number of tokens is computed from the weights.
        count = lax.stop_gradient(jnp.asarray(aux.get(TOKENS, 1), jnp.float32))
        total = value * count
        sums = lax.stop_gradient(Sums(total, count, {name: x * count for name, x in aux.items()}))
        state = bound.model_state().items()
        changed = checkpoint_name({name: x for name, x in state if x is not self.model_state[name]}, RETURNED)
        left = bound.sharded()
        kept = (w.weight for w in left if w.weight.level == "secondary" and not w.weight.layout.frozen)
        replicas = {weight.layout.path: weight for weight in kept}
        probes = [w.probe for w in left if w.probe is not None]
        return total, Outcome(sums, changed, replicas, probes, bound.replaced() if self.train else {})

    def forward_in_breadth(self, placed: Placed, batch: Batch, seed: Seed) -> tuple[Array, Outcome[Sums]]:
        """``forward`` for all micro-batches at once. State is combined as it is over devices."""
        rows, at = micro_batches(batch, self.spec.zero.accumulate)

        def forward(rows: list[Array], index: Array) -> tuple[Array, tuple[Any, ...]]:
            total, outcome = self.forward(placed, at(rows), mix(seed, index))
            return total, tuple(outcome)

        run = over_micro_batches(forward, out_axes=(0, (0, 0, None, None, 0)))
        totals, (sums, changed, *others) = run(rows, jnp.arange(self.spec.zero.accumulate))
        total, sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), (totals, sums))
        mean = jax.vmap(lambda x: mean_over(x, "micro"), axis_name="micro", out_axes=None)
        counts = {name: x.sum(0) for name, x in changed.items() if name in self.spec.adapter.counts}
        changed = {name: mean(x) if is_float(x) else x[0] for name, x in changed.items()} | counts
        return total, Outcome(sums, changed, *others)

    def linearised(self, batch: Batch, seed: Seed) -> tuple[Outcome[Sums], Pullback]:
        """Run forward; returns the outcome, and the pullback from the loss's cotangent to the sinks'."""
        zero = self.spec.zero

        def loss(sinks: Sinks) -> tuple[Array, Outcome[Sums]]:
            model = dataclasses.replace(self, sinks=sinks)
            forward = model.forward if zero.accumulate == zero.passes else model.forward_in_breadth
            total, outcome = forward(model.place(seed), batch, seed)
            if self.rule is not None:
                sums = outcome.results.over(self.spec.world.axes)
                facts = self.rule.facts(sums.loss / sums.tokens, sums.tokens)
                total = with_facts(total, outcome.probes, facts)
            return total, outcome

        _, vjp, outcome = jax.vjp(loss, self.sinks, has_aux=True)
        return outcome, cast(Pullback, vjp)


def place_group(
    spec: TrainSpec, group: ParamGroup, sharded: Mapping[Path, Sharded], *, train: bool, adapters: bool = True
) -> dict[Path, Any]:
    """A group's weights in the form that the model receives: in units ``Sharded``, elsewhere whole.

    They are joined with their adapters, whose matrices are in ``sharded``. With ``train``, adapters apply
    dropout.
    """
    joined = dict(sharded)
    for leaf in group.frozen:
        parts = [joined.pop(part.path, None) for part in spec.adapters.get(leaf.path, ())]
        adapter = tuple(part for part in parts if part is not None)
        if adapter and adapters:
            assert spec.lora is not None
            lora = spec.lora if train else dataclasses.replace(spec.lora, dropout=0.0)
            joined[leaf.path] = dataclasses.replace(joined[leaf.path], adapter=adapter, lora=lora)
    values: Sequence[Any] = list(joined.values())
    if group.unit is None:
        values = materialise(values)
    return dict(zip(joined, values, strict=True))


def mean_over(x: Array, axes: str | tuple[str, ...]) -> Array:
    """The mean over mapped axes. Elements that are equal everywhere keep their bits.

    It never overflows, because it adds up fractions of the elements, in fp32 or more.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(mean_over(x.real, axes), mean_over(x.imag, axes))
    count = lax.axis_size(axes)
    fraction = 2.0 ** -(count - 1).bit_length()  # a power of two, which rounds nothing
    summands = x.astype(jnp.float32 if x.dtype.itemsize < 4 else x.dtype) * fraction
    mean = (lax.psum(summands, axes) / (count * fraction)).astype(x.dtype)
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    wide = bits.astype(jnp.promote_types(bits.dtype, jnp.uint32))  # NCCL reduces no 16-bit integers
    largest, inverted = lax.pmax((wide, ~wide), axes)
    same = lax.bitcast_convert_type(largest.astype(bits.dtype), x.dtype)
    return jnp.where(largest == ~inverted, same, mean)
