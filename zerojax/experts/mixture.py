"""A mixture of experts as a function of its weights, for the modules of both Flax APIs and for your own."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from zerojax.errors import ConfigurationError
from zerojax.experts.exchange import CAPACITY, apply_experts
from zerojax.experts.mlp import ACTIVATIONS, Activation, ExpertWeights
from zerojax.experts.router import RouterConfig, RouterStats, route

_Dense = Callable[[Array], Array]


def mix_experts(
    x: Float[Array, "tokens d"],
    router: Float[Array, "d experts"],
    own: ExpertWeights,
    per_token: int,
    config: RouterConfig,
    *,
    router_bias: Float[Array, " experts"] | None = None,
    choice_bias: Float[Array, " experts"] | None = None,
    scored: Float[Array, "tokens d"] | None = None,
    factors: Float[Array, " experts"] | None = None,
    activation: Activation = "swiglu",
    capacity: float = CAPACITY,
) -> tuple[Float[Array, "tokens d"], RouterStats]:
    """``zerojax.Experts`` as a function, for modules of your own. No token is dropped.

    Args:
        x: tokens.
        router: the matrix that gives a token's logits, which are fp32.
        own: the experts' weights, in one dtype; inside a step the device's part (``zerojax.ExpertParam``).
        per_token: how many experts a token goes to.
        config: how a token's experts are chosen.
        router_bias: added to the logits.
        choice_bias: added to the scores for the choice alone; see ``RouterConfig.balance_rate``.
        scored: what the router reads in place of ``x``.
        factors: each multiplies the weights of one expert.
        activation: the experts' activation.
        capacity: see ``zerojax.Experts``.

    Returns:
        For each token the weighted sum of its experts' outputs, in the dtype of ``x``; and the router's
        statistics.
    """
    exact, scored = router.dtype == jnp.float32, x if scored is None else scored
    logits = jnp.einsum(
        "td,de->te",
        scored.astype(jnp.float32) if exact else scored,
        router,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
    if router_bias is not None:
        logits += router_bias.astype(jnp.float32)
    experts, weights, stats = route(logits, per_token, config, choice_bias, factors)
    options = {"of": router.shape[1], "activation": activation, "capacity": capacity}
    return apply_experts(x, experts, weights, own, **options), stats


@dataclass(frozen=True)
class Mixture:
    """The sizes and options that the modules of both Flax APIs share; see ``zerojax.Experts``."""

    width: int
    hidden: int
    experts: int
    per_token: int
    router: RouterConfig
    activation: Activation
    shared: int
    shared_gate: bool
    capacity: float
    latent: int

    def __post_init__(self) -> None:
        for name in ("width", "hidden", "experts"):
            if (value := getattr(self, name)) < 1:
                raise ConfigurationError(f"Experts: {name}={value} must be at least 1")
        if self.latent < 0:
            raise ConfigurationError(f"Experts: latent={self.latent} must be at least 0")
        if self.shared < 0 or (self.shared_gate and not self.shared):
            raise ConfigurationError(
                f"Experts: shared={self.shared}, shared_gate={self.shared_gate}: the width must be "
                "at least 0, and above 0 with a gate"
            )
        if self.activation not in ACTIVATIONS:
            raise ConfigurationError(
                f"Experts: activation={self.activation!r} must be one of {', '.join(ACTIVATIONS)}"
            )
        self.router.check(self.experts, self.per_token)

    @property
    def inner(self) -> int:
        """Width of an expert's input and output."""
        return self.latent or self.width

    def __call__(
        self,
        x: Float[Array, "*batch width"],
        router: Array,
        own: ExpertWeights,
        *,
        router_bias: Array | None,
        choice_bias: Array | None,
        shared: _Dense | None,
        around: tuple[_Dense, _Dense] | None,
        scored: Float[Array, "*batch width"] | None = None,
        factors: Array | None = None,
    ) -> tuple[Float[Array, "*batch width"], RouterStats]:
        """``mix_experts``, plus the output of the ``shared`` expert if there is one.

        ``around`` are the projections of the experts' inputs and outputs, from ``width`` and back to it.
        """
        tokens = x.reshape(-1, x.shape[-1])
        out, stats = mix_experts(
            tokens if around is None else around[0](tokens),
            router,
            own,
            self.per_token,
            self.router,
            router_bias=router_bias,
            choice_bias=choice_bias,
            scored=tokens if scored is None else scored.reshape(tokens.shape),
            factors=factors,
            activation=self.activation,
            capacity=self.capacity,
        )
        out = out if around is None else around[1](out)
        if shared is not None:
            out = out + shared(tokens)
        return out.reshape(x.shape), stats


def shared_mlp(
    x: Float[Array, "tokens width"],
    activation: Activation,
    gate: _Dense | None,
    up: _Dense,
    down: _Dense,
    output_gate: _Dense | None,
) -> Float[Array, "tokens width"]:
    """Apply the expert to which every token goes; its layers have no bias.

    With an ``output_gate`` each token's output is multiplied by the sigmoid of the gate's one output.
    """
    first = (dense(x).astype(jnp.float32) for dense in (gate, up) if dense is not None)
    wide = ACTIVATIONS[activation](*first)
    out = down(wide.astype(x.dtype))
    if output_gate is None:
        return out
    return (out * jax.nn.sigmoid(output_gate(x).astype(jnp.float32))).astype(x.dtype)


def moved(bias: Float[Array, " experts"], load: Int32[Array, " experts"], rate: float) -> Array:
    """The bias of the choice after a step in which the experts had this load.

    An expert whose load is the mean keeps its bias.
    """
    whole, rest = jnp.divmod(load.sum(), load.size)
    # The sign of the mean less the load, without a rounding.
    return bias + rate * jnp.sign(2 * (whole - load) + (rest > 0))
