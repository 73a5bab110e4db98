"""One run of the model on one device, inside ``shard_map``: its weights in place, its loss, its checks.

Each loss is weighted by its number of tokens, and the sum over all devices is divided once by all tokens. The
result is the mean over all tokens, however they are spread.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Num, PyTree

from zerojax.adapters import Bound, ModelState, call_loss
from zerojax.adapters.loss import LossContext, MasterWeights, running_loss
from zerojax.schedule.breadth_first import over_micro_batches
from zerojax.schedule.layer_update import LayerState, LayerUpdate
from zerojax.schedule.sharded import Sharded, translated_errors
from zerojax.schedule.transforms import is_float
from zerojax.schedule.unit import numbered_calls
from zerojax.sharding.mesh import AXES
from zerojax.sharding.param_tree import Path
from zerojax.sharding.wire_format import Seed, mix
from zerojax.train.batch import Batch, micro_batches, unmarked
from zerojax.train.loss_checks import Axes, check_program
from zerojax.train.pass_weights import ByPath, PassWeights, place_group
from zerojax.train.spec import TrainSpec

type Run[T] = Callable[[Any, Batch, Array], T]
"""A function of a bound model, rows of a batch, and a key."""
Sinks = Mapping[Path, Num[Array, "..."] | LayerState]
"""By path, zeros whose cotangents are gradients, or arrays that the backward pass updates."""
TOKENS = "tokens"


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


class Outcome(NamedTuple):
    """The results of forward passes, besides gradients.

    Attributes:
        sums: over this device's tokens.
        model_state: from one pass, the entries of ``TrainState.model_state`` that the model changed; from
            ``accumulate``, all of them.
        replicas: from one pass, the secondary partitions that units refreshed; from ``accumulate``,
            ``TrainState.copies``.
        probes: from one pass, of stacks that the backward pass updates (``zerojax.schedule.layer_update``).
    """

    sums: Sums
    model_state: ModelState
    replicas: ByPath
    probes: dict[Path, Array]


class Placed(NamedTuple):
    """The weights in a loss function's model.

    Attributes:
        weights: per path, ``Sharded`` in units and whole elsewhere.
        masters: for ``zerojax.weight_sum``.
    """

    weights: dict[Path, Any]
    masters: MasterWeights


@dataclass(frozen=True)
class ModelPass:
    """How a device runs the model.

    Attributes:
        spec: the train spec.
        given: the weights with which it begins.
        train: whether the model is in its training mode, and the backward pass follows.
        adapters: whether frozen weights have their adapters.
        rule: how the backward pass updates weights whose sinks are ``LayerState``s.
    """

    spec: TrainSpec
    given: PassWeights
    train: bool = True
    adapters: bool = True
    rule: LayerUpdate | None = None

    def place(self, sinks: Sinks, seed: Seed) -> Placed:
        """Every weight in the form that the model receives; with ``adapters`` False, without adapters."""
        spec, given = self.spec, self.given
        placed: dict[Path, Any] = {}
        for number, group in enumerate(spec.groups):
            own = mix(seed, number)
            if group.stack:
                own = jax.vmap(lambda i, own=own: mix(own, i))(jnp.arange(group.layers)).reshape(group.stack)
            sharded: dict[Path, Sharded] = {}
            for path in (leaf.path for leaf in group.every):
                replica = given.replicas[path].values if path in given.updating else None
                sink = sinks.get(path)
                update = self.rule if isinstance(sink, LayerState) else None
                sharded[path] = Sharded(given.weights[path], sink, own, spec.strategy, replica, update=update)
            placed |= place_group(spec, group, sharded, train=self.train, adapters=self.adapters)
        return Placed(placed, self._masters(sinks))

    def _masters(self, sinks: Sinks) -> MasterWeights:
        masters = {path: master.values for path, master in self.given.masters.items()}
        return MasterWeights(self.spec.leaves, masters, sinks, self.spec.strategy.grad_level)

    def call[T](
        self, placed: Placed, model_state: ModelState, batch: Batch, seed: Seed, run: Run[T]
    ) -> tuple[Bound, T]:
        """Run a function of the model on one micro-batch.

        Returns the model after the call, and the result.
        """
        spec = self.spec
        own = mix(seed, lax.axis_index(AXES))
        key = jax.random.wrap_key_data(jnp.stack([own, mix(own, 1)]), impl="threefry2x32")
        bound = spec.adapter.bind(placed.weights, model_state, train=self.train, key=key)
        context = LossContext(bound.model, placed.masters, spec.axes, spec.zero.sequence_parallel)
        with running_loss(context), numbered_calls(), translated_errors():
            return bound, run(bound.model, unmarked(batch), key)

    @property
    def loss(self) -> Run[tuple[Array, dict[str, Array]]]:
        """The loss function, checked."""
        return functools.partial(call_loss, self.spec.loss_fn)

    def forward(
        self, placed: Placed, model_state: ModelState, batch: Batch, seed: Seed
    ) -> tuple[Array, Outcome]:
        """The loss of one micro-batch times its tokens, and the pass's other results."""
        bound, (value, aux) = self.call(placed, model_state, batch, seed, self.loss)
        # The loss alone is differentiated, even if the number of tokens is computed from the weights.
        count = lax.stop_gradient(jnp.asarray(aux.get(TOKENS, 1), jnp.float32))
        total = value * count
        sums = Sums(total, count, {name: x * count for name, x in aux.items()})
        changed = {name: x for name, x in bound.model_state().items() if x is not model_state[name]}
        return total, Outcome(
            jax.tree.map(lax.stop_gradient, sums), changed, bound.secondary(), bound.probes()
        )

    def forward_in_breadth(
        self, placed: Placed, model_state: ModelState, batch: Batch, seed: Seed
    ) -> tuple[Array, Outcome]:
        """``forward`` for all micro-batches at once. State is combined as it is over devices."""
        rows, at = micro_batches(batch, self.spec.zero.accumulate)

        def forward(
            rows: list[Array], index: Array
        ) -> tuple[Array, Sums, ModelState, tuple[ByPath, dict[Path, Array]]]:
            total, (sums, changed, updated, probes) = self.forward(
                placed, model_state, at(rows), mix(seed, index)
            )
            return total, sums, changed, (updated, probes)

        run = over_micro_batches(forward, out_axes=(0, 0, 0, None))
        totals, sums, changed, (updated, probes) = run(rows, jnp.arange(self.spec.zero.accumulate))
        total, sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), (totals, sums))
        mean = jax.vmap(lambda x: mean_over(x, "micro"), axis_name="micro", out_axes=None)
        counts = {name: x.sum(0) for name, x in changed.items() if name in self.spec.adapter.counts}
        changed = {name: mean(x) if is_float(x) else x[0] for name, x in changed.items()} | counts
        return total, Outcome(sums, changed, updated, probes)

    def check(
        self, sinks: Sinks, model_state: ModelState, batch: Batch, seed: Seed, run: Run[Any]
    ) -> list[Axes]:
        """Trace a function of the model, and add nothing to the program; see ``check_program``."""
        spec, train = self.spec, self.train

        def traced(weights: dict[Path, Any], model_state: ModelState, batch: Batch) -> PyTree[Array]:
            placed = Placed(weights, self._masters(sinks))
            bound, result = self.call(placed, model_state, batch, seed, run)
            return bound.model_state(), result, bound.replaced() if train else {}

        weights = jax.eval_shape(lambda: self.place(sinks, seed).weights)
        closed, (_, _, replaced) = jax.make_jaxpr(traced, return_shape=True)(weights, model_state, batch)
        return check_program(spec, closed.jaxpr, weights, replaced, model_state, batch, train=train)


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
