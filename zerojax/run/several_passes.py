"""Weights that several passes read before the next update: evaluations, and what is said of a rollout."""

import zerojax
from zerojax.generation.memory import free_memory
from zerojax.multihost.agreement import gather_from_all
from zerojax.train.node_copy import lacks_node_copy, node_copy_bytes


def for_several_passes(state: zerojax.TrainState, beside: int = 0) -> zerojax.TrainState:
    """``zerojax.with_node_copy``, if every device has room for the copy; else the state itself.

    All processes call it together.

    Args:
        state: whose weights do not change meanwhile.
        beside: bytes of a device that will be needed beside the copy.
    """
    if not lacks_node_copy(state):
        return state
    room = (free_memory(state.spec) << 20) - beside - node_copy_bytes(state.spec)
    return zerojax.with_node_copy(state) if min(gather_from_all(room)) >= 0 else state
