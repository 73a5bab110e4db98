"""The loss function: its call on one device's rows of a batch, and how it reaches the other devices."""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike
from jaxtyping import Array, Num, PyTree

from zerojax.errors import ConfigurationError
from zerojax.sharding.mesh import LOCAL

if TYPE_CHECKING:
    from zerojax.schedule.layer_update import LayerState
    from zerojax.sharding.param_tree import Path
    from zerojax.sharding.strategy import Level
    from zerojax.weights import Weight

LossFn = Callable[..., Any]
"""A user's function of a model and a batch; ``call_loss`` checks its result."""
METRICS = frozenset({"grad_norm", "loss", "loss_limit", "skipped", "skipped_in_row", "spike"})
"""The names of a step's own metrics, which a loss function's aux cannot have."""
# Checkpoint names by which the traced program is checked (``zerojax.train.loss_checks``).
OWN_TOKENS = "zerojax: argument of own_tokens"
WHOLE_ROWS = "zerojax: result of whole_rows"
ATTENDED = "zerojax: queries that attend to the other devices of a row"
IN_ORDER = "zerojax: queries, keys and values of causal attention in shared rows"
EXCHANGE = "exchange_heads"
"""The name scope of the exchange between the devices of a row (``zerojax.models.shared_rows``)."""


@dataclass(frozen=True)
class LossContext:
    """What a running loss function can use besides its arguments.

    Attributes:
        model: its argument.
        masters: by path, the device's shards of the trained weights, fp32 at "primary".
        sinks: by path, zeros whose cotangents are the gradients (``Sharded.sink``).
        level: the level of the sinks; see ``zerojax.sharding.layout``.
        axes: the mesh axes of the devices that share a step.
        devices_a_row: how many neighbours on ``local`` share each row of a batch.
    """

    model: object = None
    masters: "Mapping[Path, Weight]" = field(default_factory=dict)
    sinks: "Mapping[Path, Num[Array, '...'] | LayerState]" = field(default_factory=dict)
    level: "Level" = "primary"
    axes: tuple[str, ...] = ()
    devices_a_row: int = 1


_ALONE = LossContext()
CONTEXT: ContextVar[LossContext] = ContextVar("context of the loss", default=_ALONE)
"""Of the running loss function; outside of one, a context without other devices."""


def devices_a_row() -> int:
    """How many devices share a row here: 1 outside of a step."""
    return CONTEXT.get().devices_a_row


def call_loss(
    loss_fn: LossFn, model: object, batch: PyTree, key: Array | None
) -> tuple[Array, dict[str, Array]]:
    """Run a loss function, with rngs made from the key if it takes rngs, and check its result.

    Returns:
        The loss as an fp32 scalar, and ``aux``, a dict of scalars (perhaps empty).
    """
    names = inspect.signature(loss_fn).parameters
    kinds = [p.kind for p in names.values() if p.default is p.empty]
    positional = [kind for kind in kinds if kind.name.startswith("POSITIONAL_")]
    if "rngs" in names or len(positional) >= 3:
        rngs = nnx.Rngs(jax.random.key(0) if key is None else key)
        named = "rngs" in names and names["rngs"].kind is inspect.Parameter.KEYWORD_ONLY
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
    other = [item for item in aux.items() if not _is_metric(*item)] if isinstance(aux, Mapping) else [aux]
    if other:
        found = f"has {other[0][0]!r}" if isinstance(aux, Mapping) else f"is a {type(aux).__name__}"
        raise ConfigurationError(
            "loss_fn's aux must be a dict of scalars by name, which are averaged over all devices, and it "
            f"{found}. State that the model changes, such as batch statistics, is kept without being "
            "returned; use predict_step for a model's outputs."
        )
    if reserved := sorted(METRICS.intersection(aux)):
        raise ConfigurationError(
            f"loss_fn's aux has {reserved[0]!r} in it, which is a metric of the step itself: give it another "
            "name."
        )
    return loss.astype(jnp.float32), {name: jnp.asarray(value) for name, value in aux.items()}


