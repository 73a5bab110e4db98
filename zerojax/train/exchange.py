"""A step's passes and update, and its exchange: what nodes send each other besides the hops of the passes.

A step (``zerojax.train.step``) has the same phases for every preset: passes, update, metrics. An exchange
says which arrays the passes read, and takes part before and after them:

- ``Exchange``, for zero3, zero++ and delta: the passes send gradients and weights between nodes, and nothing
  else crosses.
- ``FragmentExchange`` (``zerojax.train.local_updates``): each node trains its own weights, and one fragment
  of them crosses the nodes.

The optimizer's update (``updated``) runs outside ``shard_map``, on global arrays, where a norm over the whole
tree is right by construction.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, PyTree

from zerojax.adapters.adapter import ModelState
from zerojax.comm.in_order import on_mesh
from zerojax.schedule.layer_update import LayerState
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.train.backward_update import OptimizerShards, layer_states, layer_update
from zerojax.train.batch import Batch, batch_specs
from zerojax.train.blocks import Blocks, to_owners
from zerojax.train.fields import Shards, Trained, field_specs, shard_specs
from zerojax.train.host_update import updated_by_layers
from zerojax.train.model_pass import Sums
from zerojax.train.pass_weights import ByPath
from zerojax.train.passes import accumulate
from zerojax.train.spec import TrainSpec

if TYPE_CHECKING:
    from zerojax.train.state import TrainState

Metrics = dict[str, Array]
REPLICATED = PartitionSpec()


class Passed(NamedTuple):
    """The results of a step's passes, or their PartitionSpecs.

    With local updates ``gradients`` and ``sums`` have an entry for each node along their first axis.

    Attributes:
        gradients: sums over all tokens, nested by path and stored like the parameters.
        sums: of the losses and the tokens.
        updated: by path, the arrays of weights that the backward pass has updated, which have no gradients.
        model_state: the field of ``TrainState`` after the passes.
        replicas: delta's replicas after the passes; else empty.
        residual: what encoding has lost, with error feedback; else empty.
        exchanged: the results of the exchange, as ``arrive`` returns them.
    """

    gradients: PyTree[Any]
    sums: Any
    updated: dict[Path, LayerState]
    model_state: ModelState
    replicas: ByPath
    residual: PyTree[Any]
    exchanged: Any


@dataclass(frozen=True)
class Exchange:
    """The exchange of ZeRO, and the interface of others.

    Subclasses replace any method but ``passes``. ``start`` and ``arrive`` run inside ``shard_map`` on one
    device's values, all others outside.

    Attributes:
        spec: of the state.
    """

    spec: TrainSpec

    def passes(self, state: "TrainState", batch: Batch, *, in_backward: bool = False) -> Passed:
        """Run the passes of a step, which update stacks if the config says so (``in_backward``)."""
        spec, training = self.spec, self.spec.training

        def on_device(
            shards: Shards, own: Any, optimizer: OptimizerShards | tuple[()], batch: Batch
        ) -> Passed:
            shards, started, batch = self.start(shards, own, batch)
            rule, states = None, {}
            if isinstance(optimizer, OptimizerShards):
                rule = layer_update(spec, optimizer)
                states = layer_states(
                    spec, shards.params, shards.encoded, optimizer.moments, squares=jnp.float32(0)
                )
            grads, updated, outcome = accumulate(training, shards, batch, states, rule)
            grads, residual = to_owners(training, grads, from_tree(shards.residual), shards.step_seed)
            gradients, sums, exchanged = self.arrive(started, grads, outcome.results)
            replicas, lost = outcome.replicas if spec.zero.weights_delta else {}, to_tree(residual)
            return Passed(gradients, sums, updated, outcome.model_state, replicas, lost, exchanged)

        (shards, own), places, results = self.reads(state)
        entering, optimizer = (), ()
        if in_backward:
            fields = field_specs(spec)
            entering = OptimizerShards.of(spec, fields["opt_state"], REPLICATED)
            done = layer_states(
                spec, fields["params"], fields["encoded"], entering.moments, squares=REPLICATED
            )
            left = {path: x for path, x in from_tree(results.gradients).items() if path not in done}
            results = results._replace(gradients=to_tree(left), updated=done)
            limit = jnp.inf if spec.spikes is None else spec.spikes.limit(state.losses)
            optimizer = OptimizerShards.of(spec, state.opt_state, jnp.float32(limit))
        run = on_mesh(
            on_device, spec.mesh, in_specs=(*places, entering, batch_specs(batch)), out_specs=results
        )
        return run(shards, own, optimizer, batch)

    def reads(self, state: "TrainState") -> tuple[tuple[Shards, Any], tuple[Shards, Any], Passed]:
        """The arrays of a state that the passes read, and the ones that only the exchange reads.

        Returns:
            The arrays, their PartitionSpecs, and the PartitionSpecs of the passes' results if no stack is
            updated in its backward pass.
        """
        shards, places = Shards.of(vars(state)), field_specs(self.spec)
        after = places["model_state"], places["replicas"], places["residual"]
        results = Passed(places["params"], REPLICATED, {}, *after, exchanged=())
        return (shards, ()), (shard_specs(self.spec, shards), ()), results

    def start(self, shards: Shards, own: Any, batch: Batch) -> tuple[Shards, Any, Batch]:
        """Begin the exchange before the passes.

        Returns:
            ``shards`` as the passes read them, what ``arrive`` needs, and the batch.
        """
        return shards, own, batch

    def arrive(self, started: Any, gradients: Blocks, sums: Sums) -> tuple[PyTree[Array], Sums, Any]:
        """Finish the exchange after the passes.

        Args:
            started: as ``start`` returns it.
            gradients: their sums over all tokens at this device, stored.
            sums: over this device's tokens.

        Returns:
            ``gradients``, ``sums`` and ``exchanged`` of ``Passed``.
        """
        return to_tree(gradients), sums.over(self.spec.training.world.axes), started

    def update(self, state: "TrainState", passed: Passed) -> tuple[Trained, Bool[Array, ""], Metrics]:
        """See ``updated``; with an axis of nodes if each node has its own weights."""
        before = Trained(state.params, state.opt_state, state.encoded, state.losses, state.skipped_in_row)
        sums, done = passed.sums, passed.updated
        return updated(self.spec, before, passed.gradients, sums, passed.replicas, done)

    def finish(
        self, state: "TrainState", passed: Passed, after: Trained, taken: Bool[Array, ""], figures: Metrics
    ) -> tuple[dict[str, Any], Metrics]:
        """The fields of the next state, and the metrics.

        Args:
            state: before the step.
            passed: the results of the passes.
            after: the results of the update.
            taken: whether the update was made.
            figures: the update's metrics.
        """
        fields = after._asdict() | {
            "model_state": unless_skipped(taken, passed.model_state, state.model_state),
            "replicas": passed.replicas,
            "current_replicas": False,
            "residual": unless_skipped(taken, passed.residual, state.residual),
        }
        return fields, passed.sums.means() | figures


def updated(
    spec: TrainSpec,
    before: Trained,
    gradients: PyTree[Array],
    sums: Sums,
    replicas: ByPath,
    done: Mapping[Path, LayerState],
) -> tuple[Trained, Bool[Array, ""], dict[str, Array]]:
    """Update the weights, unless the loss or a gradient is not finite, or the loss is a spike.

    Args:
        spec: the train spec; with local updates the spec of a node.
        before: the fields before the step.
        gradients: summed over all tokens, nested by path, stored like the weights.
        sums: of the losses and the tokens.
        replicas: delta's replicas after the passes; else empty.
        done: the arrays that the backward pass has updated, by the paths of their weights, which have no
            entry in ``gradients``.

    Returns:
        The fields after the step; whether the update was made; and the metrics "grad_norm", "skipped" and
        "skipped_in_row", with a ``SpikeRule`` also "spike" and "loss_limit".
    """
    assert spec.tx is not None  # states without an optimizer have no compiled step
    tokens, loss = sums.tokens, sums.loss / sums.tokens
    grads = jax.tree.map(lambda x: x / tokens, gradients)
    squares = optax.tree.norm(grads, squared=True)
    if done:
        squares = squares + sum(own.squares for own in done.values())
    grad_norm, losses = jnp.sqrt(squares), before.losses
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    metrics: dict[str, Array] = {"grad_norm": grad_norm}
    if spec.spikes is not None:
        limit = spec.spikes.limit(losses)
        spike = loss > limit
        ok &= ~spike
        losses = spec.spikes.add(losses, loss, ok)
        metrics |= {"spike": spike.astype(jnp.int32), "loss_limit": limit}
    if spec.streams:
        params, opt_state, encoded = updated_by_layers(spec, ok, gradients, tokens, before, replicas, done)
    else:
        with jax.named_scope("optimizer"):
            updates, opt_state = spec.tx.update(grads, before.opt_state, before.params)
            params = optax.apply_updates(before.params, updates)
        params = unless_skipped(ok, params, before.params)
        opt_state, encoded = unless_skipped(ok, opt_state, before.opt_state), before.encoded
    in_row = jnp.where(ok, 0, before.skipped_in_row + 1)
    after = Trained(params, opt_state, encoded, losses, in_row)
    return after, ok, metrics | {"skipped": 1 - ok.astype(jnp.int32), "skipped_in_row": in_row}


def unless_skipped[T: PyTree](ok: Bool[Array, ""], after: T, before: T) -> T:
    """``after`` if the step is taken, ``before`` if it is skipped."""
    return jax.tree.map(functools.partial(jnp.where, ok), after, before)
