"""``Experts`` for Flax Linen models, and how a module of your own declares the weights of experts."""

from typing import cast

import jax
import jax.numpy as jnp
from flax import linen
from flax.core import meta
from flax.typing import Initializer
from jaxtyping import Array, Float

from zerojax.adapters.expert_param import ExpertBox
from zerojax.adapters.router_state import ROUTER_STATE
from zerojax.experts.exchange import CAPACITY
from zerojax.experts.mixture import check_sizes, mix_experts, moved
from zerojax.experts.mlp import ACTIVATIONS, Activation, ExpertWeights
from zerojax.experts.router import RouterConfig
from zerojax.experts.stats import RouterStats

_normal = linen.initializers.normal(0.02)


def linen_expert_param(module: linen.Module, name: str, init: Initializer, shape: tuple[int, ...]) -> Array:
    """``module.param(name, init, shape)`` of a weight whose leading axis is the expert's.

    In a step, ``ZeroConfig(experts=)`` may spread the experts of a unit over the devices of a node: then this
    is ``[experts / devices, ...]``, the device's own, and the module has to bring them the tokens of the
    whole node (``zerojax.mix_experts`` does).
    """
    if module.has_variable("params", name):
        return meta.unbox(module.get_variable("params", name))  # `param` would refuse another shape
    return cast(Array, module.param(name, lambda key: ExpertBox(init(key, shape))))


class GatedMLP(linen.Module):
    """The expert that every token goes to."""

    hidden: int
    activation: Activation
    gated: bool
    kernel_init: Initializer
    down_init: Initializer

    @linen.compact
    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """Apply gate and up, the activation, and down."""

        def dense(width: int, name: str, init: Initializer) -> linen.Dense:
            return linen.Dense(width, use_bias=False, kernel_init=init, dtype=x.dtype, name=name)

        gate, up = (
            dense(self.hidden, name, self.kernel_init)(x).astype(jnp.float32) for name in ("gate", "up")
        )
        out = dense(x.shape[-1], "down", self.down_init)(
            ACTIVATIONS[self.activation](gate, up).astype(x.dtype)
        )
        if not self.gated:
            return out
        share = jax.nn.sigmoid(dense(1, "output_gate", self.kernel_init)(x).astype(jnp.float32))
        return (out * share).astype(x.dtype)


class LinenExperts(linen.Module):
    """``zerojax.Experts`` for Linen: the same weights by the same names, and the same results.

    Attributes:
        hidden: width of an expert.
        experts: how many there are.
        per_token: of these, how many a token goes to.
        router_config: how they are chosen.
        activation: "swiglu", "geglu" or "swiglu_clamped".
        biases: whether the experts have biases.
        shared_hidden: hidden width of one more expert, that every token goes to; 0 means none.
        shared_gate: whether its output is multiplied by the sigmoid of a product with the token.
        capacity: see ``zerojax.Experts``.
        kernel_init: of weights.
        down_init: of ``down``; None means ``kernel_init``.
    """

    hidden: int
    experts: int
    per_token: int
    router_config: RouterConfig = RouterConfig()
    activation: Activation = "swiglu"
    biases: bool = False
    shared_hidden: int = 0
    shared_gate: bool = False
    capacity: float = CAPACITY
    kernel_init: Initializer = _normal
    down_init: Initializer | None = None

    @linen.compact
    def __call__(
        self, x: Float[Array, "*batch width"], *, deterministic: bool = False
    ) -> tuple[Float[Array, "*batch width"], RouterStats]:
        """What the experts return for each token, and what the router did.

        Args:
            x: tokens.
            deterministic: whether the biases of the choice stay as they are (``RouterConfig.balance_rate``),
                as in evaluation. They also do where the collection ``ROUTER_STATE`` is not mutable.

        Raises:
            ConfigurationError: a size is below 1, or settings exclude each other.
        """
        options = {"shared": self.shared_hidden, "shared_gate": self.shared_gate}
        check_sizes(x.shape[-1], self.hidden, self.experts, self.activation, **options)
        self.router_config.check(self.experts, self.per_token)
        width, down_init = x.shape[-1], self.down_init or self.kernel_init
        wide, narrow = (self.experts, width, self.hidden), (self.experts, self.hidden, width)
        tokens = x.reshape(-1, width)
        router = self.param("router", self.kernel_init, (width, self.experts))
        zeros = linen.initializers.zeros
        router_bias = (
            self.param("router_bias", zeros, (self.experts,)) if self.router_config.logit_biases else None
        )
        gate = linen_expert_param(self, "gate", self.kernel_init, wide)
        up = linen_expert_param(self, "up", self.kernel_init, wide)
        down = linen_expert_param(self, "down", down_init, narrow)
        own = ExpertWeights(gate, up, down)
        if self.biases:
            own = own._replace(
                gate_bias=linen_expert_param(self, "gate_bias", zeros, wide[::2]),
                up_bias=linen_expert_param(self, "up_bias", zeros, wide[::2]),
                down_bias=linen_expert_param(self, "down_bias", zeros, narrow[::2]),
            )
        moves = self.is_mutable_collection(ROUTER_STATE) and not (deterministic or self.is_initializing())
        bias = load = None
        if self.router_config.balance_rate:
            each = (self.experts,)
            bias = self.variable(ROUTER_STATE, "choice_bias", jnp.zeros, each, jnp.float32)
            load = self.variable(ROUTER_STATE, "load", jnp.zeros, each, jnp.int32)
            if moves:
                bias.value = moved(bias.value, load.value, self.router_config.balance_rate)
        out, stats = mix_experts(
            tokens,
            router,
            own,
            self.per_token,
            self.router_config,
            router_bias=router_bias,
            choice_bias=bias and bias.value,
            activation=self.activation,
            capacity=self.capacity,
        )
        if load is not None and moves:
            load.value = stats.counts.astype(jnp.int32)
        if self.shared_hidden:
            shared = GatedMLP(
                self.shared_hidden,
                self.activation,
                self.shared_gate,
                self.kernel_init,
                down_init,
                name="shared",
            )
            out = out + shared(tokens)
        return out.reshape(x.shape), stats
