"""Attention of rows that several devices of a node share, and whole rows from their parts.

Each device has a part of the tokens, with all heads. An all-to-all within the group gives each device all
tokens of a part of the heads. It computes their attention as if the row were its own. A second all-to-all
returns the outputs to the tokens' owners (DeepSpeed-Ulysses, Jacobs et al., 2023). With k devices a row, each
sends (k - 1) / k^2 of the row's queries, keys, values and outputs. Nothing crosses nodes.
"""

import math
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from zerojax.adapters.loss import ATTENDED, EXCHANGE, IN_ORDER, WHOLE_ROWS, axis_of_tokens, devices_a_row
from zerojax.errors import ConfigurationError
from zerojax.models.attention import Windowed, causal_attention, full_attention
from zerojax.models.flash_attention import Documents, Segments, Sinks, document_offsets
from zerojax.models.options import AttentionKernel
from zerojax.sharding.mesh import LOCAL

Heads = Float[Array, "batch time heads dim"]


def attention(
    query: Heads,
    key: Float[Array, "batch time kv_heads dim"],
    value: Float[Array, "batch time kv_heads dim"],
    *,
    causal: bool = True,
    segments: Segments | Documents | None = None,
    window: int | None = None,
    windowed: Windowed = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    kernel: AttentionKernel = "auto",
) -> Heads:
    """Scaled dot-product attention within rows, which devices may share.

    With ``ZeroConfig(sequence_parallel=k)`` the arguments cover this device's tokens (``own_tokens``). The
    devices of a row exchange heads: each computes 1 / k of the heads for all tokens. Key-value heads are sent
    to all devices with a query head that reads them. If k does not divide the heads, heads of zeros are
    added: 12 heads on 8 devices take the time of 16. Scores and softmax are fp32.

    Args:
        query: queries of this device's tokens, or of whole rows.
        key: keys of the same tokens; their number of heads divides the query's (grouped-query attention).
        value: values of the same tokens, with as many heads as keys.
        causal: whether a position attends to itself and earlier positions only.
        segments: the document of each token of whole rows, equal for neighbours of one document (int32
            [batch, whole row]), or ``document_offsets`` of it. No position attends to another document.
        window: positions that one attends to, itself included; for causal attention only.
        windowed: whether the window applies, which may be data.
        scale: factor of the scores; None is 1 / sqrt(dim).
        softcap: the scores become softcap x tanh(scores / softcap).
        sinks: one more score in each head's softmax, which has no value; for causal attention only.
        kernel: "auto" is the fastest of cuDNN's, FlashAttention-4 and XLA's that can do this on the device.

    Raises:
        ConfigurationError: key-value heads that do not divide the heads, or values wider than keys; segments
            of another length than the rows; a window below 1 or without causal attention; or a kernel that
            cannot do this.

    Examples:
        >>> q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 2, 16))
        >>> zerojax.attention(q, k, k, window=4).shape
        (2, 8, 4, 16)
    """
    heads, kv_heads, devices = query.shape[2], key.shape[2], devices_a_row()
    if heads % kv_heads or value.shape[2] != kv_heads:
        raise ConfigurationError(
            f"attention: {heads} heads of queries, {kv_heads} of keys and {value.shape[2]} of values. Pass "
            "equally many heads of keys and values, a number that divides the heads of queries."
        )
    if value.shape[3] > query.shape[3]:
        raise ConfigurationError(
            f"attention: values of width {value.shape[3]} are wider than keys of {query.shape[3]}. Pad "
            "queries and keys with zeros, and pass the scale."
        )
    if window is not None and window < 1:
        raise ConfigurationError(f"attention: window = {window} must be at least 1, the position itself")
    documents = (
        segments if segments is None or isinstance(segments, Documents) else document_offsets(segments)
    )
    whole = (query.shape[0], devices * query.shape[1])
    numbers = None if documents is None else documents.numbers
    if numbers is not None and numbers.shape != whole:
        raise ConfigurationError(
            f"attention: segments of shape {numbers.shape} for rows of shape {whole}. Pass the segments of "
            "whole rows, one number for each token."
        )
    spread = spread_of(heads, kv_heads, devices)
    if devices > 1:
        if causal:
            query, key, value = (checkpoint_name(x, IN_ORDER) for x in (query, key, value))
        parts = _spread(spread, checkpoint_name(query, ATTENDED), key, value)
        query, key, value = to_heads(devices, *parts)
        sinks = None if sinks is None else own_heads(devices, _filled(spread, sinks, 0))
    if causal:
        options = {"window": window, "windowed": windowed, "scale": scale, "softcap": softcap, "sinks": sinks}
        out = causal_attention(query, key, value, kernel, documents, **options)
    elif window is not None or sinks is not None:
        raise ConfigurationError(
            "attention: windows and sinks need causal attention. Leave them out, or leave out causal=False."
        )
    else:
        out = full_attention(query, key, value, kernel, documents, scale=scale, softcap=softcap)
    if devices == 1:
        return out
    batch, time, _, dim = (home := to_tokens(devices, out)).shape
    grouped = home.reshape(batch, time, spread.groups, spread.filled, dim)
    return grouped[:, :, :, : heads // spread.groups].reshape(batch, time, heads, dim)


def whole_rows[T: PyTree[Array]](x: T, axis: int = 1) -> T:
    """Whole rows from this device's tokens: the inverse of ``own_tokens``.

    With ``ZeroConfig(sequence_parallel=k)`` all k devices of a row get the whole row; otherwise this returns
    its argument. Use it for values of whole rows, such as the log-probability of a response, and for the
    results of ``predict_step``. Use it also around a layer that mixes tokens by other means than attention:
    ``own_tokens(layer(whole_rows(x)))``. Each of the k devices then holds and computes all tokens.

    Args:
        x: a pytree of arrays of this device's tokens.
        axis: the axis of tokens.

    Raises:
        ConfigurationError: an array has no such axis.

    Examples:
        >>> zerojax.whole_rows(jnp.ones((1, 8))).shape  # outside of a step, or with k = 1
        (1, 8)
    """
    devices = devices_a_row()
    return x if devices == 1 else jax.tree.map(lambda part: _joined(part, axis, devices), x)


def _joined(part: Array, axis: int, devices: int) -> Array:
    axis = axis_of_tokens("whole_rows", jnp.shape(part), axis)
    parts = cast(Array, _exchange(devices, jnp.broadcast_to(part, (devices, *part.shape))))
    whole = jnp.moveaxis(parts, 0, axis).reshape(*part.shape[:axis], -1, *part.shape[axis + 1 :])
    return checkpoint_name(whole, WHOLE_ROWS)


class Spread(NamedTuple):
    """How heads are spread over devices; every device gets the same number.

    Attributes:
        groups: parts of the query heads; heads of zeros fill up each part.
        filled: heads of a group, zeros included.
        copies: key-value heads that are sent, copies and zeros included.
    """

    groups: int
    filled: int
    copies: int

    @property
    def heads(self) -> int:
        """Query heads that are sent, zeros included."""
        return self.groups * self.filled


def spread_of(heads: int, kv_heads: int, devices: int) -> Spread:
    """The spread with the fewest heads of zeros: none if the devices divide the heads."""
    copies = math.lcm(kv_heads, devices)
    multiple = copies // kv_heads
    grouped = Spread(kv_heads, -(-heads // (kv_heads * multiple)) * multiple, copies)
    padded = -(-heads // devices) * devices
    # A device's query heads may then read different key heads, so each gets a separate copy of its key head.
    return grouped if grouped.heads <= padded else Spread(1, padded, padded)


def _spread(spread: Spread, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values with the heads that are sent."""
    heads, kv_heads = query.shape[2], key.shape[2]
    if spread.groups == kv_heads:
        key, value = (jnp.repeat(x, spread.copies // kv_heads, 2) for x in (key, value))
    else:
        key, value = (_filled(spread, jnp.repeat(x, heads // kv_heads, 2), 2) for x in (key, value))
    return _filled(spread, query, 2), key, value


def _filled(spread: Spread, x: Array, axis: int) -> Array:
    """Heads along an axis, with zeros behind each group's heads."""
    own = x.shape[axis] // spread.groups
    grouped = x.reshape(*x.shape[:axis], spread.groups, own, *x.shape[axis + 1 :])
    widths = [(0, spread.filled - own if i == axis + 1 else 0) for i in range(grouped.ndim)]
    return jnp.pad(grouped, widths).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def own_heads(devices: int, each: Array, axis: int = 0) -> Array:
    """The entries for this device's heads, from entries for all heads along an axis; inside ``shard_map``."""
    count = each.shape[axis] // devices
    return lax.dynamic_slice_in_dim(each, lax.axis_index(LOCAL) % devices * count, count, axis)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(devices: int, payload: Array) -> Array:
    """An all-to-all of the group: row i of ``[devices, ...]`` goes to device i; returns rows by sender.

    It consists of permutations, which run in line with compute on GPUs (``zerojax.comm.xla_options``). XLA
    would put an all-to-all on another stream, behind the hops between nodes, and attention would wait for the
    network. Under remat "none" the received rows are kept, like the results of all functions with a custom
    VJP.
    """
    local = lax.axis_size(LOCAL)
    own = lax.axis_index(LOCAL) % devices

    def row(shift: int) -> Array:
        return lax.dynamic_index_in_dim(payload, (own + shift) % devices, keepdims=False)

    def neighbour(device: int, shift: int) -> int:
        return device // devices * devices + (device + shift) % devices

    pieces = []
    for shift in range(1, devices):
        pairs = [(device, neighbour(device, shift)) for device in range(local)]
        with jax.named_scope(EXCHANGE):
            pieces.append(lax.ppermute(row(shift), LOCAL, pairs))
    # This device's own row is in place already. Once the other rows are sent, they can be overwritten.
    arrived = payload
    for shift, piece in enumerate(lax.optimization_barrier(pieces), start=1):
        arrived = lax.dynamic_update_index_in_dim(arrived, piece, (own - shift) % devices, 0)
    return arrived


# The gradient of a row that i sent to j returns from j to i: the same exchange.
_exchange.defvjp(
    lambda devices, payload: (_exchange(devices, payload), None),
    lambda devices, _, cotangent: (_exchange(devices, cotangent),),
)


def to_heads(devices: int, *parts: Array) -> list[Array]:
    """From ``[batch, part of the tokens, heads, dim]`` to ``[batch, tokens, part of the heads, dim]``."""

    def by_receiver(x: Array) -> Array:
        batch, time, heads, dim = x.shape
        return x.reshape(batch, time, devices, heads // devices, dim).transpose(2, 0, 1, 3, 4)

    def joined(x: Array) -> Array:
        _, batch, time, heads, dim = x.shape
        return x.transpose(1, 0, 2, 3, 4).reshape(batch, devices * time, heads, dim)

    rows = [by_receiver(x) for x in parts]
    payload = jnp.concatenate([row.reshape(devices, -1) for row in rows], axis=1)
    arrived = cast(Array, _exchange(devices, payload))
    found, start = [], 0
    for row in rows:
        size = row.size // devices
        found.append(joined(lax.slice_in_dim(arrived, start, start + size, axis=1).reshape(row.shape)))
        start += size
    return found


def to_tokens(devices: int, out: Array) -> Array:
    """The inverse of ``to_heads``."""
    batch, time, heads, dim = out.shape
    row = out.reshape(batch, devices, time // devices, heads, dim).transpose(1, 0, 2, 3, 4)
    arrived = cast(Array, _exchange(devices, row))
    return arrived.transpose(1, 2, 0, 3, 4).reshape(batch, time // devices, devices * heads, dim)
