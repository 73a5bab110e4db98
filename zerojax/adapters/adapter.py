"""The interface between a model of either Flax API and the rest of zerojax."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num, PyTree

from zerojax.schedule.unit import Sharded
from zerojax.sharding.layout import ParamShape
from zerojax.sharding.param_tree import Path, by_name, to_tree

Given = Mapping[Path, Num[Array, "..."] | jax.ShapeDtypeStruct | Sharded]
"""The weights that a model gets: ``Sharded`` in units, whole arrays elsewhere, or shapes and dtypes."""
ModelState = dict[str, PyTree[Array]]
"""A model's state between calls besides its parameters, by name."""


@dataclass(frozen=True)
class Parameter(ParamShape):
    """A floating-point parameter of a model.

    Attributes:
        unit: the name of the unit that gathers it, or None if it is gathered for the whole step.
        of_experts: whether its leading axis counts experts; its module then also works with some of them.
    """

    unit: str | None
    of_experts: bool = False

    @staticmethod
    def of(
        path: Path, value: Array, unit: tuple[str, tuple[int, ...]] | None, of_experts: bool
    ) -> "Parameter":
        """From the array with all layers (``[*stack, ...]``), and its unit's name and ``stack``, or None."""
        name, stack = (None, ()) if unit is None else unit
        shape = value.shape[len(stack) :]
        return Parameter(path, shape, value.dtype.name, stack, name, of_experts and unit is not None)


@dataclass(frozen=True)
class Bound(ABC):
    """A model with its weights in place, for one forward pass.

    Attributes:
        model: the argument of the loss function.
    """

    model: Any

    @abstractmethod
    def model_state(self) -> ModelState:
        """The non-parameter state after the pass."""

    def sharded(self) -> list[Sharded]:
        """The weights of units and their adapters, as the pass has left them."""
        return []

    def replaced(self) -> dict[Path, Num[Array, "..."]]:
        """The weights outside units, by path, that the pass replaced by arrays, even of equal values."""
        return {}


class Adapter(ABC):
    """One model: its parameters and units, and how to run it with given weights.

    Attributes:
        parameters: every floating-point parameter once, in the model's order.
        ends: names of the units that hold the last layer of a ``Stack``.
        updating: names of the units that refresh delta's replica when called (``Weight.replica``).
        orders: the kind of each layer of every ``Stack``, by its path.
        abstract_model_state: shapes and dtypes of the non-parameter state, by name.
        counts: names of the state that counts the tokens of a step (``zerojax.adapters.roles``).
    """

    parameters: tuple[Parameter, ...]
    ends: frozenset[str] = frozenset()
    updating: frozenset[str] = frozenset()
    orders: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    abstract_model_state: ModelState
    counts: frozenset[str] = frozenset()
    _state: Mapping[str, Path]

    def _describe_state(self, state: Mapping[Path, Array], routers: Collection[Path]) -> None:
        """Set the attributes that describe non-parameter state; ``routers`` are paths in it."""
        self._state = by_name(state)
        self.abstract_model_state = self._named(state)
        self.counts = frozenset(
            name
            for name, path in self._state.items()
            if path in routers and jnp.issubdtype(state[path].dtype, jnp.integer)
        )

    def _named(self, state: Mapping[Path, Array]) -> ModelState:
        """State by name."""
        return {name: state[path] for name, path in self._state.items()}

    @abstractmethod
    def init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], ModelState]:
        """Initial parameters of unsharded shape, layers included, and other state; can be traced."""

    @abstractmethod
    def bind(self, weights: Given, model_state: ModelState, *, train: bool, key: Array | None) -> Bound:
        """Put weights into the model.

        Without ``train`` the model is in its evaluation mode, if it has one. The key gives the pass this
        device's own random bits; None keeps the model's.
        """

    def nested[T](self, weights: Mapping[Path, T]) -> dict[str, PyTree[T]]:
        """All weights in one tree, as the model has it."""
        return to_tree(weights)

    @abstractmethod
    def whole(self, weights: Given, model_state: ModelState) -> Callable[..., Any]:
        """An ordinary model with these whole weights, in evaluation mode, without anything of zerojax."""
