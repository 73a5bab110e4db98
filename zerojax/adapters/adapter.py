"""The interface between a model of either Flax API and the rest of zerojax."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Num, PyTree

from zerojax.errors import ConfigurationError
from zerojax.schedule.sharded import Sharded
from zerojax.sharding.layout import ParamShape
from zerojax.sharding.param_tree import Path
from zerojax.weights.weight import Weight

Given = Mapping[Path, Num[Array, "..."] | jax.ShapeDtypeStruct | Sharded]
"""The weights that a model gets: ``Sharded`` in units, whole arrays elsewhere, or shapes and dtypes."""
ModelState = dict[str, PyTree[Array]]
"""What a model keeps between calls besides its parameters, by name."""
LossFn = Callable[..., Any]
"""A user's function of a model and a batch; ``call_loss`` checks what it returns."""
METRICS = frozenset({"grad_norm", "loss", "loss_limit", "skipped", "skipped_in_row", "spike"})
"""The metrics of a step that are not the loss function's own."""


@dataclass(frozen=True)
class Parameter(ParamShape):
    """A floating-point parameter of a model.

    Attributes:
        unit: the name of the unit that gathers it, or None if it is gathered for the whole step.
        of_experts: whether its leading axis is the expert's, and its module takes a part of it as well.
    """

    unit: str | None
    of_experts: bool = False


@dataclass(frozen=True)
class Bound(ABC):
    """A model with its weights in place, for one forward pass.

    Attributes:
        model: what the loss function gets.
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
        updating: names of the units that update delta's copies when called (``Sharded.copy``).
        abstract_model_state: shapes and dtypes of the non-parameter state, by name.
        counts: the names of the state that counts the tokens of a step (``zerojax.adapters.roles``).
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

        Without ``train`` it is in its evaluation mode, if it has one. The key gives the pass random bits of
        this device's own; None keeps the model's.
        """

    @abstractmethod
    def whole(self, weights: Given, model_state: ModelState) -> Callable[..., Any]:
        """An ordinary model with these whole weights, in evaluation mode, without anything of zerojax."""


def takes_rngs(loss_fn: LossFn) -> bool:
    """Whether a loss function takes rngs: ``loss_fn(model, batch, rngs)``."""
    names = inspect.signature(loss_fn).parameters
    positional = [
        p
        for p in names.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(positional) >= 3 or "rngs" in names


def _is_scalar(value: ArrayLike) -> bool:
    return jax.tree_util.all_leaves([value]) and jnp.shape(value) == ()


def call_loss(
    loss_fn: LossFn, model: object, batch: PyTree, key: Array | None
) -> tuple[Array, dict[str, Array]]:
    """Run a loss function and check its result.

    A loss function that takes rngs gets them by the key.

    Returns:
        The loss as an fp32 scalar, and ``aux``, a dict of scalars (perhaps empty).

    Raises:
        ConfigurationError: the loss is not a scalar, aux is not a dict of scalars, or it has the name of
            a metric of the step.
    """
    if takes_rngs(loss_fn):
        rngs = nnx.Rngs(jax.random.key(0) if key is None else key)
        parameter = inspect.signature(loss_fn).parameters.get("rngs")
        named = parameter is not None and parameter.kind is parameter.KEYWORD_ONLY
        result = loss_fn(model, batch, rngs=rngs) if named else loss_fn(model, batch, rngs)
    else:
        result = loss_fn(model, batch)
    loss: Any
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not hasattr(loss, "shape") or loss.shape != ():
        found = f"shape {loss.shape}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
        raise ConfigurationError(
            f"loss_fn must return a scalar or (scalar, aux dict); it returned {found}. "
            "Take the mean over the batch."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ConfigurationError(f"loss_fn must return a floating-point scalar; it returned {loss.dtype}.")
    other = [name for name, x in aux.items() if not _is_scalar(x)] if isinstance(aux, Mapping) else [aux]
    if other:
        found = f"has {other[0]!r}" if isinstance(aux, Mapping) else f"is a {type(aux).__name__}"
        raise ConfigurationError(
            f"loss_fn's aux must be a dict of scalars, which are averaged over the world, and it {found}. "
            "State that the model changes, such as batch statistics, is kept without being returned; use "
            "predict_step for a model's outputs."
        )
    if reserved := sorted(METRICS.intersection(aux)):
        raise ConfigurationError(
            f"loss_fn's aux has {reserved[0]!r} in it, which is a metric of the step itself: give it another "
            "name."
        )
    return loss.astype(jnp.float32), {name: jnp.asarray(value) for name, value in aux.items()}
