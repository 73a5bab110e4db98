"""Rows of tokens that neighbouring devices of a node share, inside a loss function."""

from contextlib import AbstractContextManager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from zerojax.errors import ConfigurationError
from zerojax.schedule.context import holding
from zerojax.sharding.mesh import LOCAL

OWN_TOKENS = "zerojax: whole rows of which a device takes its part"
"""The checkpoint name of what ``own_tokens`` is given, by which the traced program is checked."""
WHOLE_ROWS = "zerojax: rows that parts were put together to"
"""The checkpoint name of what ``zerojax.whole_rows`` returns; likewise."""
ATTENDED = "zerojax: what attends to tokens on the other devices of a row"
"""That of what ``zerojax.attention`` sends to the other devices; likewise."""
IN_ORDER = "zerojax: what attends to earlier tokens"
"""That of queries, keys and values of causal attention, where devices share rows; likewise."""
EXCHANGE = "exchange_heads"
"""The name scope of what the devices of a row send each other (``zerojax.models.shared_rows``)."""

_devices: ContextVar[int] = ContextVar("devices that share a row", default=1)


def sharing_rows(devices: int) -> AbstractContextManager[None]:
    """Within this context so many neighbours on ``local`` share each row of a batch."""
    return holding(_devices, devices)


def devices_a_row() -> int:
    """How many devices share a row here: 1 outside of a step."""
    return _devices.get()


def own_tokens[T: PyTree[Array]](x: T, axis: int = 1) -> T:
    """This device's part of the tokens of a row, with ``ZeroConfig(sequence_parallel=k)``; else all of them.

    A loss function gets whole rows, on all k devices that share them: it takes its part of what the model
    reads, and of the labels, and computes the loss of these tokens. The first device has the first T / k of T
    tokens. What depends on a token's place in its row, such as its position or the label that follows it, is
    computed before.

    Args:
        x: a pytree of arrays of whole rows.
        axis: that of the tokens.

    Raises:
        ConfigurationError: k does not divide the tokens, or an array has no such axis. Before anything is
            compiled: what it is given differs between the devices of a row, as what was cut before does.

    Examples:
        >>> tokens = jnp.arange(8).reshape(1, 8)
        >>> zerojax.own_tokens(tokens).shape  # outside of a step, or with k = 1
        (1, 8)
    """
    devices = devices_a_row()
    return x if devices == 1 else jax.tree.map(lambda whole: _part(whole, axis, devices), x)


def axis_of_tokens(function: str, shape: tuple[int, ...], axis: int) -> int:
    """An array's axis, from 0 on.

    Raises:
        ConfigurationError: names the function; the array has no such axis.
    """
    if not -len(shape) <= axis < len(shape):
        raise ConfigurationError(
            f"{function}: an array of shape {shape} has no axis {axis} of tokens: leave out what is not by "
            "token, such as numbers and what there is one of for each row."
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
