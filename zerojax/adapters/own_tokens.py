"""Rows of tokens that neighbouring devices of a node share, inside a loss function."""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

import jax
from jax import lax
from jaxtyping import Array, PyTree

from zerojax.errors import ConfigurationError
from zerojax.sharding.mesh import LOCAL

OWN_TOKENS = "own_tokens"
"""The name scope of what takes a device's part of a row."""
EXCHANGE = "exchange_heads"
"""The name scope of what the devices of a row send each other (``zerojax.models.shared_rows``)."""

_devices: ContextVar[int] = ContextVar("devices that share a row", default=1)


@contextlib.contextmanager
def sharing_rows(devices: int) -> Generator[None]:
    """Within this context so many neighbours on ``local`` share each row of a batch."""
    token = _devices.set(devices)
    try:
        yield
    finally:
        _devices.reset(token)


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
        ConfigurationError: k does not divide the tokens.

    Examples:
        >>> tokens = jnp.arange(8).reshape(1, 8)
        >>> zerojax.own_tokens(tokens).shape  # outside of a step, or with k = 1
        (1, 8)
    """
    devices = devices_a_row()
    return x if devices == 1 else jax.tree.map(lambda whole: _part(whole, axis, devices), x)


def _part(whole: Array, axis: int, devices: int) -> Array:
    tokens = whole.shape[axis]
    if tokens % devices:
        raise ConfigurationError(
            f"own_tokens: {tokens} tokens in an array of shape {whole.shape} do not divide by "
            f"sequence_parallel={devices}: pad the rows by tokens that do not count, to "
            f"{-(-tokens // devices) * devices}, or choose another sequence_parallel."
        )
    length = tokens // devices
    with jax.named_scope(OWN_TOKENS):
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(LOCAL) % devices * length, length, axis)
