"""The experts' networks on the tokens that come to them.

Every token has a row for each of its experts here (``zerojax.experts.rows``), and the products of all experts
are grouped matmuls. A device of several cannot know how many rows its experts get, but shapes must be fixed:
it has ``Plan.rows`` at a time, and goes on in further rounds until none is left. So no token is ever dropped,
however the router chooses, and what a round needs is bounded. In the usual case there is one round.

Routing weights are applied between the activation and the second product. The backward pass so needs no
output of an expert, and keeps of each row only ``gate`` and ``up``, and those of the first round alone: other
rounds are computed again. Rematerialisation knows these two by the name "experts".
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zerojax.experts.rows import Rows, Window, of_assignments, to_rows, to_tokens
from zerojax.matmul.grouped import grouped_matmul

Activation = Literal["swiglu", "geglu", "swiglu_clamped"]


def _clamped(gate: Array, up: Array) -> Array:
    """gpt-oss'."""
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


ACTIVATIONS: dict[Activation, Callable[[Array, Array], Array]] = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
    "swiglu_clamped": _clamped,
}
"""Of the products with gate and up."""


class ExpertWeights(NamedTuple):
    """The weights of the experts on this device, in one dtype.

    Attributes:
        gate: of the activation's first argument.
        up: of its second one.
        down: back to the width of a token.
        gate_bias: or None.
        up_bias: or None.
        down_bias: or None.
    """

    gate: Float[Array, "experts d f"]
    up: Float[Array, "experts d f"]
    down: Float[Array, "experts f d"]
    gate_bias: Float[Array, "experts f"] | None = None
    up_bias: Float[Array, "experts f"] | None = None
    down_bias: Float[Array, "experts d"] | None = None


@dataclass(frozen=True)
class Plan:
    """How the rows are gone through.

    Attributes:
        activation: of the experts.
        rows: of a round.
        rounds: at the most.
        every: whether the rows of one round are all assignments that there are.
    """

    activation: Activation
    rows: int
    rounds: int
    every: bool

    def window(self, rows: Rows, number: Array | int) -> Window:
        """The rows of a round."""
        return rows.window(number * self.rows, self.rows)

    def first(self, rows: Rows) -> Window:
        """The rows of the first round."""
        return rows.all if self.every else self.window(rows, 0)


_BIAS_DEPTH = 16  # the least that the kernels of products read in one piece


def _bias(scale: Float[Array, " rows"], bias: Float[Array, "experts n"], window: Window) -> Array:
    """Each row's bias times ``scale``: as a product, whose gradients are sums in a fixed order."""
    ones = jnp.zeros((len(scale), _BIAS_DEPTH), bias.dtype).at[:, 0].set(scale.astype(bias.dtype))
    return grouped_matmul(ones, jnp.pad(bias[:, None], ((0, 0), (0, _BIAS_DEPTH - 1), (0, 0))), window.sizes)


def _first(x: Array, weight: Array, bias: Array | None, window: Window) -> Array:
    """A row's product with gate or up."""
    out = grouped_matmul(x, weight, window.sizes)
    out = out if bias is None else out + _bias(jnp.ones(len(x)), bias, window)
    return checkpoint_name(out, "experts")


def _second(
    activation: Activation,
    window: Window,
    gate: Array,
    up: Array,
    weights: Float[Array, " rows"],
    down: Array,
    bias: Array | None,
) -> Array:
    """A row's output, times its weight."""
    wide = ACTIVATIONS[activation](gate.astype(jnp.float32), up.astype(jnp.float32))
    out = grouped_matmul((wide * weights[:, None]).astype(gate.dtype), down, window.sizes)
    return out if bias is None else out + _bias(weights, bias, window)


class _Kept(NamedTuple):
    """Of the rows of a round, for the backward pass."""

    gate: Array
    up: Array


def _round(
    activation: Activation, x: Array, weights: Array, own: ExpertWeights, window: Window
) -> tuple[Array, _Kept]:
    """The outputs of the rows of a round."""
    rows = to_rows(x, window.tokens)
    kept = _Kept(_first(rows, own.gate, own.gate_bias, window), _first(rows, own.up, own.up_bias, window))
    by_row = to_rows(weights.reshape(-1), window.order)
    return _second(activation, window, *kept, by_row, own.down, own.down_bias), kept


