"""``Experts`` for Flax Linen models, and how a module of your own declares the weights of experts."""

from functools import partial
from typing import cast

import jax.numpy as jnp
from flax import linen
from flax.core import meta
from flax.typing import Initializer
from jaxtyping import Array, Float

from zerojax.adapters.roles import ROUTER_STATE, ExpertBox
from zerojax.experts.exchange import CAPACITY
from zerojax.experts.mixture import Mixture, moved, shared_mlp
from zerojax.experts.mlp import GATED, Activation, ExpertWeights
from zerojax.experts.router import RouterConfig, RouterStats

_normal = linen.initializers.normal(0.02)
_zeros = linen.initializers.zeros


def linen_expert_param(module: linen.Module, name: str, init: Initializer, shape: tuple[int, ...]) -> Array:
    """``module.param(name, init, shape)`` for a weight whose leading axis counts experts.

    In a step, ``ZeroConfig(experts=)`` may spread a unit's experts over the devices of a node. Then this is
    the device's part, ``[experts / devices, ...]``. The module has to bring its experts the tokens of the
    whole node, as ``zerojax.mix_experts`` does.
    """
    if module.has_variable("params", name):
        return meta.unbox(module.get_variable("params", name))  # `param` would refuse another shape
    return cast(Array, module.param(name, lambda key: ExpertBox(init(key, shape))))


def _dense(like: Array, width: int, name: str, init: Initializer) -> linen.Dense:
    """A layer without bias, in the dtype of ``like``."""
    return linen.Dense(width, use_bias=False, kernel_init=init, dtype=like.dtype, name=name)


class SharedMLP(linen.Module):
    """The expert to which every token goes."""

    mixture: Mixture
    kernel_init: Initializer
    down_init: Initializer

    @linen.compact
    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """See ``shared_mlp``."""
        dense = partial(_dense, x, init=self.kernel_init)
        gate = dense(self.mixture.shared, "gate") if self.mixture.activation in GATED else None
        up, down = dense(self.mixture.shared, "up"), dense(x.shape[-1], "down", init=self.down_init)
        share = dense(1, "output_gate") if self.mixture.shared_gate else None
        return shared_mlp(x, self.mixture.activation, gate, up, down, share)


class LinenExperts(linen.Module):
    """``zerojax.Experts`` for Linen: the same weights by the same names, and the same results.

    Attributes:
        hidden: hidden width of an expert.
        experts: how many experts there are.
        per_token: how many experts a token goes to.
        router_config: how a token's experts are chosen.
        activation: see ``zerojax.Experts``.
        biases: whether the experts have biases.
        shared_hidden: hidden width of one more expert, to which every token goes; 0 means none.
        shared_gate: whether its output is multiplied by the sigmoid of a product with the token.
        latent: see ``zerojax.Experts``.
        capacity: see ``zerojax.Experts``.
        kernel_init: initialises the weights.
        down_init: initialises ``down``; None means ``kernel_init``.
    """

    hidden: int
    experts: int
    per_token: int
    router_config: RouterConfig = RouterConfig()
    activation: Activation = "swiglu"
    biases: bool = False
    shared_hidden: int = 0
    shared_gate: bool = False
    latent: int = 0
    capacity: float = CAPACITY
    kernel_init: Initializer = _normal
    down_init: Initializer | None = None

    @linen.compact
    def __call__(
        self, x: Float[Array, "*batch width"], *, deterministic: bool = False
    ) -> tuple[Float[Array, "*batch width"], RouterStats]:
        """The weighted sum of the experts' outputs for each token, and the router's statistics.

        Args:
            x: tokens.
            deterministic: whether the biases of the choice stay as they are (``RouterConfig.balance_rate``),
                as in evaluation. They also do if the collection ``ROUTER_STATE`` is not mutable.

        Raises:
            ConfigurationError: a size is below 1, or settings exclude each other.
        """
        width, each, config = x.shape[-1], (self.experts,), self.router_config
        sizes = width, self.hidden, self.experts, self.per_token
        options = self.activation, self.shared_hidden, self.shared_gate, self.capacity, self.latent
        mixture = Mixture(*sizes, config, *options)
        down_init = self.down_init or self.kernel_init
        router = self.param("router", self.kernel_init, (width, *each))
        router_bias = self.param("router_bias", _zeros, each) if config.logit_biases else None
        inner = mixture.inner
        wide, narrow = (*each, inner, self.hidden), (*each, self.hidden, inner)
        gated = self.activation in GATED
        gate = linen_expert_param(self, "gate", self.kernel_init, wide) if gated else None
        up = linen_expert_param(self, "up", self.kernel_init, wide)
        own = ExpertWeights(gate, up, linen_expert_param(self, "down", down_init, narrow))
        if self.biases:
            shapes = {"gate_bias": wide[::2]} if gated else {}
            shapes |= {"up_bias": wide[::2], "down_bias": narrow[::2]}
            biases = {name: linen_expert_param(self, name, _zeros, shape) for name, shape in shapes.items()}
            own = own._replace(**biases)
        moves = self.is_mutable_collection(ROUTER_STATE) and not (deterministic or self.is_initializing())
        bias = load = None
        if config.balance_rate:
            bias = self.variable(ROUTER_STATE, "choice_bias", jnp.zeros, each, jnp.float32)
            load = self.variable(ROUTER_STATE, "load", jnp.zeros, each, jnp.int32)
            if moves:
                bias.value = moved(bias.value, load.value, config.balance_rate)
        around = None
        if self.latent:
            down = _dense(x, self.latent, "latent_down", self.kernel_init)
            around = down, _dense(x, width, "latent_up", down_init)
        shared = (
            SharedMLP(mixture, self.kernel_init, down_init, name="shared") if self.shared_hidden else None
        )
        out, stats = mixture(
            x,
            router,
            own,
            router_bias=router_bias,
            choice_bias=None if bias is None else bias.value,
            shared=shared,
            around=around,
        )
        if load is not None and moves:
            load.value = stats.counts.astype(jnp.int32)
        return out, stats
