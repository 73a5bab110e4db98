"""Low-rank adapters equal an ordinary loop over explicitly low-rank weights, on any mesh."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES, WIDTH, in_fp32
from flax import linen, nnx, traverse_util
from plain_loop import by_path, distance, plain_model

import zerojax
from zerojax import LoRA, ZeroError
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.train.step import gradients

LORA = LoRA(rank=3, alpha=6.0, targets=("*kernel",))


def create(name: str, nodes: int, local: int, lora=LORA, seed: int = 0, base=None, **zero):
    case = CASES[name]
    mesh = zerojax.make_mesh(nodes, local, devices=jax.devices()[: nodes * local])
    options: dict[str, Any] = {"units": case.units, "frozen": ("*",), **zero}
    return zerojax.TrainState.create(
        case.model, optax.sgd(0.1), case.loss, mesh=mesh, zero=in_fp32(**options),
        lora=lora, seed=seed, base=base, sample_batch=case.batches(24, 1)[0] if case.linen else None,
    )  # fmt: skip


def with_adapters(weights, adapters, scale):
    """The weights, each with A B added to it, for the reference."""
    flat, parts = by_path(weights), by_path(adapters)
    for path in {path[:-1] for path in parts}:
        flat[path] = flat[path] + scale * parts[(*path, "lora_a")] @ parts[(*path, "lora_b")]
    return traverse_util.unflatten_dict(flat)


@functools.cache
def wanted(name: str):
    """Losses of a plain loop over the adapters, from those that a state begins with; and its last ones."""
    plain = plain_model(name)
    adapters = jax.tree.map(jnp.asarray, zerojax.gather_adapters(create(name, 1, 1)))

    def loss_of(own, batch):
        return plain.loss(with_adapters(plain.weights, own, 2.0), batch)

    @jax.jit
    def step(own, batch):
        loss, grads = jax.value_and_grad(loss_of)(own, batch)
        return loss, jax.tree.map(lambda x, g: x - 0.1 * g, own, grads)

    losses = []
    for batch in CASES[name].batches(24, 10):
        loss, adapters = step(adapters, batch)
        losses.append(float(loss))
    return losses, adapters


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        pytest.param("stack", (1, 1), {}, marks=pytest.mark.slow),
        ("stack", (2, 4), {"hpz": True}),
        pytest.param(
            "linen-scan", (3, 2), {"accumulate": 2, "accumulate_order": "breadth"}, marks=pytest.mark.slow
        ),
        pytest.param("nnx", (3, 2), {}, marks=pytest.mark.slow),
        pytest.param("linen", (2, 4), {}, marks=pytest.mark.slow),
        pytest.param("stack", (3, 2), {"remat": "none"}, marks=pytest.mark.slow),
        pytest.param("nnx", (2, 4), {"accumulate": 3}, marks=pytest.mark.slow),
        pytest.param("linen", (1, 1), {}, marks=pytest.mark.slow),
        pytest.param("linen-scan", (2, 4), {}, marks=pytest.mark.slow),
    ],
)
def test_adapters_train_as_explicitly_low_rank_weights_do(name, mesh, options):
    losses, adapters = wanted(name)
    state, found = create(name, *mesh, **options), []
    kept = jax.tree.map(np.asarray, state.frozen)
    for batch in CASES[name].batches(24, 10):
        state, metrics = zerojax.train_step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert distance(zerojax.gather_adapters(state), adapters) < 1e-5
    jax.tree.map(np.testing.assert_array_equal, state.frozen, kept)
    merged = with_adapters(plain_model(name).weights, zerojax.gather_adapters(state), 2.0)
    assert distance(zerojax.gather_params(state), merged) < 1e-6
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero++", "delta"])
def test_presets_send_adapters_alone(preset):
    losses, _ = wanted("stack")
    chosen = zerojax.ZeroConfig.preset(preset)
    options = {
        name: getattr(chosen, name)
        for name in ("weights", "weights_delta", "hpz", "grads", "grad_sync", "rotation", "rounding")
    }
    state, found = create("stack", 2, 4, block_size=64, **options), []
    batches = CASES["stack"].batches(24, 10)
    elements = sum(leaf.padded * leaf.layers for leaf in state.spec.leaves)
    sent = zerojax.comm_report(state, batches[0]).between_nodes
    assert sent < 2.5 * elements  # bytes of a node: int8 weights or int4 deltas, int4 gradients, and metrics
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found[:4], losses[:4], rtol=0.1)


def products(state, batch) -> set[str]:
    """The shapes that matmuls of the compiled step have."""
    text = zerojax.lower_train_step(state, batch).compile().as_text() or ""
    return set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))


def test_the_gradient_of_a_frozen_weight_is_not_computed():
    batch = CASES["stack"].batches(24, 1)[0]
    whole = CASES["stack"].abstract(optax.sgd(0.1), nodes=1, local=1)
    kernels = {"6,11", "11,6"}
    assert products(whole, batch) & kernels
    assert not products(create("stack", 1, 1), batch) & kernels


@pytest.mark.slow
def test_several_adapters_share_one_base():
    first = create("stack", 2, 4, seed=0)
    second = create("stack", 2, 4, seed=1, base=first, lora=LoRA(rank=2, targets=("*up/kernel",)))
    pairs = zip(jax.tree.leaves(first.frozen), jax.tree.leaves(second.frozen), strict=True)
    assert all(a is b for a, b in pairs)
    batches = CASES["stack"].batches(24, 2)
    for batch in batches:
        first, _ = zerojax.train_step(first, batch)
        second, _ = zerojax.train_step(second, batch)
    one, other = (zerojax.eval_step(state, batches[0])["loss"] for state in (first, second))
    assert one != other
    for mesh, spread in [((1, 1), "node"), ((2, 4), "world")]:
        with pytest.raises(ZeroError, match=r"does not freeze .* in the same way"):
            create("stack", *mesh, base=first, frozen_spread=spread)


def test_dropout_is_for_training_alone_and_reproducible():
    batch = CASES["stack"].batches(24, 1)[0]

    @functools.cache
    def begun(rate: float) -> zerojax.TrainState:
        return create("stack", 1, 1, lora=LoRA(rank=3, targets=("*kernel",), dropout=rate))

    def losses(rate: float) -> tuple[float, ...]:
        state = jax.tree.map(jnp.copy, begun(rate))
        state, _ = zerojax.train_step(state, batch)  # B is zero before
        evaluated = float(zerojax.eval_step(state, batch)["loss"])
        _, metrics = zerojax.train_step(state, batch)
        return evaluated, float(metrics["loss"])

    evaluated, trained = losses(0.5)
    assert losses(0.5) == (evaluated, trained)
    assert trained != pytest.approx(evaluated, rel=1e-4)
    evaluated, trained = losses(0.0)
    assert trained == pytest.approx(evaluated, rel=1e-6)


class Twice(nnx.Module):
    """A unit that reads its weight twice."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(x), self.linear(x)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
