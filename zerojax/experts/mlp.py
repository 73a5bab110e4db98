"""The experts' networks on the tokens that are sent to them.

Every token has a row for each of its experts (``zerojax.experts.rows``), and the products of all experts are
grouped matmuls. One of several devices cannot know how many rows its experts get, but shapes must be fixed.
So it computes ``Plan.rows`` rows at a time, in rounds until no row is left. No token is ever dropped, however
the router chooses, and the memory of a round is bounded. Usually there is one round.

Routing weights are applied between the activation and the second product, so the backward pass needs no
expert's output. It keeps each row's first products, with gate and up, under the name "experts" for
rematerialisation, for the first round alone; it computes other rounds again.

If the weights are fp8 codes, tokens are cast once, by their own largest magnitude, before they become rows;
``zerojax.matmul.grouped`` says which product has which dtype.
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

Activation = Literal["gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu", "swiglu_clamped"]
GATED: frozenset[Activation] = frozenset({"swiglu", "geglu", "swiglu_clamped"})
"""The activations of two products, with gate and up. Others have no gate."""


def _clamped(gate: Array, up: Array) -> Array:
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


ACTIVATIONS: dict[Activation, Callable[..., Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda up: jax.nn.relu(up) ** 2,
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
    "swiglu_clamped": _clamped,
}
"""From the product with up, or from the products with gate and up."""


class ExpertWeights(NamedTuple):
    """The weights of the experts on this device, in one dtype. The matrices may be fp8 codes instead.

    Attributes:
        gate: gives the first argument of a gated activation, ``[experts, d, f]``; None for others.
        up: gives the activation's last argument, ``[experts, d, f]``.
        down: back to the width of a token, ``[experts, f, d]``.
        gate_bias: added to the product with gate, or None.
        up_bias: added to the product with up, or None.
        down_bias: added to the product with down, or None.
    """

    gate: Matrices | None
    up: Matrices
    down: Matrices
    gate_bias: Float[Array, "experts f"] | None = None
    up_bias: Float[Array, "experts f"] | None = None
    down_bias: Float[Array, "experts d"] | None = None

    @property
    def first(self) -> tuple[tuple[Matrices, Float[Array, "experts f"] | None], ...]:
        """The matrices of the first products, and their biases."""
        up = self.up, self.up_bias
        return (up,) if self.gate is None else ((self.gate, self.gate_bias), up)


@dataclass(frozen=True)
class Plan:
    """How a device computes its rows.

    Attributes:
        activation: the experts' activation.
        rows: the rows of a round.
        rounds: the most rounds that there can be.
        every: whether one round has a row for every assignment.
    """

    activation: Activation
    rows: int
    rounds: int
    every: bool

    def window(self, rows: Rows, number: Array | int) -> Window:
        """The rows of the round ``number``, counted from 0."""
        return rows.all if self.every else rows.window(number * self.rows, self.rows)


_BIAS_DEPTH = 64  # the smallest depth of the product kernels


def _bias(scale: Float[Array, " rows"], bias: Float[Array, "experts n"], window: Window) -> Array:
    """Each row's bias times ``scale``: a product, because its gradients are sums in a fixed order."""
    ones = jnp.zeros((len(scale), _BIAS_DEPTH), bias.dtype).at[:, 0].set(scale.astype(bias.dtype))
    return grouped_matmul(ones, jnp.pad(bias[:, None], ((0, 0), (0, _BIAS_DEPTH - 1), (0, 0))), window.sizes)


def _first(x: Factor, weight: Matrices, bias: Array | None, window: Window) -> Array:
    """Each row's product with a first matrix."""
    out = product(x, weight, window.sizes)
    out = out if bias is None else out + _bias(jnp.ones(len(out)), bias, window)
    return checkpoint_name(out, "experts")


def _between(activation: Activation, weights: Float[Array, " rows"], *first: Array) -> Array:
    """The input of the second product: the activation times each row's routing weight."""
    wide = ACTIVATIONS[activation](*(x.astype(jnp.float32) for x in first))
    return (wide * weights[:, None]).astype(first[0].dtype)


class _Kept(NamedTuple):
    """For the backward pass: the first products, and the scale of the second product's codes."""

    first: tuple[Array, ...]
    scale: Array | None


