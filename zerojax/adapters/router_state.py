"""The state of routers, told from other state by its class, in Linen by its collection.

Integers in it count tokens of a step: the state after the step has their sum over all devices and
micro-batches. A micro-batch after the first begins with zeros, because the last step's counts must act once.
"""

from flax import nnx

ROUTER_STATE = "router_state"
"""The collection of Linen."""


class RouterState(nnx.Variable):
    """What a router keeps from one training step to the next: biases, fp32, and counts of tokens, int32."""
