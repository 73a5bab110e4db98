"""Rows that devices of a node share, against a plain optax loop on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import Case
from flax import linen, nnx
from plain_loop import Plain, distance, masters, plain_loop

import zerojax
from zerojax.analysis.plan.hops import hops_of
from zerojax.analysis.plan.work import work_of
from zerojax.errors import ConfigurationError
from zerojax.models import GPT, Block, GPTConfig, lm_loss
from zerojax.models.shared_rows import spread_of
from zerojax.train.batch import _rows_of_devices
from zerojax.zero_config import PRESETS

SLOW = pytest.mark.slow
VOCAB, TOKENS, ROWS, STEPS = 23, 24, 12, 2
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "layers": 2, "d_model": 16, "heads": 4, "max_seq_len": TOKENS}
LLAMA = SMALL | {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False, "init_std": 0.3}
TILES = {"token_tile": 5}
"""The plain loop computes nothing again, and so has none."""
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": SMALL | {"heads": 3, "d_model": 12, "scan": False, "init_std": 0.3} | TILES,
    "llama": LLAMA | {"kv_heads": 2},
    # Over four devices heads of zeros fill up each of two groups, and the whole of three.
    "groups-2": LLAMA | {"heads": 6, "kv_heads": 2, "head_width": 4, "attention_sinks": True} | TILES,
    "groups-3": LLAMA | {"heads": 6, "kv_heads": 3, "head_width": 4},
    # Over four devices two heads of zeros fill up.
    "latent": LLAMA
    | {"heads": 6, "head_width": 6, "latent_rank": 10, "latent_query_rank": 7, "latent_rope_width": 2}
    | {"latent_value_width": 3, "ffn": 16},
    "gemma": LLAMA
    | {"kv_heads": 1, "mlp": "geglu", "norm_offset": 1.0, "post_norms": True, "embedding_scale": 4.0}
    | {"sliding_window": 7, "sliding_window_pattern": 2, "rope_local_theta": 20.0, "query_scalar": 3.0}
    | {"attention_softcap": 2.0, "logit_softcap": 3.0},
    "mixture": LLAMA | {"kv_heads": 2, "experts": 4, "ffn": 16, "z_loss": 0.1},
}
FAMILIES["gemma in tiles"] = FAMILIES["gemma"] | TILES
EXACT = {"weights": "fp32", "local_weights": "fp32", "grads": ("fp32", "fp32")}
DELTA = EXACT | {"hpz": True, "weights_delta": True}


def draw(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """Rows with padding, of which some devices have much more than others."""
    tokens = rng.integers(0, VOCAB, (rows, TOKENS + 1))
    ends = rng.integers(3, TOKENS + 2, rows)
    return {"tokens": np.where(np.arange(TOKENS + 1) < ends[:, None], tokens, -1).astype(np.int32)}


def draw_packed(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """The same in documents, most of which cross a border between devices, and with labels."""
    batch = draw(rng, rows)
    segments = np.cumsum(rng.random((rows, TOKENS + 1)) < 0.15, axis=1).astype(np.int32)
    labels = np.where(rng.random(segments.shape) < 0.7, batch["tokens"], -1)
    return batch | {"segments": segments, "labels": labels}


@functools.cache
def case_of(family: str, *, packed: bool) -> Case:
    config = GPTConfig(**FAMILIES[family])
    return Case(lambda rngs: GPT(config, rngs=rngs), lm_loss, (Block,), draw_packed if packed else draw)


@functools.cache
def momentum() -> optax.GradientTransformation:
    return optax.sgd(0.1, momentum=0.9)


@functools.cache
def wanted(family: str, *, packed: bool) -> tuple[Plain, list[float], Any]:
    plain = Plain(case_of(family, packed=packed))
    return plain, *plain_loop(plain, momentum(), plain.case.batches(ROWS, STEPS))


def steps(state: zerojax.TrainState, batches: list[Any]) -> tuple[list[float], zerojax.TrainState]:
    losses = []
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
        if "labels" in batch:
            within = batch["segments"][:, 1:] == batch["segments"][:, :-1]
            assert metrics["tokens"] == np.sum((batch["labels"][:, 1:] >= 0) & within)
    return losses, state


CASES = [
    ("groups-2", True, (2, 4), 4, {"accumulate": 3}),
    ("gemma", False, (1, 8), 8, {"remat": "attention"}),
]
MORE = [
    ("latent", True, (2, 4), 4, {}),
    ("gpt", True, (3, 2), 2, {"remat": "none", "accumulate": 2, "accumulate_order": "breadth"}),
    ("llama", True, (2, 4), 2, {"accumulate": 3}),
    ("groups-2", False, (1, 8), 8, {"remat": "attention"}),
    ("groups-2", True, (3, 2), 2, {"hpz": True}),
    ("groups-3", False, (2, 4), 4, DELTA),
    ("llama", False, (1, 8), 4, {"accumulate": 2, "accumulate_order": "breadth"}),
    ("llama", True, (3, 2), 2, DELTA | {"accumulate": 2, "grad_sync": "step"}),
    ("llama", True, (2, 4), 4, {"stage": 2}),
    ("groups-3", True, (1, 8), 8, {"remat": "none"}),
    ("groups-3", True, (2, 4), 2, {"remat": "attention", "accumulate": 3}),
    ("gemma", True, (2, 4), 2, {"remat": "none"}),
    ("gemma in tiles", True, (2, 4), 4, {"accumulate": 2, "accumulate_order": "breadth"}),
    ("gemma", True, (3, 2), 2, {"accumulate": 2}),
    ("gpt", False, (1, 8), 2, {"stage": 0}),
    ("gpt", False, (2, 4), 4, {"hpz": True, "remat": "attention"}),
]


@pytest.mark.parametrize(
    ("family", "packed", "mesh", "devices", "options"),
    [*CASES, *(pytest.param(*case, marks=SLOW) for case in MORE)],
    ids=str,
)
def test_steps_are_those_of_one_device(family, packed, mesh, devices, options):
    plain, losses, weights = wanted(family, packed=packed)
    nodes, local = mesh
    state = plain.case.start(
        momentum(), plain.weights, nodes=nodes, local=local, sequence_parallel=devices, **options
    )
    batches = plain.case.batches(ROWS, STEPS)
    found, state = steps(state, batches)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert distance(masters(state), weights) < 1e-5


def test_an_evaluation():
    plain, losses, _ = wanted("groups-2", packed=True)
    state = plain.case.start(momentum(), plain.weights, nodes=2, local=4, sequence_parallel=4)
    found = zerojax.eval_step(state, plain.case.batches(ROWS, 1)[0])
    np.testing.assert_allclose(found["loss"], losses[0], rtol=1e-6)


@pytest.mark.slow
def test_experts_and_the_losses_of_their_routers():
    plain, losses, weights = wanted("mixture", packed=False)
    state = plain.case.start(momentum(), plain.weights, nodes=2, local=4, sequence_parallel=2)
    found, state = steps(state, plain.case.batches(ROWS, STEPS))
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert distance(masters(state), weights) < 1e-5


def changed(create: Any, sequence_parallel: int, batch: Any) -> tuple[float, Any]:
    """The loss of a step, and the weights after it."""
    state = create(sequence_parallel)
    state, metrics = zerojax.train_step(state, batch)
    return float(metrics["loss"]), masters(state)


def check_shared(create: Any, devices: int, batch: Any) -> None:
    """A step whose rows ``devices`` share is that of devices with rows of their own."""
    loss, weights = changed(create, 1, batch)
    found, moved = changed(create, devices, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    assert distance(moved, weights) < 1e-5


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """Flax's ``attention_fn``."""
    return zerojax.attention(query, key, value, causal=False)


