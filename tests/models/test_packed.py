"""Packed documents against each document alone, in models, on meshes and over micro-batches."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import model_shapes
import numpy as np
import optax
import pytest
from flax import nnx
from sgd_step import check_step

from zerojax.errors import ZeroError
from zerojax.models import GPT, GPTConfig, flash_attention, lm_loss
from zerojax.models.attention import causal_attention, has_flash, segment_lengths, segment_positions
from zerojax.models.flash_attention import document_offsets

VOCAB = 23
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "layers": 2,
    "d_model": 16,
    "heads": 4,
    "max_seq_len": 16,
    "init_std": 0.3,
}
LLAMA = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False, "kv_heads": 2}
WINDOW = LLAMA | {"sliding_window": 3, "qkv_biases": True, "qk_norm": True}
GEMMA = model_shapes.GEMMA | {"tied": True, "sliding_window": 3}
MIXED = LLAMA | {
    "pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_joint": True, "rope_fraction": 0.5,
    "rope_interleaved": True, "no_rope_layers": (0,), "sliding_window": 3, "sliding_window_layers": (1,),
    "residual_scale": 0.5, "logit_divisor": 2.0, "rope_query_growth": 0.3, "rope_original_len": 5,
}  # fmt: skip
LATENT = LLAMA | {
    "kv_heads": None, "head_width": 12, "latent_rank": 10, "latent_query_rank": 7, "latent_rope_width": 4,
    "latent_value_width": 6, "rope_interleaved": True,
}  # fmt: skip
# On fa4-jax's plain backend.
FLASH = LLAMA | {"sliding_window": 3, "sliding_window_pattern": 2, "attention": "flash_attention_4"}
NEEDS_LIBRARY = pytest.mark.skipif(find_spec("fa4_jax") is None, reason="fa4-jax is not installed")
FAMILIES = pytest.mark.parametrize(
    "family",
    [
        pytest.param({"scan": False}, id="learned", marks=pytest.mark.slow),
        pytest.param(WINDOW, id="window", marks=pytest.mark.slow),
        pytest.param(GEMMA, id="gemma", marks=pytest.mark.slow),
        pytest.param(MIXED, id="mixed"),
    ],
)
# The tokens of each document in each row of 17; what is left is padding.
ROWS = ((17,), (5, 12), (2, 3, 2, 9), (6, 4), (1, 1, 15), (8, 8))


def make(**family: Any) -> GPT:
    return GPT(GPTConfig(**(SMALL | family)), rngs=nnx.Rngs(0))


def draw() -> tuple[list[list[np.ndarray]], dict[str, np.ndarray]]:
    """Documents by row, and the same documents packed."""
    rng = np.random.default_rng(0)
    documents = [[rng.integers(0, VOCAB, size) for size in row] for row in ROWS]
    tokens, segments = np.full((len(ROWS), 17), -1), np.zeros((len(ROWS), 17))
    for i, row in enumerate(documents):
        at = 0
        for number, document in enumerate(row, 1):
            tokens[i, at : at + len(document)] = document
            segments[i, at : at + len(document)] = number
            at += len(document)
    return documents, {"tokens": tokens.astype(np.int32), "segments": segments.astype(np.int32)}


def alone(documents: list[list[np.ndarray]]) -> np.ndarray:
    """Each document in a row of its own, padded with -1, for which a causal model needs no mask."""
    flat = [document for row in documents for document in row]
    return np.stack([np.pad(d, (0, 17 - len(d)), constant_values=-1) for d in flat])


def plain_loss(model: GPT, rows: np.ndarray | jax.Array) -> jax.Array:
    """The mean over all tokens but each document's first."""
    labels = rows[:, 1:]
    scores = model(jnp.maximum(rows[:, :-1], 0))
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(labels, 0))
    return jnp.sum(losses * (labels >= 0)) / jnp.sum(labels >= 0)


@FAMILIES
def test_logits_loss_and_gradients_equal_each_document_alone(family):
    model = make(**family)
    documents, batch = draw()
    forward = nnx.jit(lambda model, tokens, segments: model(jnp.maximum(tokens, 0), segments=segments))
    packed = np.asarray(forward(model, batch["tokens"][:, :-1], batch["segments"][:, :-1]))
    each = iter(np.asarray(forward(model, alone(documents)[:, :-1], None)))
    for i, row in enumerate(documents):
        at = 0
        for document in row:
            end = min(at + len(document), 16)
            np.testing.assert_allclose(packed[i, at:end], next(each)[: end - at], atol=2e-5)
            at = end
    (loss, aux), gradients = nnx.jit(nnx.value_and_grad(lm_loss, has_aux=True))(model, batch)
    expected, expected_gradients = nnx.jit(nnx.value_and_grad(plain_loss))(model, alone(documents))
    assert float(aux["tokens"]) == sum(len(d) - 1 for row in documents for d in row)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6),
        nnx.to_pure_dict(gradients),
        nnx.to_pure_dict(expected_gradients),
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": "dynamic", "rope_factor": 4.0},
        {"rope_scaling": "longrope", "rope_short_factors": (1.0, 1.0), "rope_long_factors": (2.0, 4.0)},
    ],
    ids=lambda scaling: scaling["rope_scaling"],
)
def test_positions_are_scaled_by_the_length_of_each_document(scaling):
    model = make(**LLAMA, **scaling, rope_original_len=4)
    tokens = jnp.arange(16)[None] % VOCAB
    sizes = 2, 9, 5
    run = nnx.jit(lambda model, tokens, segments: model(tokens, segments=segments))
    packed = run(model, tokens, jnp.asarray(np.repeat(range(3), sizes))[None])
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        document = slice(end - size, end)
        np.testing.assert_allclose(packed[:, document], run(model, tokens[:, document], None), atol=2e-5)


