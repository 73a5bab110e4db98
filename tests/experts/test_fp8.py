"""Experts whose matrices are fp8 codes, against a loop in fp32 that rounds to fp8 at the same places."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import started
from flax import nnx
from fp8_models import rounded
from jax import Array
from plain_experts import assert_close, some_experts, some_routing
from plain_loop import distance, masters

import zerojax
from zerojax import RouterStats, ZeroConfig
from zerojax.analysis.plan.units import fp8_of
from zerojax.experts import mixture
from zerojax.experts.exchange import apply_experts
from zerojax.experts.mlp import ExpertWeights, Plan, mlp
from zerojax.experts.rows import rows_of
from zerojax.matmul import fp8
from zerojax.matmul.operand import Fp8Operand
from zerojax.matmul.replay import at_matmuls

WIDTH, HIDDEN, EXPERTS, PER_TOKEN, LAYERS, ROWS, STEPS = 16, 32, 4, 2, 2, 24, 3


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _simulated(equation: str, x: Array, w: Array) -> Array:
    return _forward(equation, x, w)[0]


def _forward(equation: str, x: Array, w: Array) -> Any:
    around = tuple(rounded(value, jnp.float8_e4m3fn, 448) for value in (x, w))
    return jnp.einsum(equation, *around), around


def _backward(equation: str, kept: Any, cotangent: Array) -> Any:
    product = functools.partial(jnp.einsum, equation)
    return jax.vjp(product, *kept)[1](rounded(cotangent, jnp.float8_e5m2, 57344))


_simulated.defvjp(_forward, _backward)


def simulated(equation: str, x: Array, w: Array) -> Array:
    """A product of factors rounded to e4m3, in fp32; gradients are products with a cotangent in e5m2."""
    return jnp.asarray(_simulated(equation, x, w))


def simulated_experts(
    x: Array, experts: Array, weights: Array, own: ExpertWeights, *, replicas: bool = False, **_: Any
) -> Array:
    """See ``apply_experts``: all experts on all tokens, those that are not a token's with the weight 0."""
    matrices: Any = own[:3]
    if replicas:  # delta's, which are bf16 before they are encoded
        matrices = [w + jax.lax.stop_gradient(w.astype(jnp.bfloat16) - w) for w in matrices]
    gate, up, down = matrices
    biases = [0 if bias is None else bias[:, None] for bias in own[3:]]
    share = jnp.where(experts == jnp.arange(len(gate))[:, None, None], weights, 0).sum(-1)
    of_gate = simulated("td,edf->etf", x, gate) + biases[0]
    of_up = simulated("td,edf->etf", x, up) + biases[1]
    out = simulated("etf,efd->etd", jax.nn.silu(of_gate) * of_up * share[..., None], down)
    return jnp.sum(out + biases[2] * share[..., None], axis=0)


def as_codes(own: ExpertWeights, **options: Any) -> ExpertWeights:
    def codes(w: Any) -> Fp8Operand:
        scale = fp8.scale_for(jnp.max(jnp.abs(w)), fp8.E4M3)
        return Fp8Operand(fp8.encode(w, scale), jnp.full_like(w, jnp.nan), scale, "some/weight", **options)

    return own._replace(gate=codes(own.gate), up=codes(own.up), down=codes(own.down))


def tokens() -> Array:
    return jnp.asarray(np.random.default_rng(5).normal(size=(ROWS, WIDTH)), jnp.float32)


def in_rounds(own: ExpertWeights, x: Array, experts: Array, weights: Array) -> Array:
    """Fewer rows at a time than there are, so that there are four rounds."""
    rows = experts.size // 4 + 1
    return mlp(Plan("swiglu", rows, 4, False), x, weights, own, rows_of(experts, 0, EXPERTS, 4 * rows))


def at_once(own: ExpertWeights, x: Array, experts: Array, weights: Array) -> Array:
    """By a model that is traced with arrays."""

    def body(arrays: Any, *args: Array) -> Array:
        x, experts, weights = args
        return apply_experts(x, experts, weights, ExpertWeights(*arrays), of=EXPERTS)

    present = [weight for weight in own if weight is not None]
    return at_matmuls(body)(present, x, experts, weights)


