"""The exchange of a step: what nodes send each other besides the hops of the passes themselves.

A step (``zerojax.train.step``) has the same phases for every preset: passes, update, metrics. An exchange
says which arrays the passes read, and takes part before and after them:

- ``Exchange``, for zero3, zero++ and delta: the passes send gradients and weights between nodes, and nothing
  else crosses.
- ``FragmentExchange`` (``zerojax.train.local_updates``): each node trains its own weights, and one fragment
  of them crosses the nodes.
"""

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, PyTree

from zerojax.adapters import ModelState
from zerojax.train.batch import Batch
from zerojax.train.blocks import Blocks
from zerojax.train.fields import Shards, abstract_replicas, shard_specs
from zerojax.train.host_update import InBackward
from zerojax.train.model_pass import Sums
from zerojax.train.pass_weights import ByPath
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState
from zerojax.train.update import Trained, unless_skipped, updated

Metrics = dict[str, Array]
REPLICATED = PartitionSpec()


class Passed(NamedTuple):
    """The results of a step's passes, or their PartitionSpecs.

    With local updates ``gradients`` and ``sums`` have an entry for each node along their first axis.

    Attributes:
        gradients: sums over all tokens, nested by path and stored like the parameters.
        sums: of the losses and the tokens.
        updated: what the backward pass has updated, which has no gradients; empty if there is nothing.
        model_state: the field of ``TrainState`` after the passes.
        replicas: delta's replicas after the passes; else empty.
        residual: what encoding has lost, with error feedback; else empty.
        exchanged: the results of the exchange, as ``arrive`` returns them.
    """

    gradients: PyTree[Any]
    sums: Any
    updated: InBackward | tuple[()]
    model_state: ModelState
    replicas: ByPath
    residual: PyTree[Any]
    exchanged: Any

    @property
    def for_update(self) -> tuple[PyTree[Array], Sums, ByPath, InBackward | None]:
        """The last arguments of ``updated``."""
        return self.gradients, self.sums, self.replicas, self.updated or None


class Exchange:
    """The exchange of ZeRO, and the interface of others.

    ``start`` and ``arrive`` run inside ``shard_map`` on one device's values, all other methods outside.
    """

    def __init__(self, spec: TrainSpec) -> None:
        """Take the spec of the state."""
        self.spec = spec

    def arrays(self, state: TrainState) -> tuple[Shards, Any]:
        """The arrays of a state that the passes read, and the ones that only the exchange reads."""
        return state.shards, ()

    def specs(self, shards: Shards) -> tuple[Shards, Any]:
        """The PartitionSpecs of ``arrays``."""
        return shard_specs(self.spec, shards.replicas, current_replicas=shards.current_replicas), ()

    def results(self) -> Passed:
        """The PartitionSpecs of the passes' results; no stack is updated in its backward pass."""
        own = shard_specs(self.spec, abstract_replicas(self.spec) if self.spec.zero.weights_delta else ())
        return Passed(own.params, REPLICATED, (), own.model_state, own.replicas, own.residual, ())

    def start(self, shards: Shards, own: Any, batch: Batch) -> tuple[Shards, Any, Batch]:
        """Begin the exchange before the passes.

        Returns:
            ``shards`` as the passes read them, what ``arrive`` needs, and the batch.
        """
        return shards, own, batch

    def arrive(self, started: Any, gradients: Blocks, sums: Sums) -> tuple[Sums, Any]:
        """Finish the exchange after the passes.

        Returns the sums over this device's tokens, and the results.
        """
        del gradients
        return sums, started

    def by_node[T: PyTree[Array]](self, values: T) -> T:
        """Results of one device, with an axis of nodes if each node has its own."""
        return values

    def update(self, state: TrainState, passed: Passed) -> tuple[Trained, Bool[Array, ""], Metrics]:
        """See ``zerojax.train.update.updated``; with an axis of nodes if each node has its own weights."""
        return updated(self.spec, state.trained, *passed.for_update)

    def finish(
        self, state: TrainState, passed: Passed, after: Trained, taken: Bool[Array, ""], figures: Metrics
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
