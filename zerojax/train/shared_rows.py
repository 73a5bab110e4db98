"""Rows that several devices of a node share, and losses that cannot use them."""

from collections.abc import Collection

import jax
from jax.extend import core

from zerojax.adapters.loss import ATTENDED, OWN_TOKENS
from zerojax.dataflow.programs import equations_within
from zerojax.errors import ConfigurationError


def processes_a_row(devices: int) -> int:
    """The number of processes that share a row if so many devices do; all of them pass it to a step."""
    return max(1, devices // jax.local_device_count())


def refuse_unshared(jaxpr: core.Jaxpr, devices: int) -> None:
    """Refuse a function that would compute with whole rows on each of ``devices`` devices that share them.

    Raises:
        ConfigurationError: it takes no part of the tokens.
    """
    if devices > 1 and OWN_TOKENS not in _names(jaxpr):
        raise ConfigurationError(
            f"sequence_parallel={devices}: the function computes with whole rows on each of the devices "
            "that share them. Let it take this device's part of tokens and labels by zerojax.own_tokens, as "
            "zerojax.models.lm_loss does, or set sequence_parallel=1."
        )


def refuse_unmixed(jaxpr: core.Jaxpr, devices: int, mixed: Collection[str]) -> None:
    """Refuse a function that never brings together the parts of rows that ``devices`` devices share.

    Args:
        jaxpr: of the function.
        devices: number of devices that share a row.
        mixed: the lines of layers that mix tokens by other means than attention (``Branches.mixed``).

    Raises:
        ConfigurationError: nothing brings the parts of rows together.
    """
    if devices > 1 and not mixed and ATTENDED not in _names(jaxpr):
        raise ConfigurationError(
            f"sequence_parallel={devices}: the model never calls zerojax.attention, so no token sees the "
            "tokens on other devices of its row. Call it in place of the model's attention. Give whole rows "
            "to a layer that mixes tokens in another way, such as a convolution: "
            "own_tokens(layer(whole_rows(x)))."
        )


def _names(jaxpr: core.Jaxpr) -> set[object]:
    return {equation.params.get("name") for equation in equations_within(jaxpr)}
