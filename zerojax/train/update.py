"""The optimizer's update of the weights, and when it is skipped.

It runs outside ``shard_map``, on global arrays, where a norm over the whole tree is right by construction.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int32, PyTree

from zerojax.train.host_update import InBackward, updated_by_layers
from zerojax.train.model_pass import Sums
from zerojax.train.pass_weights import ByPath
from zerojax.train.spec import TrainSpec
from zerojax.train.spikes import Losses


class Trained(NamedTuple):
    """The fields of a state that an update changes, with local updates for one node; see ``TrainState``."""

    params: PyTree[Array]
    opt_state: PyTree[Array]
    encoded: ByPath
    losses: Losses
    skipped_in_row: Int32[Array, ""]


def updated(
    spec: TrainSpec,
    before: Trained,
    gradients: PyTree[Array],
    sums: Sums,
    replicas: ByPath,
    done: InBackward | None = None,
) -> tuple[Trained, Bool[Array, ""], dict[str, Array]]:
    """Update the weights, unless the loss or a gradient is not finite, or the loss is a spike.

    Args:
        spec: the train spec; with local updates the spec of a node.
        before: the fields before the step.
        gradients: summed over all tokens, nested by path, stored like the weights.
        sums: of the losses and the tokens.
        replicas: delta's replicas after the passes; else empty.
        done: the parameters that the backward pass has updated, which have no entry in ``gradients``.

    Returns:
        The fields after the step; whether the update was made; and the metrics "grad_norm", "skipped" and
        "skipped_in_row", with a ``SpikeRule`` also "spike" and "loss_limit".
    """
    assert spec.tx is not None  # states without an optimizer have no compiled step
    tokens, loss = sums.tokens, sums.loss / sums.tokens
    grads = jax.tree.map(lambda x: x / tokens, gradients)
    squares = optax.tree.norm(grads, squared=True)
    grad_norm, losses = jnp.sqrt(squares + done.squares if done else squares), before.losses
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    metrics: dict[str, Array] = {"grad_norm": grad_norm}
    if spec.spikes is not None:
        limit = spec.spikes.limit(losses)
        spike = loss > limit
        ok &= ~spike
        losses = spec.spikes.add(losses, loss, ok)
        metrics |= {"spike": spike.astype(jnp.int32), "loss_limit": limit}
    params, opt_state, encoded = before.params, before.opt_state, before.encoded
    if spec.streams:
        params, opt_state, encoded = updated_by_layers(
            spec, ok, gradients, tokens, opt_state, params, encoded, replicas, done
        )
    else:
        with jax.named_scope("optimizer"):
            updates, opt_state = spec.tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        params = unless_skipped(ok, params, before.params)
        opt_state = unless_skipped(ok, opt_state, before.opt_state)
    in_row = jnp.where(ok, 0, before.skipped_in_row + 1)
    after = Trained(params, opt_state, encoded, losses, in_row)
    return after, ok, metrics | {"skipped": 1 - ok.astype(jnp.int32), "skipped_in_row": in_row}


def unless_skipped[T: PyTree](ok: Bool[Array, ""], after: T, before: T) -> T:
    """``after`` if the step is taken, ``before`` if it is skipped."""
    return jax.tree.map(functools.partial(jnp.where, ok), after, before)