@pytest.mark.parametrize(
    ("family", "order"),
    [
        pytest.param(LLAMA, "depth", id="depth", marks=pytest.mark.slow),
        pytest.param(FLASH, "breadth", id="flash-breadth", marks=NEEDS_LIBRARY),
        pytest.param(
            LATENT | {"attention": "flash_attention_4"},
            "depth",
            id="latent",
            marks=[NEEDS_LIBRARY, pytest.mark.slow],
        ),
        pytest.param(GEMMA, "breadth", id="gemma-breadth", marks=pytest.mark.slow),
        pytest.param(MIXED, "breadth", id="mixed-breadth", marks=pytest.mark.slow),
    ],
)
def test_a_step_counts_tokens_over_devices_and_micro_batches(family, order, monkeypatch):
    monkeypatch.setattr(flash_attention, "_BACKEND", "reference")
    documents, batch = draw()
    rows, tokens = alone(documents), sum(len(d) - 1 for row in documents for d in row)
    config = GPTConfig(**(SMALL | family))
    check_step(config, batch, lambda model: plain_loss(model, rows), tokens=tokens, order=order)


def test_positions_start_again_with_each_segment():
    segments = jnp.array([[1, 1, 2, 3, 3, 3], [1, 2, 2, 0, 0, 0]])
    np.testing.assert_array_equal(segment_positions(segments), [[0, 1, 0, 0, 1, 2], [0, 0, 1, 0, 1, 2]])
    np.testing.assert_array_equal(segment_lengths(segments), [[2, 2, 1, 3, 3, 3], [1, 2, 2, 3, 3, 3]])


def test_the_mask_of_segments_is_recomputed_not_kept(monkeypatch):
    # Traced only: neither cuDNN nor a GPU is needed for the program's text.
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    policy = jax.checkpoint_policies.save_only_these_names("attention")
    segments = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def layer(weight, x, segments):
        q = (x @ weight).reshape(2, 128, 4, 64)
        out = causal_attention(q, q[:, :, :2], q[:, :, 2:], "cudnn", document_offsets(segments))
        return jnp.sum(out.reshape(2, 128, 256) @ weight).astype(jnp.float32)

    def residuals(weight, x, segments):
        return jax.vjp(lambda w, x: jax.checkpoint(layer, policy=policy)(w, x, segments), weight, x)[1]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (2, 128, 256))]
    text = str(jax.make_jaxpr(jax.grad(layer))(*shapes, segments))
    assert text.count("dot_product_attention_bwd_wrapper[") == 1
    assert "bf16[2,1,128,128]" in text
    kept = jax.tree.leaves(jax.eval_shape(residuals, *shapes, segments))
    assert (2, 4, 128) in {x.shape for x in kept}
    assert (2, 1, 128, 128) not in {x.shape for x in kept}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"segments": (2, 16)}, r'"segments" has shape \(2, 16\), but "tokens" \(2, 17\)'),
        ({"labels": (2, 17), "attention_mask": (2, 17)}, r"this batch also has \['attention_mask'\]"),
    ],
)
def test_batches_that_the_loss_would_misread_are_refused(more, message):
    batch = {name: jnp.zeros(shape, int) for name, shape in ({"tokens": (2, 17)} | more).items()}
    with pytest.raises(ZeroError, match=message):
        lm_loss(make(), batch)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fa4-jax, by the CuTe DSL
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="the kernels run on CUDA only")
@pytest.mark.parametrize(
    ("kv_heads", "widths"), [(2, (64, 64)), (8, (64, 64)), (8, (192, 128)), (2, (256, 256))]
)
@pytest.mark.parametrize("most", [None, 4], ids=["one-pass", "passes"])
@pytest.mark.parametrize("kernel", ["cudnn", pytest.param("flash_attention_4", marks=NEEDS_LIBRARY)])
def test_kernels_do_not_attend_across_segments(kernel, most, kv_heads, widths):
    if not has_flash(*widths, generation=flash_attention.generation()):
        pytest.skip(f"the kernels have no heads of {widths} on this GPU")
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 6, (3, 256))), jnp.int32)
    documents = flash_attention.document_offsets(segments, most)
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [
        jax.random.normal(k, (3, 256, n, dim))
        for k, n, dim in zip(keys, (8, kv_heads, kv_heads), (widths[0], *widths), strict=True)
    ]
    inputs += [jnp.linspace(-2, 4, 8)] if kv_heads == 2 else []
    half = [x.astype(jnp.bfloat16) for x in inputs]

    def loss(kernel, q, k, v, sinks=None):
        options = {"window": 40, "windowed": jnp.array(True), "sinks": sinks}
        out = causal_attention(q, k, v, kernel, documents, **options)
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(jnp.arange(1.0 * widths[1])))

    wanted = range(1, 1 + len(inputs))
    ours = jax.jit(jax.grad(loss, argnums=wanted), static_argnums=0)(kernel, *half)
    theirs = jax.grad(loss, argnums=wanted)("xla", *(x.astype(jnp.float32) for x in half))
    for mine, exact in zip(ours, theirs, strict=True):
        assert float(jnp.linalg.norm(mine.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)) < 0.01
