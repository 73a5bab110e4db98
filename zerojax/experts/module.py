"""``zerojax.Experts``: a mixture of experts in place of a network's MLP."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zerojax.adapters.roles import ExpertParam, RouterState
from zerojax.experts.exchange import CAPACITY
from zerojax.experts.mixture import Mixture, moved, shared_mlp
from zerojax.experts.mlp import GATED, Activation, ExpertWeights
from zerojax.experts.router import RouterConfig, RouterStats

_normal = nnx.initializers.normal(0.02)


class SharedMLP(nnx.Module):
    """The expert to which every token goes."""

    def __init__(self, mixture: Mixture, init: nnx.Initializer, down_init: nnx.Initializer, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int, init: nnx.Initializer = init) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)

        width, hidden = mixture.width, mixture.shared
        self.activation: Activation = mixture.activation
        self.gate = linear(width, hidden) if mixture.activation in GATED else None
        self.up = linear(width, hidden)
        self.down = linear(hidden, width, down_init)
        self.output_gate = linear(width, 1) if mixture.shared_gate else None

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """See ``shared_mlp``."""
        return shared_mlp(x, self.activation, self.gate, self.up, self.down, self.output_gate)


class Experts(nnx.Module):
    """A router and MLPs; each token goes to a few of them (Shazeer et al., 2017).

    The weights are ``router``, ``[width, experts]``; ``up`` and, for gated activations, ``gate``,
    ``[experts, width, hidden]``; and ``down``, ``[experts, hidden, width]``. With ``latent`` they have this
    width, and ``latent_down`` and ``latent_up`` project from the token and back. No token is ever dropped,
    however the router chooses. The module computes in the dtype of its weights; the router's logits and
    probabilities are fp32.

    In a step, ``ZeroConfig(experts=)`` says which devices have the weights of an expert, if they are in a
    unit: make the module a part of a block in a ``Stack``, or of a class in ``ZeroConfig.units``.

    Examples:
        >>> layer = zerojax.Experts(8, 16, experts=4, per_token=2, rngs=nnx.Rngs(0))
        >>> y, stats = layer(jnp.ones((2, 3, 8)))
        >>> y.shape, int(stats.counts.sum())
        ((2, 3, 8), 12)
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        per_token: int,
        *,
        router: RouterConfig = RouterConfig(),
        activation: Activation = "swiglu",
        biases: bool = False,
        shared: int = 0,
        shared_gate: bool = False,
        latent: int = 0,
        capacity: float = CAPACITY,
        init: nnx.Initializer = _normal,
        down_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        """Create the weights.

        Args:
            width: elements of a token.
            hidden: hidden width of an expert.
            experts: how many experts there are.
            per_token: how many experts a token goes to.
            router: how a token's experts are chosen.
            activation: gated: "swiglu", "geglu" (with GELU's tanh form), or "swiglu_clamped" (gpt-oss); or
                without a gate: "relu2" (squared ReLU, Nemotron 3), "relu", "gelu" or "gelu_exact".
            biases: whether the experts have biases: ``gate_bias``, ``up_bias`` and ``down_bias``.
            shared: hidden width of one more expert, to which every token goes; 0 means none. For a model with
                several shared experts (DeepSeek) it is the sum of their widths.
            shared_gate: whether the shared expert's output is multiplied by the sigmoid of a product with the
                token (Qwen2-MoE).
            latent: width of a token's projection that experts read and write (Nemotron 3 Super); 0 means that
                they read the token. The router and the shared expert always do.
            capacity: rows that a device computes at a time, if the experts are spread over a node's devices,
                relative to its share under even use. Rows that do not fit are computed in further rounds.
                So this changes memory and speed, but not the result.
            init: initialises the weights.
            down_init: initialises ``down``; None means ``init``.
            rngs: seeds the weights.

        Raises:
            ConfigurationError: a size is below 1, or settings exclude each other.
        """
        sizes = width, hidden, experts, per_token
        self.mixture = mixture = Mixture(*sizes, router, activation, shared, shared_gate, capacity, latent)
        inner = mixture.inner
        down_init = down_init or init
        self.deterministic = False  # set by model.eval()
        self.router = nnx.Param(init(rngs.params(), (width, experts)))
        self.router_bias = nnx.Param(jnp.zeros(experts)) if router.logit_biases else None
        gated = activation in GATED
        self.gate = ExpertParam(init(rngs.params(), (experts, inner, hidden))) if gated else None
        self.up = ExpertParam(init(rngs.params(), (experts, inner, hidden)))
        self.down = ExpertParam(down_init(rngs.params(), (experts, hidden, inner)))
        self.gate_bias = ExpertParam(jnp.zeros((experts, hidden))) if biases and gated else None
        self.up_bias = ExpertParam(jnp.zeros((experts, hidden))) if biases else None
        self.down_bias = ExpertParam(jnp.zeros((experts, inner))) if biases else None
        dense = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.latent_down = dense(width, latent, kernel_init=init) if latent else None
        self.latent_up = dense(latent, width, kernel_init=down_init) if latent else None
        self.shared = SharedMLP(mixture, init, down_init, rngs) if shared else None
        if router.balance_rate:
            self.choice_bias = RouterState(jnp.zeros(experts, jnp.float32))
            self.load = RouterState(jnp.zeros(experts, jnp.int32))

    def __call__(self, x: Float[Array, "*batch width"]) -> tuple[Float[Array, "*batch width"], RouterStats]:
        """The weighted sum of the experts' outputs for each token, and the router's statistics.

        With ``RouterConfig.balance_rate`` a call in training mode first moves the biases of the choice
        against the load of the last call, and keeps its own load. In a step the load is the whole batch's:
        the tokens of each expert on all devices and in all micro-batches, and biases move once.
        """
        return self.routed(x, self.shared)

    def routed(
        self,
        x: Float[Array, "*batch width"],
        shared: SharedMLP | None = None,
        scored: Float[Array, "*batch width"] | None = None,
        factors: Float[Array, " experts"] | None = None,
    ) -> tuple[Float[Array, "*batch width"], RouterStats]:
        """Call the module, with another ``shared`` expert or none; see ``mix_experts`` for the others."""
        rate = self.mixture.router.balance_rate
        moves = rate > 0 and not self.deterministic
        if moves:
            self.choice_bias[...] = moved(self.choice_bias[...], self.load[...], rate)
        optional = (self.gate, self.gate_bias, self.up_bias, self.down_bias)
        gate, *biases = (None if weight is None else weight[...] for weight in optional)
        down, up = self.latent_down, self.latent_up
        out, stats = self.mixture(
            x,
            self.router[...],
            ExpertWeights(gate, self.up[...], self.down[...], *biases),
            router_bias=None if self.router_bias is None else self.router_bias[...],
            choice_bias=self.choice_bias[...] if rate else None,
            shared=shared,
            around=None if down is None or up is None else (down, up),
            scored=scored,
            factors=factors,
        )
        if moves:
            self.load[...] = stats.counts.astype(jnp.int32)
        return out, stats
