"""FlashAttention-4 in documents: on fa4-jax's plain backend, or traced only."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from grids import grid
from jax.sharding import SingleDeviceSharding
from plain_flash import flash

import zerojax
from zerojax.analysis import aot
from zerojax.errors import ConfigurationError
from zerojax.models import GPT, GPTConfig, attention, flash_attention, lm_loss
from zerojax.models.attention import causal_attention
from zerojax.models.flash_attention import Options, document_offsets

NEEDS_LIBRARY = pytest.mark.skipif(find_spec("fa4_jax") is None, reason="fa4-jax is not installed")
ROWS = jnp.array([[5, 5, 1, 2, 2, 2, 2, 0], [0, 0, 7, 7, 7, 7, 7, 8], [8, 8, 8, 8, 8, 8, 8, 8]])
STARTS = [0, 2, 3, 7, 8, 10, 15, 16]


def test_documents_begin_where_segments_change_and_with_each_row():
    documents = document_offsets(ROWS)
    np.testing.assert_array_equal(documents.offsets, STARTS + [24] * 9)
    np.testing.assert_array_equal(document_offsets(ROWS, 3).offsets, STARTS[:4])
    np.testing.assert_array_equal(document_offsets(ROWS, 3).lengths, [2, 1, 4])
    assert documents.numbers is not None
    np.testing.assert_array_equal(
        documents.numbers, [[0, 0, 1, 2, 2, 2, 2, 3], [4, 4, 5, 5, 5, 5, 5, 6], [7] * 8]
    )
    np.testing.assert_array_equal(flash_attention.one_document_a_row(3, 8).offsets, [0, 8, 16, 24])
    assert document_offsets(jnp.zeros((2, 8192), int)).offsets.shape == (65,)


def test_a_pass_covers_all_positions_and_uses_only_its_documents():
    slots = flash_attention._slots(jnp.array([3, 7, 8]), 24)
    np.testing.assert_array_equal(slots.offsets, [0, 3, 7, 8, 24])
    np.testing.assert_array_equal(slots.used, [0, 4, 1, 0])


def heads(seed: int, count: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (*ROWS.shape, count, 8))


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("window", "most"),
    grid([(None, 2), (3, 2), ("data", 2), ("data", None)], (3, 2), ("data", 2), ("data", None)),
)
def test_outputs_and_gradients_equal_attention_with_a_mask(window, most, monkeypatch):
    monkeypatch.setattr(flash_attention, "_BACKEND", "reference")
    inputs = heads(0, 4), heads(1, 2), heads(2, 2)[..., :4]
    reach = None if window is None else 3

    def results(kernel, documents):
        def loss(windowed, q, k, v):
            applies = windowed if window == "data" else True
            out = causal_attention(q, k, v, kernel, documents, window=reach, windowed=applies, scale=0.5)
            return jnp.sum(out * jnp.cos(jnp.arange(4.0))), out

        run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True))
        return [run(jnp.array(windowed), *inputs) for windowed in (True, False)]

    ours, theirs = (
        results("flash_attention_4", document_offsets(ROWS, most)),
        results("xla", document_offsets(ROWS)),
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), ours, theirs)


def test_sinks_are_in_what_the_backward_kernel_reads(monkeypatch):
    def kernel(options, slots, q, k, v):
        place = jnp.arange(len(q))
        slot = jnp.searchsorted(slots.offsets, place, side="right")
        back = place[:, None] - place
        mask = (slot[:, None] == slot) & (back >= 0)
        mask = mask if options.reach is None else mask & (back <= options.reach)
        return flash(options.scale, mask, q, k, v)

    monkeypatch.setattr(flash_attention, "_forward_kernel", kernel)
    monkeypatch.setattr(flash_attention, "find_spec", lambda _: True)
    inputs = heads(0, 4), heads(1, 2), heads(2, 2), jnp.array([-1.0, 0.0, 1.0, 2.0])

    def results(kernel, documents):
        def loss(q, k, v, sinks):
            out = causal_attention(q, k, v, kernel, documents, window=3, scale=0.5, sinks=sinks)
            return jnp.sum(out * jnp.cos(jnp.arange(8.0))), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*inputs)

    ours, theirs = (
        results("flash_attention_4", document_offsets(ROWS)),
        results("xla", document_offsets(ROWS)),
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), ours, theirs)


@NEEDS_LIBRARY
def test_the_backward_kernel_reads_the_forward_kernels_results():
    # So nothing reads the forward kernel that the library's rule calls, and XLA drops it.
    q, k, v = (jax.ShapeDtypeStruct((64, n, 16), jnp.bfloat16) for n in (4, 2, 2))
    lse = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    slots = flash_attention._slots(jnp.array([0, 10, 64]), 64)
    kernel = partial(flash_attention._backward_kernel, Options(None, None), slots)
    jaxpr = jax.make_jaxpr(kernel)(q, k, v, q, lse, q).jaxpr
    backward = [equation for equation in jaxpr.eqns if equation.primitive.name == "fa4_vjp"]
    assert len(backward) == 1
    assert backward[0].invars[:6] == jaxpr.invars


@NEEDS_LIBRARY
def test_a_policy_that_saves_attention_keeps_no_more_than_output_and_log_sum_exp():
    def layer(weight, x):
        q = (x @ weight).reshape(2, 128, 4, 64)
        out = causal_attention(
            q, q[:, :, :2], q[:, :, 2:], "flash_attention_4", document_offsets(jnp.zeros((2, 128), int))
        )
        return jnp.sin(out.reshape(2, 128, 256) @ weight)

    def kept(policy):
        def residuals(w, x):
            return jax.vjp(jax.checkpoint(layer, policy=policy), w, x)[1]

        shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 256), (2, 128, 256)))
        return sorted(x.shape for x in jax.tree.leaves(jax.eval_shape(residuals, *shapes)))

    inputs, saved = [(2, 128, 256), (256, 256)], [(4, 256), (256, 4, 64)]
    assert kept(None) == inputs
    assert kept(jax.checkpoint_policies.save_only_these_names("attention")) == sorted(inputs + saved)


@NEEDS_LIBRARY
@pytest.mark.parametrize("scan", grid([True, False], False))
def test_no_array_of_a_models_loss_has_a_row_squared(scan):
    config: dict[str, Any] = {"sliding_window": 30, "sliding_window_pattern": 2, "scan": scan, "layers": 2}
    config |= {"vocab_size": 32, "d_model": 32, "heads": 2, "max_seq_len": 520, "loss_chunk": 65}

    def text(kernel):
        model = GPT(GPTConfig(**config, attention=kernel), rngs=nnx.Rngs(0))
        batch = {name: jax.ShapeDtypeStruct((2, 521), jnp.int32) for name in ("tokens", "segments")}
        graph, state = nnx.split(model)
        return str(jax.make_jaxpr(jax.grad(lambda s, b: lm_loss(nnx.merge(graph, s), b)[0]))(state, batch))

    assert "520,520]" in text("xla")
    ours = text("flash_attention_4")
    assert "520,520]" not in ours
    assert "window=(29, 0)" in ours
    assert "window=(None, None)" in ours


def choice(**options: Any) -> str:
    """The kernel that "auto" is, traced for queries of bf16 on a GPU."""
    q = jax.ShapeDtypeStruct((2, 128, 4, options.pop("width", 64)), options.pop("dtype", jnp.bfloat16))
    text = str(jax.make_jaxpr(lambda q: zerojax.attention(q, q, q, **options))(q))
    return "flash" if "fa4_fwd" in text else "cudnn" if "dot_product_attention_fwd" in text else "xla"


@pytest.fixture
def on_a_gpu(monkeypatch) -> list[str]:
    """Traced as on a GPU with cuDNN and fa4-jax; what is logged."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(flash_attention, "missing", lambda: None)
    monkeypatch.setattr(flash_attention, "generation", lambda: attention.HOPPER)
    lines: list[str] = []
    monkeypatch.setattr(attention, "warn", lines.append)
    attention._warn.cache_clear()
    return lines