@pytest.mark.parametrize("run", [pytest.param(at_once, marks=pytest.mark.slow), in_rounds])
def test_products_and_gradients_are_those_of_a_loop(run):
    own = some_experts(EXPERTS, WIDTH, HIDDEN, biases=run is at_once)
    x = tokens()
    experts, weights = some_routing(ROWS, EXPERTS, PER_TOKEN, skewed=True)
    target = jnp.cos(jnp.arange(ROWS * WIDTH, dtype=jnp.float32)).reshape(ROWS, WIDTH)

    def loss(function: Any, own: ExpertWeights, x: Array, weights: Array) -> Array:
        return jnp.sum(function(own, x, experts, weights) * target)

    def by_loop(own: ExpertWeights, x: Array, experts: Array, weights: Array) -> Array:
        return simulated_experts(x, experts, weights, own)

    wanted = jax.jit(jax.value_and_grad(functools.partial(loss, by_loop), (0, 1, 2)))(own, x, weights)
    found = jax.jit(jax.value_and_grad(functools.partial(loss, run), (0, 1, 2), allow_int=True))
    value, (of_own, *others) = found(as_codes(own), x, weights)
    of_own = [w.gradient if isinstance(w, Fp8Operand) else w for w in of_own if w is not None]
    assert_close((value, (of_own, *others)), wanted, tolerance=2e-3 if run is in_rounds else 2e-5)


@pytest.mark.slow
def test_weights_that_are_not_trained_have_no_gradient():
    own, x = some_experts(EXPERTS, WIDTH, HIDDEN), tokens()
    experts, weights = some_routing(ROWS, EXPERTS, PER_TOKEN)

    def loss(own: ExpertWeights) -> Array:
        return jnp.sum(at_once(own, x, experts, weights) ** 2)

    found = jax.grad(loss, allow_int=True)(as_codes(own, trained=False))
    for weight in found[:3]:
        assert not weight.gradient.any()


def test_a_second_derivative_is_refused():
    own, x = some_experts(EXPERTS, WIDTH, HIDDEN), tokens()
    experts, weights = some_routing(ROWS, EXPERTS, PER_TOKEN)
    codes = as_codes(own)

    def penalty(gradient: Array) -> Array:
        assert isinstance(codes.up, Fp8Operand)
        own = codes._replace(up=dataclasses.replace(codes.up, gradient=gradient))
        return jnp.sum(jax.grad(lambda x: jnp.sum(at_once(own, x, experts, weights)))(x) ** 2)

    with pytest.raises(zerojax.ZeroError, match='matmul_dtype="compute"'):
        jax.eval_shape(jax.grad(penalty), own.up)


# --- steps


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        options = {"capacity": 0.75, "init": nnx.initializers.normal(0.2)}
        self.mixture = zerojax.Experts(WIDTH, HIDDEN, EXPERTS, PER_TOKEN, **options, rngs=rngs)

    def __call__(self, carry: tuple[Array, RouterStats]) -> tuple[Array, RouterStats]:
        x, before = carry
        added, stats = self.mixture(x)
        return x + added, before + stats


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.blocks = zerojax.Stack(Block, LAYERS, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.head(self.blocks((x, RouterStats.zeros(EXPERTS)))[0])[:, 0]


def loss_fn(model: Model, batch: Any) -> Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def batches() -> list[dict[str, np.ndarray]]:
    """Tokens with something in common, which makes their routing skewed."""
    x = np.random.default_rng(3).normal(size=(STEPS, ROWS, WIDTH)).astype(np.float32)
    x[..., 0] = 2
    return [{"x": one, "y": np.sin(one.sum(-1))} for one in x]


def momentum() -> optax.GradientTransformation:
    return optax.sgd(0.02, momentum=0.9)


@functools.cache
def start() -> Any:
    return nnx.split(Model(rngs=nnx.Rngs(jax.random.key(0))), nnx.Param, ...)


@functools.cache
def plain(slices: int, replicas: bool) -> tuple[list[float], Any]:
    """Losses and weights, where each of so many slices of a batch is cast by itself."""
    graph, weights, state = start()
    tx = momentum()
    held = tx.init(weights)
    losses = []

    @jax.jit
    def step(weights: Any, held: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)
        value = lambda weights, part: loss_fn(nnx.merge(graph, weights, state, copy=True), part)  # noqa: E731
        each = jax.lax.map(lambda part: jax.value_and_grad(value)(weights, part), parts)
        loss, grads = jax.tree.map(lambda x: jnp.mean(x, axis=0), each)
        updates, held = tx.update(grads, held, weights)
        return loss, optax.apply_updates(weights, updates), held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "apply_experts", functools.partial(simulated_experts, replicas=replicas))
        for batch in batches():
            loss, weights, held = step(weights, held, batch)
            losses.append(float(loss))
    return losses, nnx.to_pure_dict(weights)