def _round(
    activation: Activation, x: Array, weights: Array, own: ExpertWeights, window: Window
) -> tuple[Array, _Kept]:
    """The outputs of the rows of a round."""
    rows = factor(x, [matrix for matrix, _ in own.first], window.tokens)
    first = tuple(_first(rows, *one, window) for one in own.first)
    by_row = to_rows(weights.reshape(-1), window.order)
    between = factor(_between(activation, by_row, *first), (own.down,))
    out = product(between, own.down, window.sizes)
    out = out if own.down_bias is None else out + _bias(by_row, own.down_bias, window)
    return out, _Kept(first, between.scale)


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
) -> tuple[tuple[Array, ...], Array, ExpertWeights]:
    """The gradients of a round: its rows' (by each first matrix), routing weights' and experts' gradients."""
    sizes = window.sizes
    rows = factor(x, [matrix for matrix, _ in own.first], window.tokens, sizes=sizes)
    by_row = to_rows(weights.reshape(-1), window.order)
    between, pull = jax.vjp(partial(_between, activation), by_row, *kept.first)
    second = factor(between, (own.down,), scale=kept.scale, sizes=sizes)
    arrived = factor(cotangent, (own.down,), window.tokens, fp8.E5M2, sizes=sizes)
    of_between, down = gradients(second, own.down, arrived, sizes)
    of_weights, *of_first = pull(of_between)
    by_bias, down_bias = _of_bias(by_row, own.down_bias, window, arrived.rows)

    def first(arrived: Array, weight: Matrices, bias: Array | None) -> tuple[Array, Array, Array | None]:
        of_bias = _of_bias(jnp.ones(len(arrived)), bias, window, arrived)[1]
        own = factor(arrived, (weight,), None, fp8.E5M2, sizes=sizes)
        return *gradients(rows, weight, own, sizes), of_bias

    found = [first(arrived, *one) for arrived, one in zip(of_first, own.first, strict=True)]
    _, gate, gate_bias = found[0] if len(found) > 1 else (None, None, None)
    _, up, up_bias = found[-1]
    of_experts = ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)
    return tuple(x for x, *_ in found), of_assignments(of_weights + by_bias, window), of_experts


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp(plan: Plan, x: Float[Array, "tokens d"], weights: Array, own: ExpertWeights, rows: Rows) -> Array:
    """The weighted sum of each token's experts on this device, summed in fp32.

    ``x`` are all tokens that may have a row, in the experts' dtype; ``weights`` are routing weights, fp32.
    """
    return _forward(plan, x, weights, own, rows)[0]


_Residuals = tuple[Array, Array, ExpertWeights, Rows, _Kept]
_Sums = tuple[Array, Array, ExpertWeights]
"""The gradients of tokens, of routing weights and of experts, over the rounds so far."""


def _each(function: Callable[..., Matrices], own: ExpertWeights, *others: ExpertWeights) -> ExpertWeights:
    """Apply a function to every weight that is codes; take other weights from the last argument."""

    def one(weight: Matrices, *rest: Array) -> Matrices:
        return function(weight, *rest) if isinstance(weight, Fp8Operand) else (weight, *rest)[-1]

    return jax.tree.map(one, own, *others, is_leaf=lambda x: isinstance(x, Fp8Operand))


def _forward(
    plan: Plan, x: Array, weights: Array, own: ExpertWeights, rows: Rows
) -> tuple[Array, _Residuals]:
    window = plan.window(rows, 0)
    added, kept = _round(plan.activation, x, weights, own, window)

    def add(window: Window, out: Array) -> Array:
        added, _ = _round(plan.activation, x, weights, own, window)
        return to_tokens([added], window, out)

    out = _with_further_rounds(plan, rows, add, to_tokens([added], window))
    read = _each(Fp8Operand.kept, own)
    return _once(own, out, (x[:0], weights[:0], read)), (x, weights, read, rows, kept)


def _once[T](own: ExpertWeights, found: T, given: PyTree[Array]) -> T:
    """``found``; if it was computed from codes, refuse its derivative (``fp8.underivable``)."""
    codes = any(isinstance(weight, Fp8Operand) for weight in own)
    return fp8.underivable(found, given) if codes else found


def _sum(a: Array, b: Array) -> Array:
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def _with_further_rounds[T](plan: Plan, rows: Rows, add: Callable[[Window, T], T], first: T) -> T:
    """``add`` the rounds after the first one to its result, until no row is left."""

    def more(carry: tuple[Array, T]) -> tuple[Array, T]:
        number, result = carry
        return number + 1, add(plan.window(rows, number), result)

    if plan.rounds == 1:
        return first
    return lax.while_loop(lambda carry: carry[0] * plan.rows < rows.total, more, (jnp.int32(1), first))[1]


def _backward(
    plan: Plan, residuals: _Residuals, cotangent: Array
) -> tuple[Array, Array, ExpertWeights, None]:
    # Without the barrier XLA may keep the forward pass' rows of tokens instead of gathering them again.
    (x, weights, own, rows, kept), cotangent = lax.optimization_barrier((residuals, cotangent))
    window = plan.window(rows, 0)
    given = (plan.activation, x, weights, own)
    of_rows, of_weights, of_experts = _round_backward(*given, window, kept, cotangent)

    def add(window: Window, sums: _Sums) -> _Sums:
        of_x, of_weights, of_experts = sums
        _, kept = _round(*given, window)
        of_rows, *others = _round_backward(*given, window, kept, cotangent)
        of_weights, of_experts = jax.tree.map(_sum, (of_weights, of_experts), tuple(others))
        return to_tokens(of_rows, window, of_x), of_weights, of_experts

    sums = _with_further_rounds(plan, rows, add, (to_tokens(of_rows, window), of_weights, of_experts))
    of_x, of_weights, of_experts = _once(own, sums, (x[:0], weights[:0], own, cotangent[:0]))
    return of_x, of_weights, _each(Fp8Operand.cotangent, own, of_experts), None


mlp.defvjp(_forward, _backward)