def _round_backward(
    activation: Activation,
    x: Array,
    weights: Array,
    own: ExpertWeights,
    window: Window,
    kept: _Kept,
    cotangent: Array,
) -> tuple[tuple[Array, Array], Array, ExpertWeights]:
    """The gradients of a round: of its rows, by gate and by up; of routing weights; of the experts."""
    rows = to_rows(x, window.tokens)
    by_row = to_rows(weights.reshape(-1), window.order)
    second = partial(_second, activation, window)
    _, pull = jax.vjp(second, *kept, by_row, own.down, own.down_bias)
    of_gate, of_up, of_weights, down, down_bias = pull(to_rows(cotangent, window.tokens))
    _, pull = jax.vjp(partial(_first, window=window), rows, own.gate, own.gate_bias)
    by_gate, gate, gate_bias = pull(of_gate)
    _, pull = jax.vjp(partial(_first, window=window), rows, own.up, own.up_bias)
    by_up, up, up_bias = pull(of_up)
    of_experts = ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)
    return (by_gate, by_up), of_assignments(of_weights, window), of_experts


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp(plan: Plan, x: Float[Array, "tokens d"], weights: Array, own: ExpertWeights, rows: Rows) -> Array:
    """What a device's experts add to each token.

    Args:
        plan: rounds.
        x: every token that may have a row, in the dtype of the experts.
        weights: ``[tokens, per_token]`` fp32, of what an expert returns.
        own: the experts.
        rows: the order of their rows.

    Returns:
        ``[tokens, d]``: the weighted sum over the token's experts on this device, which is summed in fp32.
    """
    return _forward(plan, x, weights, own, rows)[0]


_Residuals = tuple[Array, Array, ExpertWeights, Rows, _Kept]
_Sums = tuple[Array, Array, ExpertWeights]
"""The gradients of tokens, of routing weights and of experts, over the rounds so far."""


def _forward(
    plan: Plan, x: Array, weights: Array, own: ExpertWeights, rows: Rows
) -> tuple[Array, _Residuals]:
    window = plan.first(rows)
    added, kept = _round(plan.activation, x, weights, own, window)
    out = to_tokens([added], window)

    def more(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        number, out = carry
        window = plan.window(rows, number)
        added, _ = _round(plan.activation, x, weights, own, window)
        return number + 1, to_tokens([added], window, out)

    if plan.rounds > 1:
        _, out = lax.while_loop(partial(_is_left, plan, rows), more, (jnp.int32(1), out))
    return out, (x, weights, own, rows, kept)


def _sum(a: Array, b: Array) -> Array:
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def _is_left[T](plan: Plan, rows: Rows, carry: tuple[Array, T]) -> Array:
    """Whether a round has rows."""
    return carry[0] * plan.rows < rows.total


def _backward(
    plan: Plan, residuals: _Residuals, cotangent: Array
) -> tuple[Array, Array, ExpertWeights, None]:
    # Without the barrier the compiler may keep the forward pass' rows of tokens, which are gathered again.
    (x, weights, own, rows, kept), cotangent = lax.optimization_barrier((residuals, cotangent))
    window = plan.first(rows)
    given = (plan.activation, x, weights, own)
    of_rows, of_weights, of_experts = _round_backward(*given, window, kept, cotangent)
    sums = (to_tokens(of_rows, window), of_weights, of_experts)

    def more(carry: tuple[Array, _Sums]) -> tuple[Array, _Sums]:
        number, (of_x, of_weights, of_experts) = carry
        window = plan.window(rows, number)
        _, kept = _round(*given, window)
        of_rows, *others = _round_backward(*given, window, kept, cotangent)
        of_weights, of_experts = jax.tree.map(_sum, (of_weights, of_experts), tuple(others))
        return number + 1, (to_tokens(of_rows, window, of_x), of_weights, of_experts)

    if plan.rounds > 1:
        _, sums = lax.while_loop(partial(_is_left, plan, rows), more, (jnp.int32(1), sums))
    of_x, of_weights, of_experts = sums
    return of_x, of_weights, of_experts, None


mlp.defvjp(_forward, _backward)