EXACT_DELTA = {"weights_delta": True, "hpz": True, "weights": "fp32"}


@pytest.mark.parametrize(
    ("nodes", "local", "zero"),
    [
        pytest.param(2, 2, EXACT_DELTA, marks=pytest.mark.slow),
        pytest.param(2, 2, {}, marks=pytest.mark.slow),
        pytest.param(2, 1, {**EXACT_DELTA, "remat": "none"}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"experts": "gathered", "hpz": True, "remat": "none"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_are_those_of_a_loop(nodes: int, local: int, zero: dict[str, Any]):
    config = ZeroConfig(compute_dtype="float32", matmul_dtype="fp8", **zero)
    mesh = zerojax.make_mesh(nodes, local)
    create = lambda rngs: Model(rngs=rngs)  # noqa: E731
    first = nnx.to_pure_dict(start()[1])
    state = started(zerojax.TrainState.abstract(create, momentum(), loss_fn, mesh=mesh, zero=config), first)
    assert {leaf.path[-1] for leaf in state.spec.leaves if leaf.fp8} == {"gate", "up", "down"}
    losses = []
    for batch in batches():
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    slices = nodes * (1 if config.experts != "gathered" and local > 1 else local)
    wanted, weights = plain(slices, bool(zero.get("weights_delta")))
    np.testing.assert_allclose(losses, wanted, rtol=2e-4)
    moved = (
        jax.tree.map(lambda x, before: np.asarray(x) - np.asarray(before), tree, first)
        for tree in (masters(state), weights)
    )
    assert distance(*moved) < 5e-3
    assert abs(losses[-1] - losses[0]) > 0.01 * losses[0]


def spec_of(**zero: Any) -> Any:
    config = ZeroConfig(compute_dtype="float32", matmul_dtype="fp8", **zero)
    options = {"mesh": zerojax.make_mesh(1, 2), "zero": config}
    return zerojax.TrainState.abstract(lambda rngs: Model(rngs=rngs), momentum(), loss_fn, **options).spec


def test_the_plan_lists_experts():
    found = fp8_of(spec_of())
    assert found is not None
    assert {row.name.split("/")[-1] for row in found.chosen} == {"gate", "up", "down"}
    assert found.weights == 3 * LAYERS


def test_patterns_leave_experts_out():
    left = {leaf.path[-1] for leaf in spec_of(fp8=("*", "!*/down", "!*router*")).leaves if leaf.fp8}
    assert left == {"gate", "up"}
    with pytest.raises(zerojax.ZeroError, match=r"applies to no weight .*mixture/down': no pattern of fp8"):
        spec_of(fp8=("*kernel",))


@pytest.mark.slow
def test_adapters_are_added_to_decoded_experts():
    """Their B begins at zero, and what is decoded is multiplied in fp32."""

    def state_of(lora: zerojax.LoRA | None = None, **zero: Any) -> zerojax.TrainState:
        config = ZeroConfig(compute_dtype="float32", **zero)
        options = {"mesh": zerojax.make_mesh(1, 2), "zero": config, "lora": lora, "seed": 0}
        return zerojax.TrainState.create(lambda rngs: Model(rngs=rngs), momentum(), loss_fn, **options)

    lora = zerojax.LoRA(rank=2, targets=("*/gate", "*/up", "*/down"))
    frozen = {"frozen": ("*/gate", "*/up", "*/down"), "frozen_weights": "fp8"}
    adapted = state_of(lora, matmul_dtype="fp8", **frozen)
    assert len([leaf for leaf in adapted.spec.frozen if leaf.fp8]) == 3
    plain = state_of()
    params = zerojax.gather_params(plain)
    own = params["blocks"]["block"]["mixture"]
    for name in ("gate", "up", "down"):
        own[name] = np.stack([rounded(jnp.asarray(layer), jnp.float8_e4m3fn, 448) for layer in own[name]])
    plain = zerojax.put_params(plain, params)
    found, wanted = (float(zerojax.eval_step(state, batches()[0])["loss"]) for state in (adapted, plain))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    _, metrics = zerojax.train_step(adapted, batches()[0])
    assert metrics["grad_norm"] > 0