class Encoder(nnx.Module):
    """A block of attention in both directions, by Flax's own module."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(4, 8, decode=False, attention_fn=attend, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attention(x)


class LinenEncoder(linen.Module):
    """The same in Linen."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + linen.MultiHeadDotProductAttention(4, attention_fn=attend)(x)  # pyrefly: ignore[unsupported-operation]


def distance_to_target(model: Any, batch: Any) -> jax.Array:
    x, y = zerojax.own_tokens((batch["x"], batch["y"]))
    places = zerojax.own_tokens(jnp.arange(batch["x"].shape[1]) / 10, axis=0)
    return jnp.mean((model(x + places[:, None]) - y) ** 2)


def vectors(rows: int = 8, tokens: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((rows, tokens, 8)).astype(np.float32) for name in "xy"}


@pytest.mark.parametrize("linen_model", [False, pytest.param(True, marks=SLOW)])
def test_a_model_that_calls_the_attention(linen_model):
    model, block = (
        (LinenEncoder(), LinenEncoder) if linen_model else (lambda rngs: Encoder(rngs=rngs), Encoder)
    )
    batch = vectors()

    def create(devices: int) -> zerojax.TrainState:
        return zerojax.TrainState.create(
            model,
            momentum(),
            distance_to_target,
            mesh=zerojax.make_mesh(2, 4),
            zero=zerojax.ZeroConfig(compute_dtype="float32", units=(block,), sequence_parallel=devices),
            sample_batch=batch if linen_model else None,
        )

    check_shared(create, 2, batch)


