"""The variables of a model: their roles (weights of experts, state of routers), and their leaves in NNX.

NNX tells roles from other variables by their class. Linen tells weights of experts by the box in which they
are created, and state of routers by its collection.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
from flax import nnx
from flax.core import meta
from flax.typing import PathParts
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from zerojax.schedule.unit import is_sharded
from zerojax.sharding.param_tree import Path

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


def leaves_of(state: nnx.State) -> Iterator[tuple[Path, Array]]:
    """The leaves of a state by path: of its variables, without their hooks, and of plain attributes."""
    for path, held in nnx.to_flat_state(state):
        yield from leaves_within(path, held)


def leaves_within(path: PathParts, held: object) -> Iterator[tuple[Path, Array]]:
    """The leaves of a variable or an attribute at a path, by path; one that holds a pytree has several."""
    value = held.get_raw_value() if isinstance(held, nnx.Variable) else held
    for inner, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_sharded):
        yield leaf_path(path, inner), leaf


def leaf_path(path: PathParts, inner: KeyPath) -> Path:
    """The path of a leaf within the value at a path."""
    return (*map(str, path), *(jax.tree_util.keystr((key,), simple=True) for key in inner))
