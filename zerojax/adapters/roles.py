"""The roles of variables in a model: weights of experts, and state of routers.

NNX tells them from other variables by their class. Linen tells weights of experts by the box in which they
are created, and state of routers by its collection.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
from flax import nnx
from flax.core import meta
from jaxtyping import Array, PyTree

ROUTER_STATE = "router_state"
"""The Linen collection of a router's state."""


class RouterState(nnx.Variable):
    """A value that a router keeps from one training step to the next: biases, fp32, or token counts, int32.

    Integers count the tokens of a step: the state after the step has their sum over all devices and
    micro-batches. A micro-batch after the first begins with zeros, because the last step's counts must act
    once.
    """


class ExpertParam(nnx.Param):
    """A weight whose leading axis counts experts: ``[experts, ...]``.

    In a step, ``ZeroConfig(experts=)`` may spread the experts over the devices of a node. The module then
    gets the device's part, ``[experts / devices, ...]``. It has to bring its experts the tokens of the whole
    node, as ``zerojax.mix_experts`` does.
    """


class Box(meta.AxisMetadata[Any]):
    """A Linen box that ``nn.vmap`` and ``nn.scan`` leave unchanged: their axis precedes the experts' axis."""

    def add_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """See ``AxisMetadata``."""
        del index, params
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """See ``AxisMetadata``."""
        del index, params
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertBox(Box):
    """``ExpertParam`` for Linen: the box in which ``zerojax.linen_expert_param`` creates a weight."""

    value: Array

    def unbox(self) -> Array:
        """The weight."""
        return self.value

    def replace_boxed(self, val: PyTree) -> PyTree:
        """Another value of the weight, in its box."""
        return replace(self, value=val)