def small(devices: int, *, lora: Any = None, tx: Any = None, **zero: Any) -> zerojax.TrainState:
    """A state of one layer of the second family on two nodes of two devices."""
    options: dict[str, Any] = FAMILIES["llama"] | TILES | {"layers": 1}
    config = GPTConfig(**options)
    return zerojax.TrainState.create(
        lambda rngs: GPT(config, rngs=rngs),
        tx or momentum(),
        lm_loss,
        mesh=zerojax.make_mesh(2, 2),
        zero=zerojax.ZeroConfig(compute_dtype="float32", sequence_parallel=devices, **zero),
        lora=lora,
    )


def packed_batch() -> dict[str, np.ndarray]:
    return draw_packed(np.random.default_rng(0), 4)


@pytest.mark.slow
def test_adapters():
    lora = zerojax.LoRA(rank=2)
    check_shared(lambda k: small(k, lora=lora, frozen=("*",), frozen_weights="int8"), 2, packed_batch())


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero++", "delta", "local"])
def test_presets_in_their_formats(preset):
    """Each device rounds its gradients before they are summed, those of other tokens to other numbers."""
    losses = []
    for devices in (1, 2):
        state, metrics = small(devices, tx=optax.sgd(0.1), **PRESETS[preset]), {}
        for _ in range(4):
            state, metrics = zerojax.train_step(state, packed_batch())
        losses.append(float((zerojax.last_metrics(state) if preset == "local" else metrics)["loss"]))
    np.testing.assert_allclose(*losses, rtol=0.02)


@pytest.mark.slow
def test_fp8_matmuls():
    """Activations are scaled by the largest of a device's own tokens."""
    batch = packed_batch()
    losses = [changed(lambda k: small(k, matmul_dtype="fp8"), devices, batch)[0] for devices in (1, 2)]
    np.testing.assert_allclose(*losses, rtol=0.01)


def abstract(loss: Any, devices: int = 2, **zero: Any) -> zerojax.TrainState:
    config = GPTConfig(**FAMILIES["llama"])
    return zerojax.TrainState.abstract(
        lambda rngs: GPT(config, rngs=rngs),
        momentum(),
        loss,
        mesh=zerojax.make_mesh(2, 4),
        zero=zerojax.ZeroConfig(sequence_parallel=devices, **zero),
    )


@pytest.mark.parametrize(
    "remat", [*(pytest.param(name, marks=SLOW) for name in ("full", "attention")), "none"]
)
def test_bytes_are_those_of_the_plan_and_none_cross_nodes(remat):
    batch = {"tokens": jax.ShapeDtypeStruct((8, TOKENS + 1), np.int32)}
    apart = zerojax.comm_report(abstract(lm_loss, 1, remat=remat), batch)
    state = abstract(lm_loss, 2, remat=remat)
    report = zerojax.comm_report(state, batch)
    assert report.node_bytes == apart.node_bytes > 0
    work = work_of(state.spec, GPTConfig(**FAMILIES["llama"]), sequences=2, length=TOKENS)
    (planned,) = [hop for hop in hops_of(state.spec, work) if hop.phase == "attention"]
    assert report.phases()["attention"] == (planned.local_bytes, 0)


def whole_rows(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model.embed(batch["tokens"]))


def no_attention(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model.embed(zerojax.own_tokens(batch["tokens"])))


def pooled(model: Any, batch: Any) -> jax.Array:
    x = zerojax.whole_rows(model.embed(zerojax.own_tokens(batch["tokens"])))
    return jnp.mean(jnp.sum(x, axis=1) * jnp.mean(zerojax.own_tokens(batch["tokens"])))


def mixing(model: Any, batch: Any) -> jax.Array:
    x = model.embed(zerojax.own_tokens(batch["tokens"]))
    return jnp.mean(zerojax.own_tokens(jnp.cumsum(zerojax.whole_rows(x), axis=1)) ** 2)


def own_segments(model: Any, batch: Any) -> jax.Array:
    x = model.embed(zerojax.own_tokens(batch["tokens"]))[:, :, None]
    return jnp.mean(zerojax.attention(x, x, x, segments=zerojax.own_tokens(batch["tokens"])))