@NEEDS_LIBRARY
def test_auto_is_flash_attention_where_cudnn_needs_a_mask(on_a_gpu):
    segments = jnp.zeros((2, 128), int)
    assert choice() == choice(window=30) == choice(window=30, windowed=False) == "cudnn"
    assert choice(segments=segments) == choice(segments=segments, window=30) == "flash"
    assert choice(window=30, windowed=jnp.array(True)) == "flash"
    assert not on_a_gpu


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("generation", "kernels"),
    [(7, ("xla", "xla")), (8, ("xla", "xla")), (9, ("cudnn", "flash")), (10, ("xla", "xla"))],
)
def test_heads_of_256_have_flash_kernels_on_hopper(generation, kernels, on_a_gpu, monkeypatch):
    monkeypatch.setattr(flash_attention, "generation", lambda: generation)
    segments = jnp.zeros((2, 128), int)
    with aot.cudnn_assumed():
        assert (choice(width=256), choice(width=256, segments=segments)) == kernels
    assert ("heads of 256, which flash attention does not support on this GPU" in "".join(on_a_gpu)) == (
        kernels[1] == "xla"
    )


@pytest.mark.parametrize(
    ("lacking", "options", "kernel", "why"),
    [
        ("the package fa4-jax", {}, "cudnn", r"a mask of 65\.5 KB.*lacks the package fa4-jax"),
        (None, {"causal": False}, "cudnn", r"a mask of 65\.5 KB.*is used for causal attention only"),
        (None, {"softcap": 2.0}, "xla", r"524 KB of fp32 scores.*attention_softcap"),
        (None, {"dtype": jnp.float32}, "xla", "float32 in place of bf16"),
        (None, {"width": 136}, "xla", "heads of 136"),
    ],
)
def test_attention_without_fa4_logs_its_cost_once(lacking, options, kernel, why, on_a_gpu, monkeypatch):
    monkeypatch.setattr(flash_attention, "missing", lambda: lacking)
    for _ in range(2):
        assert choice(segments=jnp.zeros((2, 128), int), **options) == kernel
    (line,) = on_a_gpu
    assert re.search(why, line)