def test_every_read_drops_other_elements(remat):
    def loss(model, batch):
        (a, b), (c, _) = model(batch["x"]), model(batch["x"])
        between = {"within": jnp.max(jnp.abs(a - b)), "again": jnp.max(jnp.abs(a - c))}
        return jnp.mean((a + 2 * b + 3 * c) * batch["y"][:, None]), between

    batch = CASES["stack"].batches(24, 1)[0]
    state = zerojax.TrainState.create(
        Twice, optax.sgd(1.0), loss, mesh=zerojax.make_mesh(2, 2, devices=jax.devices()[:4]),
        zero=zerojax.ZeroConfig(units=(Twice,), frozen=("*",), compute_dtype="float32", remat=remat),
        lora=LoRA(rank=3, targets=("*kernel",), dropout=0.5),
    )  # fmt: skip
    state, first = zerojax.train_step(state, batch)  # B is zero before
    evaluated = zerojax.eval_step(state, batch)
    grads, adapters = gradients(state, batch), zerojax.gather_adapters(state)["linear"]["kernel"]
    slope = np.asarray(grads["linear"]["kernel"]["lora_b"]).reshape(-1)[: 3 * WIDTH].reshape(3, WIDTH)
    _, second = zerojax.train_step(state, batch)
    assert min(second["within"], second["again"]) > 1e-2
    assert evaluated["within"] == evaluated["again"] == 0
    # The loss is linear in B: the backward pass drops what the forward pass drops.
    np.testing.assert_allclose(second["loss"], first["loss"] + np.sum(slope * adapters["lora_b"]), rtol=1e-5)


def test_rank_stabilised_scaling():
    assert LoRA(rank=16, alpha=8).scale == 0.5
    assert LoRA(rank=16, alpha=8, rslora=True).scale == 2.0