def twice(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(zerojax.own_tokens(batch["tokens"])))


def never_cut(model: Any, batch: Any) -> jax.Array:
    x = model.embed(batch["tokens"])[:, :, None]
    labels = zerojax.own_tokens(batch["tokens"])
    return jnp.mean(zerojax.attention(x, x, x)) + jnp.mean(labels)


def numbers(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(zerojax.own_tokens(batch)["tokens"]))


def by_row(model: Any, batch: Any) -> jax.Array:
    losses = model(zerojax.own_tokens(batch["tokens"]))
    return jnp.mean(zerojax.whole_rows(jnp.sum(losses, range(1, losses.ndim))))


@pytest.mark.parametrize(
    ("loss", "shape", "message"),
    [
        (twice, (4, 8), r"own_tokens at .*test_shared_rows.py.* is given parts of rows"),
        (never_cut, (4, 8), r"attention at .*test_shared_rows.py.* is given whole rows"),
        (numbers, (4, 8), r"own_tokens: an array of shape \(\) has no axis 1 of tokens"),
        (by_row, (4, 8), r"whole_rows: an array of shape \(1,\) has no axis 1 of tokens"),
        (whole_rows, (4, 8), "zerojax.own_tokens"),
        (no_attention, (4, 8), "never calls zerojax.attention"),
        (pooled, (4, 8), "never calls zerojax.attention"),
        (own_segments, (4, 8), r"segments of shape \(1, 4\) for rows of shape \(1, 8\)"),
        (lm_loss, (4, 8), "7 tokens .* do not divide by sequence_parallel=2: .* to 8"),
        (lm_loss, (6, 9), "6 rows, not a positive multiple of 4 groups of 2 devices"),
    ],
)
def test_what_cannot_be_shared_is_refused(loss, shape, message):
    batch: dict[str, Any] = {"tokens": jax.ShapeDtypeStruct(shape, np.int32)}
    batch |= {"number": 1.0} if loss is numbers else {}
    with pytest.raises(ConfigurationError, match=message):
        zerojax.lower_train_step(abstract(loss), batch)


def test_a_layer_that_mixes_whole_rows_needs_no_attention():
    state, tokens = small(2), np.random.default_rng(0).integers(0, VOCAB, (4, 8))
    found = zerojax.eval_step(state, {"tokens": tokens}, mixing)["loss"]
    embedding = zerojax.gather_params(state)["embed"]["embedding"]
    np.testing.assert_allclose(found, np.mean(np.cumsum(embedding[tokens], axis=1) ** 2), rtol=1e-5)


def test_predictions_of_parts_are_refused():
    with pytest.raises(ConfigurationError, match=r"\(2, 4, 16\) that differs .* zerojax.whole_rows"):
        zerojax.predict_step(
            small(2),
            {"tokens": np.zeros((4, 8), np.int32)},
            lambda model, batch: model.hidden(batch["tokens"]),
        )


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ConfigurationError, match="sequence_parallel=0 must be at least 1"):
        zerojax.ZeroConfig(sequence_parallel=0)
    with pytest.raises(ConfigurationError, match=r"sequence_parallel=3 devices .* its 4 devices"):
        abstract(lm_loss, 3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "spread"),
    [
        (32, 8, 4, (8, 4, 8)),
        (32, 8, 16, (8, 4, 16)),
        (28, 4, 8, (4, 8, 8)),  # Qwen2.5 7B
        (12, 12, 8, (1, 16, 16)),
        (6, 3, 4, (1, 8, 8)),
        (2, 1, 8, (1, 8, 8)),
    ],
)
def test_heads_are_spread_with_the_fewest_of_zeros(heads, kv_heads, devices, spread):
    assert spread_of(heads, kv_heads, devices) == spread


@pytest.mark.parametrize(
    ("own", "wanted"),
    [(4, [0, 1, 0, 1, 2, 3, 2, 3]), (2, [0, 1, 2, 3, 0, 1, 2, 3]), (1, [0, 1, 2, 3])],
    ids=["a group and more", "a group", "half a group"],
)
def test_a_processs_rows_go_to_each_device_of_their_group(own, wanted):
    rows = _rows_of_devices(np.arange(4), own=own, copies=2)
    assert rows.tolist() == wanted
    assert jnp.array_equal(_rows_of_devices(jnp.arange(4), own=own, copies=2), rows)
    with pytest.raises(ConfigurationError, match="a process has 3 devices"):
        _rows_of_devices(np.arange(4), own=3, copies=2)
