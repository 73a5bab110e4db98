"""The update of a model's weights from their mean gradients, and when it is skipped."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from zerojax.train.spec import TrainSpec
from zerojax.train.spikes import Losses


class Trained(NamedTuple):
    """The fields of a state that an update changes; see ``TrainState``."""

    params: PyTree[Array]
    opt_state: PyTree[Array]
    losses: Losses
    skipped_in_row: Int32[Array, ""]


def updated(
    spec: TrainSpec, before: Trained, grads: PyTree[Array], loss: Float[Array, ""]
) -> tuple[Trained, Bool[Array, ""], dict[str, Array]]:
    """Update the weights, unless the loss or a gradient is not finite or the loss is a spike.

    Args:
        spec: the train spec, which has an optimizer.
        before: the fields as they are.
        grads: the mean gradients, stored like the weights.
        loss: of this step.

    Returns:
        The fields after the step, whether it was not skipped, and what metrics tell of it.
    """
    assert spec.tx is not None  # a step is compiled for states with an optimizer alone
    grad_norm, losses = optax.tree.norm(grads), before.losses
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    metrics: dict[str, Array] = {"grad_norm": grad_norm}
    if spec.spikes is not None:
        limit = spec.spikes.limit(losses)
        spike = loss > limit
        ok &= ~spike
        losses = spec.spikes.add(losses, loss, ok)
        metrics |= {"spike": spike.astype(jnp.int32), "loss_limit": limit}
    with jax.named_scope("optimizer"):
        updates, opt_state = spec.tx.update(grads, before.opt_state, before.params)
        params = optax.apply_updates(before.params, updates)
    in_row = jnp.where(ok, 0, before.skipped_in_row + 1)
    after = Trained(
        unless_skipped(ok, params, before.params),
        unless_skipped(ok, opt_state, before.opt_state),
        losses,
        in_row,
    )
    return after, ok, metrics | {"skipped": 1 - ok.astype(jnp.int32), "skipped_in_row": in_row}


def unless_skipped(ok: Bool[Array, ""], after: Any, before: Any) -> Any:
    """A pytree as a step leaves it: as it was, if the step is skipped."""
    return jax.tree.map(functools.partial(jnp.where, ok), after, before)
