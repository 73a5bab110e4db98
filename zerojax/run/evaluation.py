"""Means over batches, with weights that cross nodes once for all batches."""

import jax
import jax.numpy as jnp

from zerojax.comm.gather import gather_from_all
from zerojax.run.data.batches import Batch
from zerojax.train.memory import free_memory
from zerojax.train.node_copy import lacks_node_copy, node_copy_bytes, with_node_copy
from zerojax.train.state import TrainState
from zerojax.train.step import eval_step


def mean_loss(state: TrainState, batches: list[Batch]) -> jax.Array:
    """The mean loss of some batches over all tokens that count, in nats per token."""
    return mean_metrics(state, batches)["loss"]


def mean_metrics(state: TrainState, batches: list[Batch]) -> dict[str, jax.Array]:
    """The means of the loss and its aux over some batches of equal size, and the sum of "tokens".

    If the loss counts tokens, means are weighted by "tokens", and a batch without tokens, whose own means are
    NaN, has no weight. Otherwise every batch has the same weight. The result may still be computing on the
    devices.
    """
    if len(batches) > 1:
        state = for_several_passes(state)
    measured = [eval_step(state, batch) for batch in batches]
    counts = [metrics.pop("tokens", 1.0) for metrics in measured]
    total = jnp.asarray(sum(counts))
    sums = {
        name: sum(
            jnp.where(count, metrics[name] * count, 0)
            for metrics, count in zip(measured, counts, strict=True)
        )
        for name in measured[0]
    }
    return {name: jnp.asarray(x / total) for name, x in sums.items()} | {"tokens": total}


def for_several_passes(state: TrainState, reserved: int = 0) -> TrainState:
    """``zerojax.with_node_copy`` if every device has room for the copy; otherwise the state unchanged.

    All processes call it together. On each device ``reserved`` bytes stay free for other uses.
    """
    if not lacks_node_copy(state):
        return state
    room = (free_memory(state.spec) << 20) - reserved - node_copy_bytes(state.spec)
    return with_node_copy(state) if min(gather_from_all(room)) >= 0 else state