@pytest.mark.parametrize(
    ("capability", "found", "lacking"),
    [
        (None, True, "a GPU of NVIDIA's Ampere"),
        ("7.5", True, "a GPU of NVIDIA's Ampere"),
        ("gfx942", True, "a GPU of NVIDIA's Ampere"),
        ("9.0", False, "the package fa4-jax, which the extra"),
        ("12.0", True, None),
    ],
)
def test_a_missing_requirement_is_named(capability, found, lacking, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: found or None)
    answer = flash_attention.missing()
    assert answer == lacking if lacking is None or answer is None else answer.startswith(lacking)


def test_without_the_package_it_is_refused(monkeypatch):
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"needs the package fa4-jax\. Install the extra"):
        choice(kernel="flash_attention_4")


@contextmanager
def for_hopper() -> Generator[None]:
    """fa4-jax compiles its kernels while a program is lowered: for Hopper, not for the local GPU."""
    compiler = import_module("cutlass.cutlass_dsl").CuTeDSL
    with (
        mock.patch("fa4_jax.kernels._device_arch", return_value=90),
        mock.patch.object(compiler._get_dsl().envar, "arch", "sm_90a"),
    ):
        yield


@NEEDS_LIBRARY
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fa4-jax, by the CuTe DSL
def test_the_compiled_program_runs_each_kernel_once_in_each_branch(cuda_mesh):
    sharding = SingleDeviceSharding(cuda_mesh(1, 1).devices.flat[0])
    q = jax.ShapeDtypeStruct((1, 8192, 4, 128), jnp.bfloat16, sharding=sharding)
    segments = jax.ShapeDtypeStruct((1, 8192), jnp.int32, sharding=sharding)

    def loss(q, segments):
        out = causal_attention(q, q[:, :, :2], q[:, :, 2:], "flash_attention_4", document_offsets(segments))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    with for_hopper():
        compiled = jax.jit(jax.grad(loss)).lower(q, segments).compile(dict(aot.COMPILER_OPTIONS))
    text = compiled.as_text()
    assert text is not None
    # One pass, and as many as there must be.
    assert len(re.findall(r'custom_call_target="cutejax\.fa4_fwd', text)) == 2
    assert len(re.findall(r'custom_call_target="cutejax\.fa4_bwd_gqa', text)) == 2
    # Less than cuDNN's bias alone.
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * 8192**2


@NEEDS_LIBRARY
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fa4-jax, by the CuTe DSL
def test_a_scan_that_keeps_outputs_runs_the_forward_kernel_once(cuda_mesh):
    sharding = SingleDeviceSharding(cuda_mesh(1, 1).devices.flat[0])
    weights = jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16, sharding=sharding)
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=sharding)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attention"))
    def layer(x, weight):
        q = (x @ weight).reshape(1, 1024, 4, 128)
        out = causal_attention(q, q[:, :, :2], q[:, :, 2:], "flash_attention_4")
        return x + out.reshape(1024, 512) @ weight, None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    with for_hopper():
        compiled = jax.jit(jax.grad(loss)).lower(weights, x).compile(dict(aot.COMPILER_OPTIONS))
    text = compiled.as_text()
    assert text is not None
    assert len(re.findall(r'custom_call_target="cutejax\.fa4_fwd', text)) == 1
