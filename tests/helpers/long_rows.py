"""States for one long row on one device: adapters beside frozen weights, activations in host memory."""

import jax
import optax

import zerojax
from zerojax.models import GPT, GPTConfig, lm_loss


def abstract_state(config: GPTConfig) -> zerojax.TrainState:
    return zerojax.TrainState.abstract(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-4),
        lm_loss,
        mesh=zerojax.make_mesh(1, 1, devices=jax.devices()[:1]),
        zero=zerojax.ZeroConfig(frozen=("*",), host=("activations",)),
        lora=zerojax.LoRA(rank=16),
    )
