"""``zerojax.Experts``: a mixture of experts in place of a network's MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zerojax.adapters.expert_param import ExpertParam
from zerojax.adapters.router_state import RouterState
from zerojax.experts.exchange import CAPACITY
from zerojax.experts.mixture import check_sizes, mix_experts, moved
from zerojax.experts.mlp import ACTIVATIONS, Activation, ExpertWeights
from zerojax.experts.router import RouterConfig
from zerojax.experts.stats import RouterStats

_normal = nnx.initializers.normal(0.02)


class GatedMLP(nnx.Module):
    """The expert that every token goes to."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Activation,
        *,
        gated: bool,
        init: nnx.Initializer,
        down_init: nnx.Initializer,
        rngs: nnx.Rngs,
    ):
        self.activation: Activation = activation
        self.gate = nnx.Linear(width, hidden, use_bias=False, kernel_init=init, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, kernel_init=down_init, rngs=rngs)
        self.output_gate = (
            nnx.Linear(width, 1, use_bias=False, kernel_init=init, rngs=rngs) if gated else None
        )

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """Apply gate and up, the activation, and down."""
        wide = ACTIVATIONS[self.activation](self.gate(x).astype(jnp.float32), self.up(x).astype(jnp.float32))
        out = self.down(wide.astype(x.dtype))
        if self.output_gate is None:
            return out
        return (out * jax.nn.sigmoid(self.output_gate(x).astype(jnp.float32))).astype(x.dtype)


class Experts(nnx.Module):
    """A router and gated MLPs, of which each token goes to a few (Shazeer et al., 2017).

    Of its weights, ``router`` is ``[width, experts]``; ``gate`` and ``up`` are ``[experts, width, hidden]``
    and ``down`` is ``[experts, hidden, width]``. No token is ever dropped, however the router chooses. The
    module computes in the dtype of its weights; the router's logits and probabilities are fp32.

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
        capacity: float = CAPACITY,
        init: nnx.Initializer = _normal,
        down_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        """Create the weights.

        Args:
            width: of a token.
            hidden: width of an expert.
            experts: how many there are.
            per_token: of these, how many a token goes to.
            router: how they are chosen.
            activation: "swiglu", "geglu" (of GELU's tanh form), or "swiglu_clamped" (gpt-oss).
            biases: whether the experts have biases: ``gate_bias``, ``up_bias`` and ``down_bias``.
            shared: hidden width of one more expert, that every token goes to: the sum, if a model has several
                (DeepSeek); 0 means none.
            shared_gate: whether its output is multiplied by the sigmoid of a product with the token
                (Qwen2-MoE).
            capacity: rows that a device computes with at a time where experts are spread over a node's
                devices, relative to its share if they are used evenly. What does not fit is computed in
                further rounds: this changes memory and speed, not the result.
            init: of weights.
            down_init: of ``down``; None means ``init``.
            rngs: seeds them.

        Raises:
            ConfigurationError: a size is below 1, or settings exclude each other.
        """
        check_sizes(width, hidden, experts, activation, shared=shared, shared_gate=shared_gate)
        router.check(experts, per_token)
        down_init = down_init or init
        self.experts, self.per_token, self.capacity = experts, per_token, capacity
        self.config = router
        self.activation: Activation = activation
        self.deterministic = False  # set by model.eval()
        self.router = nnx.Param(init(rngs.params(), (width, experts)))
        self.router_bias = nnx.Param(jnp.zeros(experts)) if router.logit_biases else None
        self.gate = ExpertParam(init(rngs.params(), (experts, width, hidden)))
        self.up = ExpertParam(init(rngs.params(), (experts, width, hidden)))
        self.down = ExpertParam(down_init(rngs.params(), (experts, hidden, width)))
        self.gate_bias = ExpertParam(jnp.zeros((experts, hidden))) if biases else None
        self.up_bias = ExpertParam(jnp.zeros((experts, hidden))) if biases else None
        self.down_bias = ExpertParam(jnp.zeros((experts, width))) if biases else None
        inits = {"init": init, "down_init": down_init}
        self.shared = (
            GatedMLP(width, shared, activation, gated=shared_gate, **inits, rngs=rngs) if shared else None
        )
        if router.balance_rate:
            self.choice_bias = RouterState(jnp.zeros(experts, jnp.float32))
            self.load = RouterState(jnp.zeros(experts, jnp.int32))

    def __call__(self, x: Float[Array, "*batch width"]) -> tuple[Float[Array, "*batch width"], RouterStats]:
        """What the experts return for each token, and what the router did.

        With ``RouterConfig.balance_rate`` a call in training mode first moves the biases of the choice
        against the load of the last one, and keeps its own load. In a step the load is the whole batch's:
        the tokens of each expert on all devices and in all micro-batches, and biases move once.
        """
        tokens = x.reshape(-1, x.shape[-1])
        rate = self.config.balance_rate
        moves = rate > 0 and not self.deterministic
        if moves:
            self.choice_bias[...] = moved(self.choice_bias[...], self.load[...], rate)
        out, stats = mix_experts(
            tokens,
            self.router[...],
            self._weights(),
            self.per_token,
            self.config,
            router_bias=None if self.router_bias is None else self.router_bias[...],
            choice_bias=self.choice_bias[...] if rate else None,
            activation=self.activation,
            capacity=self.capacity,
        )
        if moves:
            self.load[...] = stats.counts.astype(jnp.int32)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.reshape(x.shape), stats

    def _weights(self) -> ExpertWeights:
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        own = (None if bias is None else bias[...] for bias in biases)
        return ExpertWeights(self.gate[...], self.up[...], self.down[...], *own)
