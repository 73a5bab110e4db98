"""A router and its experts as a function of their weights, which the modules of both Flax APIs call."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from zerojax.errors import ConfigurationError
from zerojax.experts.exchange import CAPACITY, apply_experts
from zerojax.experts.mlp import ACTIVATIONS, Activation, ExpertWeights
from zerojax.experts.router import RouterConfig, route
from zerojax.experts.stats import RouterStats


def mix_experts(
    x: Float[Array, "tokens d"],
    router: Float[Array, "d experts"],
    own: ExpertWeights,
    per_token: int,
    config: RouterConfig,
    *,
    router_bias: Float[Array, " experts"] | None = None,
    choice_bias: Float[Array, " experts"] | None = None,
    activation: Activation = "swiglu",
    capacity: float = CAPACITY,
) -> tuple[Float[Array, "tokens d"], RouterStats]:
    """What the experts that a router chooses return for each token, and what the router did.

    ``zerojax.Experts`` as a function, for modules of your own. No token is dropped.

    Args:
        x: tokens.
        router: makes logits of them, which are fp32.
        own: the experts, or inside a step those that this device has (``zerojax.ExpertParam``), in one dtype.
        per_token: how many experts a token goes to.
        config: how they are chosen.
        router_bias: of the logits.
        choice_bias: of the choice; see ``RouterConfig.balance_rate``.
        activation: of the experts.
        capacity: see ``zerojax.Experts``.
    """
    exact = router.dtype == jnp.float32
    logits = jnp.einsum(
        "td,de->te",
        x.astype(jnp.float32) if exact else x,
        router,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
    if router_bias is not None:
        logits += router_bias.astype(jnp.float32)
    experts, weights, stats = route(logits, per_token, config, choice_bias)
    options = {"of": router.shape[1], "activation": activation, "capacity": capacity}
    return apply_experts(x, experts, weights, own, **options), stats


def check_sizes(
    width: int, hidden: int, experts: int, activation: Activation, *, shared: int, shared_gate: bool
) -> None:
    """Refuse what a module was given.

    Raises:
        ConfigurationError: a size is below 1, or settings exclude each other.
    """
    for name, value in {"width": width, "hidden": hidden, "experts": experts}.items():
        if value < 1:
            raise ConfigurationError(f"Experts: {name}={value} must be at least 1")
    if shared < 0 or (shared_gate and not shared):
        raise ConfigurationError(
            f"Experts: shared={shared}, shared_gate={shared_gate}: a width of at least 0, above 0 with a gate"
        )
    if activation not in ACTIVATIONS:
        raise ConfigurationError(f"Experts: activation={activation!r}: one of {', '.join(ACTIVATIONS)}")


def moved(bias: Float[Array, " experts"], load: Int32[Array, " experts"], rate: float) -> Array:
    """The bias of the choice after a step in which the experts had this load; one at the mean stays."""
    whole, rest = jnp.divmod(load.sum(), load.size)
    # The sign of the mean less the load, without a rounding.
    return bias + rate * jnp.sign(2 * (whole - load) + (rest > 0))
