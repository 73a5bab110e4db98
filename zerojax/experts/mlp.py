"""The experts' networks on the tokens that come to them.

Every token has a row for each of its experts here (``zerojax.experts.rows``), and the products of all experts
are grouped matmuls. A device of several cannot know how many rows its experts get, but shapes must be fixed:
it has ``Plan.rows`` at a time, and goes on in further rounds until none is left. So no token is ever dropped,
however the router chooses, and what a round needs is bounded. In the usual case there is one round.

Routing weights are applied between the activation and the second product. The backward pass so needs no
output of an expert, and keeps of each row only ``gate`` and ``up``, and those of the first round alone: other
rounds are computed again. Rematerialisation knows these two by the name "experts".

Where the weights are fp8 codes, tokens are cast once, by their own largest magnitude, before they become
rows; see ``zerojax.matmul.grouped`` for what is computed in which dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from zerojax.experts.rows import Rows, Window, of_assignments, to_rows, to_tokens
from zerojax.matmul import fp8
from zerojax.matmul.grouped import Factor, Matrices, factor, gradients, grouped_matmul, product
from zerojax.matmul.operand import Fp8Operand

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
    """The weights of the experts on this device, in one dtype. The matrices may be fp8 codes instead.

    Attributes:
        gate: of the activation's first argument, ``[experts, d, f]``.
        up: of its second one, ``[experts, d, f]``.
        down: back to the width of a token, ``[experts, f, d]``.
        gate_bias: or None.
        up_bias: or None.
        down_bias: or None.
    """

    gate: Matrices
    up: Matrices
    down: Matrices
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


_BIAS_DEPTH = 64  # the least that the kernels of products read in one piece


def _bias(scale: Float[Array, " rows"], bias: Float[Array, "experts n"], window: Window) -> Array:
    """Each row's bias times ``scale``: as a product, whose gradients are sums in a fixed order."""
    ones = jnp.zeros((len(scale), _BIAS_DEPTH), bias.dtype).at[:, 0].set(scale.astype(bias.dtype))
    return grouped_matmul(ones, jnp.pad(bias[:, None], ((0, 0), (0, _BIAS_DEPTH - 1), (0, 0))), window.sizes)


def _first(x: Factor, weight: Matrices, bias: Array | None, window: Window) -> Array:
    """A row's product with gate or up."""
    out = product(x, weight, window.sizes)
    out = out if bias is None else out + _bias(jnp.ones(len(out)), bias, window)
    return checkpoint_name(out, "experts")


def _between(activation: Activation, gate: Array, up: Array, weights: Float[Array, " rows"]) -> Array:
    """What a row's second product reads, times its weight."""
    wide = ACTIVATIONS[activation](gate.astype(jnp.float32), up.astype(jnp.float32))
    return (wide * weights[:, None]).astype(gate.dtype)


class _Kept(NamedTuple):
    """Of the rows of a round, for the backward pass."""

    gate: Array
    up: Array


def _round(
    activation: Activation, x: Array, weights: Array, own: ExpertWeights, window: Window
) -> tuple[Array, _Kept]:
    """The outputs of the rows of a round."""
    rows = factor(to_rows(x, window.tokens), (own.gate, own.up), among=x)
    kept = _Kept(_first(rows, own.gate, own.gate_bias, window), _first(rows, own.up, own.up_bias, window))
    by_row = to_rows(weights.reshape(-1), window.order)
    out = product(factor(_between(activation, *kept, by_row), (own.down,)), own.down, window.sizes)
    return out if own.down_bias is None else out + _bias(by_row, own.down_bias, window), kept


def _of_bias(
    scale: Float[Array, " rows"], bias: Array | None, window: Window, cotangent: Array
) -> tuple[Array | float, Array | None]:
    """The gradients of ``_bias``."""
    if bias is None:
        return 0, None
    return jax.vjp(partial(_bias, window=window), scale, bias)[1](cotangent)


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
    between, pull = jax.vjp(partial(_between, activation), *kept, by_row)
    arrived = factor(to_rows(cotangent, window.tokens), (own.down,), fp8.E5M2, among=cotangent)
    of_between, down = gradients(between, own.down, arrived, window.sizes)
    of_gate, of_up, of_weights = pull(of_between)
    by_bias, down_bias = _of_bias(by_row, own.down_bias, window, arrived.rows)

    def first(arrived: Array, weight: Matrices, bias: Array | None) -> tuple[Array, Array, Array | None]:
        of_rows, found = gradients(rows, weight, factor(arrived, (weight,), fp8.E5M2), window.sizes)
        return of_rows, found, _of_bias(jnp.ones(len(rows)), bias, window, arrived)[1]

    by_gate, gate, gate_bias = first(of_gate, own.gate, own.gate_bias)
    by_up, up, up_bias = first(of_up, own.up, own.up_bias)
    of_experts = ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)
    return (by_gate, by_up), of_assignments(of_weights + by_bias, window), of_experts


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp(plan: Plan, x: Float[Array, "tokens d"], weights: Array, own: ExpertWeights, rows: Rows) -> Array:
    """What a device's experts add to each token.

    ``x`` are all tokens that may have a row, in the dtype of the experts, and ``weights`` those of what an
    expert returns, fp32.

    Returns:
        ``[tokens, d]``: the weighted sum over the token's experts on this device, which is summed in fp32.
    """
    return _forward(plan, x, weights, own, rows)[0]


_Residuals = tuple[Array, Array, ExpertWeights, Rows, _Kept]
_Sums = tuple[Array, Array, ExpertWeights]
"""The gradients of tokens, of routing weights and of experts, over the rounds so far."""


def _each(function: Callable[..., Matrices], own: ExpertWeights, *others: ExpertWeights) -> ExpertWeights:
    """A function of every weight that is codes; other weights are those of the last argument."""

    def one(weight: Matrices, *rest: Array) -> Matrices:
        return function(weight, *rest) if isinstance(weight, Fp8Operand) else (weight, *rest)[-1]

    return jax.tree.map(one, own, *others, is_leaf=lambda x: isinstance(x, Fp8Operand))


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
    read = _each(Fp8Operand.kept, own)
    return _once(own, out, (x[:0], weights[:0], read)), (x, weights, read, rows, kept)


def _once[T](own: ExpertWeights, found: T, given: PyTree[Array]) -> T:
    """What is computed from codes, and not differentiated again; see ``fp8.underivable``."""
    codes = any(isinstance(weight, Fp8Operand) for weight in own)
    return fp8.underivable(found, given) if codes else found


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
    of_x, of_weights, of_experts = _once(own, sums, (x[:0], weights[:0], own, cotangent[:0]))
    return of_x, of_weights, _each(Fp8Operand.cotangent, own, of_experts), None


mlp.defvjp(_forward, _backward)
