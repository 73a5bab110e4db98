"""Rows that several devices of a node share, and losses that have no use for them."""

import re
from collections.abc import Iterator

import jax
from jax.extend import core

from zerojax.adapters.own_tokens import EXCHANGE, OWN_TOKENS
from zerojax.errors import ConfigurationError


def processes_a_row(devices: int) -> int:
    """How many processes share a row, if so many devices do: all of them pass it to a step."""
    return max(1, devices // jax.local_device_count())


def refuse_unshared(jaxpr: core.Jaxpr, devices: int) -> None:
    """Refuse a loss of which so many devices cannot share the rows, as far as its trace tells.

    Args:
        jaxpr: of the loss.
        devices: that share a row.

    Raises:
        ConfigurationError: it takes no part of the tokens, or nothing brings the parts together.
    """
    if devices == 1:
        return
    scopes = set(_scopes(jaxpr))
    if OWN_TOKENS not in scopes:
        raise ConfigurationError(
            f"sequence_parallel={devices}: the loss function computes with whole rows on each of the devices "
            "that share them. Let it take this device's part of tokens and labels by zerojax.own_tokens, as "
            "zerojax.models.lm_loss does, or set sequence_parallel=1."
        )
    if EXCHANGE not in scopes:
        raise ConfigurationError(
            f"sequence_parallel={devices}: the model never calls zerojax.attention, so no token sees those "
            "on the other devices of its row. Call it in place of the attention that the model has; one that "
            "mixes tokens in another way, such as convolutions, needs sequence_parallel=1."
        )


def _scopes(jaxpr: core.Jaxpr) -> Iterator[str]:
    """The name scopes of all equations."""
    for equation in jaxpr.eqns:
        yield from re.findall(r"\w+", str(equation.source_info.name_stack))
        for inner in core.jaxprs_in_params(equation.params):
            yield from _scopes(inner)
