"""The interface between a model of either Flax API and the rest of zerojax."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Num, PyTree

from zerojax.schedule.sharded import Sharded, is_sharded
from zerojax.schedule.transforms import partition, split_arrays
from zerojax.schedule.unit import Arrays, call_unit
from zerojax.sharding.layout import ParamShape
from zerojax.sharding.param_tree import Path
from zerojax.weights import Weight

Given = Mapping[Path, Num[Array, "..."] | jax.ShapeDtypeStruct | Sharded]
"""The weights that a model gets: ``Sharded`` in units, whole arrays elsewhere, or shapes and dtypes."""
ModelState = dict[str, PyTree[Array]]
"""A model's state between calls besides its parameters, by name."""


@dataclass(frozen=True)
class Parameter(ParamShape):
    """A floating-point parameter of a model.

    Attributes:
        unit: the name of the unit that gathers it, or None if it is gathered for the whole step.
        of_experts: whether its leading axis is the expert's, so that its module also works with a part of it.
    """

    unit: str | None
    of_experts: bool = False


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

    def secondary(self) -> dict[Path, Weight]:
        """The trained weights of units that are at "secondary" after the pass, by path."""
        return {}

    def probes(self) -> dict[Path, Array]:
        """The probes of stacks that were called and that the backward pass updates, by a weight's path."""
        return {}

    def replaced(self) -> dict[Path, Num[Array, "..."]]:
        """The weights outside units that are other arrays after the pass, perhaps equal ones, by path."""
        return {}


class Adapter(ABC):
    """One model: its parameters and units, and how to run it with given weights.

    Attributes:
        parameters: every floating-point parameter once, in the model's order.
        stacks: names of the units that are a ``Stack``.
        updating: names of the units that refresh delta's replica when called (``Sharded.copy``).
        abstract_model_state: shapes and dtypes of the non-parameter state, by name.
        counts: names of the state that counts the tokens of a step (``zerojax.adapters.roles``).
    """

    parameters: tuple[Parameter, ...]
    stacks: frozenset[str] = frozenset()
    updating: frozenset[str] = frozenset()
    abstract_model_state: ModelState
    counts: frozenset[str] = frozenset()

    @abstractmethod
    def init(self, key: Array) -> tuple[dict[Path, Num[Array, "..."]], ModelState]:
        """Initial parameters of unsharded shape, layers included, and other state; can be traced."""

    @abstractmethod
    def bind(self, weights: Given, model_state: ModelState, *, train: bool, key: Array | None) -> Bound:
        """Put weights into the model.

        Without ``train`` the model is in its evaluation mode, if it has one. The key gives the pass this
        device's own random bits; None keeps the model's.
        """

    @abstractmethod
    def whole(self, weights: Given, model_state: ModelState) -> Callable[..., Any]:
        """An ordinary model with these whole weights, in evaluation mode, without anything of zerojax."""


def call_gathered[S, T](
    run: Callable[[PyTree, S, tuple[object, ...], Mapping[str, object]], T],
    params: PyTree,
    state: S,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> T:
    """``run(params, state, args, kwargs)``, whose ``params`` are gathered where they are ``Sharded``.

    ``run`` is pure. The arguments may hold leaves that are no arrays.
    """
    weights, others, combine = partition(params, is_sharded, is_leaf=is_sharded)
    arrays, join = split_arrays((args, kwargs))

    def body(whole: Sequence[Array], inputs: Arrays) -> T:
        state, others, arrays = inputs
        return run(combine(whole, others), state, *join(arrays))

    return call_unit(body, weights, (state, others, arrays))