def _is_metric(name: object, value: object) -> bool:
    """Whether it is a scalar with a name, by which metrics are sorted."""
    return isinstance(name, str) and is_array(value) and jnp.shape(value) == ()


def is_array(x: object) -> TypeGuard[ArrayLike]:
    """Whether JAX accepts it as an array: numbers, too, but no text."""
    with suppress(TypeError):
        jax.typeof(x)
        return True
    return False


def world_sum[T: PyTree[Array]](x: T) -> T:
    """Sum arrays over all devices that share a step. Outside of a loss function, return them unchanged.

    Use it for losses that are no mean over tokens, such as the balance of experts. Every device gets the same
    sum and must compute the same from it. Gradients are the whole batch's: each device's part of the sum gets
    the sum of all devices' cotangents. One small collective in the forward and one in the backward pass cross
    the mesh. With local updates they stay within the node, and with micro-batches the sum is over the
    devices' rows of one micro-batch.

    Args:
        x: a pytree of floating-point arrays, of any shapes, the same on all devices.

    Returns:
        The sums, in the same dtypes.

    Examples:
        >>> def loss(model, batch):
        ...     rows = zerojax.world_sum(jnp.float32(batch["x"].shape[0]))
        ...     mean = zerojax.world_sum(jnp.sum(model(batch["x"]))) / rows
        ...     return jnp.square(mean)  # of the whole batch's mean
    """
    axes = CONTEXT.get().axes
    return _sum(axes, x) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum[T: PyTree[Array]](axes: tuple[str, ...], x: T) -> T:
    return lax.psum(x, axes)


# The sum is part of every device's loss, and the devices' gradients are added up.
_sum.defvjp(lambda axes, x: (_sum(axes, x), None), lambda axes, _, cotangent: (lax.psum(cotangent, axes),))


def own_tokens[T: PyTree[Array]](x: T, axis: int = 1) -> T:
    """This device's part of the tokens of a row, with ``ZeroConfig(sequence_parallel=k)``; else all of them.

    A loss function gets whole rows, on all k devices that share them. It takes its part of the model's inputs
    and of the labels, and computes the loss of these tokens. The first device has the first T / k of T
    tokens. Whatever depends on a token's place in its row, such as its position or the label that follows it,
    must be computed before.

    Args:
        x: a pytree of arrays of whole rows.
        axis: the axis of the tokens.

    Raises:
        ConfigurationError: k does not divide the tokens, or an array has no such axis. Before anything is
            compiled: ``x`` differs between the devices of a row, as rows that were cut already do.

    Examples:
        >>> tokens = jnp.arange(8).reshape(1, 8)
        >>> zerojax.own_tokens(tokens).shape  # outside of a step, or with k = 1
        (1, 8)
    """
    devices = devices_a_row()
    return x if devices == 1 else jax.tree.map(lambda whole: _part(whole, axis, devices), x)


def axis_of_tokens(function: str, shape: tuple[int, ...], axis: int) -> int:
    """The number of an array's axis, counted from 0. Refuse an axis that the array does not have."""
    if not -len(shape) <= axis < len(shape):
        raise ConfigurationError(
            f"{function}: an array of shape {shape} has no axis {axis} of tokens. Pass only arrays that have "
            "such an axis: no numbers, and no arrays with one value for each row."
        )
    return axis % len(shape)


def _part(whole: Array, axis: int, devices: int) -> Array:
    shape = jnp.shape(whole)
    axis = axis_of_tokens("own_tokens", shape, axis)
    tokens = shape[axis]
    if tokens % devices:
        raise ConfigurationError(
            f"own_tokens: {tokens} tokens in an array of shape {shape} do not divide by "
            f"sequence_parallel={devices}: pad the rows by tokens that do not count, to "
            f"{-(-tokens // devices) * devices}, or choose another sequence_parallel."
        )
    length = tokens // devices
    first = lax.axis_index(LOCAL) % devices * length
    return lax.dynamic_slice_in_dim(checkpoint_name(whole, OWN_TOKENS), first, length, axis)
