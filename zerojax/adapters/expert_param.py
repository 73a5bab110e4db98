"""The weights of experts, told from others by their class."""

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from flax.core import meta
from jaxtyping import Array, PyTree


class ExpertParam(nnx.Param):
    """A weight whose leading axis is the expert's: ``[experts, ...]``.

    In a step, ``ZeroConfig(experts=)`` may spread the experts over the devices of a node. The module then
    finds ``[experts / devices, ...]``, its device's own, and has to bring them the tokens of the whole node,
    as ``zerojax.mix_experts`` does.
    """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertBox(meta.AxisMetadata[Any]):
    """The same for Linen: the box in which such a weight is created (``zerojax.linen_expert_param``)."""

    value: Array

    def unbox(self) -> Array:
        """The weight."""
        return self.value

    def replace_boxed(self, val: PyTree) -> PyTree:
        """Another value of the weight, in its box."""
        return replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "ExpertBox":
        """See ``AxisMetadata``: layers come before experts."""
        del index, params
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "ExpertBox":
        """See ``AxisMetadata``."""
        del index, params
        return self