@pytest.mark.slow  # tests/interop/huggingface/test_adapters.py has decoders with adapters
def test_a_decoder_s_fused_and_reshaped_weights_get_adapters():
    config = GPTConfig(
        vocab_size=32, layers=2, d_model=16, heads=2, kv_heads=1, ffn=24, norm="rms", positions="rope",
        mlp="swiglu", biases=False, tied=False, max_seq_len=16,
    )  # fmt: skip
    mesh = zerojax.make_mesh(2, 2, devices=jax.devices()[:4])
    batch = {"tokens": np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)}

    def make(**more):
        return zerojax.TrainState.create(
            lambda rngs: GPT(config, rngs=rngs), optax.sgd(0.5), lm_loss, mesh=mesh,
            zero=zerojax.ZeroConfig(compute_dtype="float32", **more), lora=LoRA(rank=2) if more else None,
        )  # fmt: skip

    state = make(frozen=("*",), frozen_weights="int8", block_size=64)
    names = {"/".join(leaf.path[-3:-1]) for leaf in state.spec.leaves}
    assert names == {"qkv/kernel", "out/kernel", "gate/kernel", "up/kernel", "down/kernel"}
    losses = []
    for _ in range(3):
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    # The same weights, merged, give the same loss without any adapter.
    merged = zerojax.put_params(make(), zerojax.gather_params(state))
    wanted = float(zerojax.eval_step(merged, batch)["loss"])
    assert float(zerojax.eval_step(state, batch)["loss"]) == pytest.approx(wanted, rel=1e-5)
    assert wanted < losses[0]


@pytest.mark.parametrize(
    ("lora", "options", "words"),
    [
        ({"targets": ("*upp*",)}, {}, "matches no parameter"),
        ({"targets": ("*bias",)}, {}, "no weight gets an adapter"),
        ({}, {"frozen": ("*down*",)}, "is trained"),
        ({"dropout": 0.1}, {"accumulate": 2, "accumulate_order": "breadth"}, "in breadth"),
    ],
)
def test_what_cannot_be_is_refused_in_words(lora, options, words):
    given: dict[str, Any] = {"targets": ("*kernel",), **lora}
    with pytest.raises(ZeroError, match=words):
        create("stack", 1, 1, lora=LoRA(**given), **options)


@pytest.mark.parametrize("field", [{"rank": 0}, {"alpha": -1.0}, {"dropout": 1.0}, {"targets": ()}])
def test_settings_out_of_range_are_refused(field):
    with pytest.raises(ZeroError, match=f"LoRA.{next(iter(field))}"):
        LoRA(**field)


class LinenAttention(linen.Module):
    """Attention, whose kernels have axes for heads, and a residual."""

    @linen.compact
    def __call__(self, x):
        return x + linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=12)(x)


class LinenAttentive(linen.Module):
    """A block with attention, and a linear layer of no unit."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(LinenAttention()(x))[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2)])
def test_the_kernels_of_attention_have_adapters_of_their_matrices(mesh):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape, np.float32) for shape in ((4, 24, 5, 8), (4, 24, 5)))
    model, lora = LinenAttentive(), LoRA(rank=2, alpha=4.0)
    state = zerojax.TrainState.create(
        model,
        optax.sgd(0.1),
        lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
        mesh=zerojax.make_mesh(*mesh, devices=jax.devices()[: mesh[0] * mesh[1]]),
        zero=zerojax.ZeroConfig(compute_dtype="float32", units=(LinenAttention,), frozen=("*",)),
        lora=lora,
        sample_batch={"x": x[0], "y": y[0]},
    )
    base, adapters = zerojax.gather_params(state), by_path(zerojax.gather_adapters(state))
    found = {path[-3:]: values.shape for path, values in adapters.items()}
    assert found["query", "kernel", "lora_a"] == (8, 2)
    assert found["query", "kernel", "lora_b"] == (2, 12)
    assert found["out", "kernel", "lora_a"] == (12, 2)
    assert found["out", "kernel", "lora_b"] == (2, 8)
    assert len(found) == 8

    def whole(adapters):
        flat = by_path(base)
        for path in {path[:-1] for path in adapters}:
            product = 2.0 * adapters[(*path, "lora_a")] @ adapters[(*path, "lora_b")]
            flat[path] = flat[path] + product.reshape(flat[path].shape)
        return traverse_util.unflatten_dict(flat)

    @jax.jit
    @jax.value_and_grad
    def loss_of(adapters, x, y):
        return jnp.mean((model.apply({"params": whole(adapters)}, x) - y) ** 2)

    for one, other in zip(x, y, strict=True):
        state, metrics = zerojax.train_step(state, {"x": one, "y": other})
        loss, grads = loss_of(adapters, one, other)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
        adapters = jax.tree.map(lambda x, g: x - 0.1 * g, adapters, grads)
    assert distance(zerojax.gather_params(state), jax.tree.map(np.asarray, whole(adapters))) < 1e-6
