import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_flash import flash

import zerojax
from zerojax.analysis import aot
from zerojax.errors import ZeroError
from zerojax.models import flash_attention
from zerojax.models.attention import causal_attention, has_flash
from zerojax.models.flash_attention import document_offsets


def heads(key, batch=2, time=6, count=4, dim=8):
    drawn = np.random.default_rng(key).standard_normal((batch, time, count, dim), np.float32)
    return jnp.asarray(drawn)


def plain_attention(q, k, v, window=100, scale=None, softcap=None, sinks=None):
    """Numpy, one head and one position at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = slice(max(0, t + 1 - window), t + 1)
        scores = k[b, seen, h // group] @ q[b, t, h] * (scale or q.shape[3] ** -0.5)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h]))
        out[b, t, h] = weights @ v[b, seen, h // group] / total
    return out


@pytest.mark.parametrize("window", [1, 4, 6, 9])
def test_a_window_reaches_back_so_many_positions(window):
    q, k, v = heads(0), heads(1, count=2), heads(2, count=2)
    ours = causal_attention(q, k, v, window=window)
    np.testing.assert_allclose(ours, plain_attention(q, k, v, window), atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_plain_formula(kv_heads):
    q, k, v = heads(0), heads(1, count=kv_heads), heads(2, count=kv_heads)
    np.testing.assert_allclose(causal_attention(q, k, v), plain_attention(q, k, v), atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_a_softcap_bounds_the_scores(window):
    q, k, v = heads(0), heads(1, count=2), heads(2, count=2)
    ours = causal_attention(q, k, v, window=window, scale=0.9, softcap=1.5)
    expected = plain_attention(q, k, v, window or 100, 0.9, 1.5)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert not np.allclose(ours, causal_attention(q, k, v, window=window, scale=0.9), atol=1e-2)
    with pytest.raises(ZeroError, match=r"softcap = 1\.5"):
        causal_attention(q, k, v, "cudnn", softcap=1.5)


SINKS = jnp.array([-1.0, 0.0, 0.5, 3.0])


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_sink_takes_part_in_the_softmax(softcap):
    q, k, v = heads(0), heads(1, count=2), heads(2, count=2)
    ours = causal_attention(q, k, v, window=3, softcap=softcap, sinks=SINKS)
    expected = plain_attention(q, k, v, 3, softcap=softcap, sinks=np.asarray(SINKS, np.float64))
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("time", [6, 5])
def test_flash_kernels_know_sinks_by_their_residuals(time, monkeypatch):
    q, k, v = heads(0, time=time), heads(1, time=time, count=2), heads(2, time=time, count=2)

    def results(kernel):
        def loss(q, k, v, sinks):
            out = causal_attention(q, k, v, kernel, sinks=sinks)
            return jnp.sum(out * jnp.cos(jnp.arange(8.0))), out

        run = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
        return jax.jit(run)(q, k, v, SINKS), loss(q, k, v, SINKS)

    def cudnn(q, k, v, *, mask, is_causal, scale, local_window_size, implementation, **others):
        assert is_causal
        assert others == {"key_value_seq_lengths": None, "return_residual": False}
        assert (mask, local_window_size, implementation) == (None, None, "cudnn")
        return flash(scale, jnp.tril(jnp.ones((q.shape[1],) * 2, bool)), q, k, v)[0]

    wanted = results("xla")
    monkeypatch.setattr("jax.nn.dot_product_attention", cudnn)
    ours = results("cudnn")
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), ours, wanted)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_whether_a_layer_has_the_window_can_be_data(softcap):
    q, k, v = heads(0), heads(1), heads(2)
    documents = document_offsets(jnp.array([[1, 1, 1, 1, 1, 2]] * 2))

    @jax.jit
    def run(windowed):
        return causal_attention(q, k, v, "xla", documents, window=2, windowed=windowed, softcap=softcap)

    for windowed in (True, False):
        static = causal_attention(q, k, v, "xla", documents, window=2 if windowed else None, softcap=softcap)
        np.testing.assert_allclose(run(jnp.array(windowed)), static, atol=1e-6)
        same = causal_attention(q, k, v, "xla", documents, window=2, windowed=windowed, softcap=softcap)
        np.testing.assert_array_equal(same, static)


def test_grouped_attention_equals_repeated_heads():
    q, k, v = heads(0), heads(1, count=2), heads(2, count=2)
    repeated = causal_attention(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2))
    np.testing.assert_allclose(causal_attention(q, k, v), repeated, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_a_number_that_is_used_again_is_another_document(causal):
    q = heads(0)
    ours, theirs = (
        zerojax.attention(q, q, q, causal=causal, segments=jnp.array([row] * 2))
        for row in ([0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2])
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window = 0 must be at least 1"),
        ({"width": 12}, "values of width 12 are wider than keys of 8"),
    ],
)
def test_arguments_that_attention_would_misread_are_refused(options, message):
    q, v = heads(0), heads(1, dim=options.pop("width", 8))
    with pytest.raises(ZeroError, match=message):
        zerojax.attention(q, q, v, **options)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_a_policy_that_saves_attention_runs_its_cudnn_kernel_once(sinks, monkeypatch):
    # Traced only: neither cuDNN nor a GPU is needed for the program's text.
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)

    def layer(weight, x):
        q = (x @ weight).reshape(2, 128, 4, 64)
        out = causal_attention(q, q[:, :, :2], q[:, :, 2:], "cudnn", sinks=sinks)
        return jnp.sin(out.reshape(2, 128, 256) @ weight)

    def kernels(policy):
        step = jax.grad(lambda w, x: jnp.sum(jax.checkpoint(layer, policy=policy)(w, x)).astype(jnp.float32))
        shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 256), (2, 128, 256)))
        text = str(jax.make_jaxpr(step)(*shapes))
        return [text.count(f"dot_product_attention_{way}_wrapper[") for way in ("fwd", "bwd")]

    assert kernels(None) == [2, 1]
    assert kernels(jax.checkpoint_policies.save_only_these_names("attention")) == [1, 1]


def test_cudnns_kernel_gets_the_window_and_the_scale(monkeypatch):
    # Traced only: neither cuDNN nor a GPU is needed for the program's text.
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)

    def text(**options):
        return str(jax.make_jaxpr(lambda q: causal_attention(q, q, q, "cudnn", **options))(q))

    assert "sliding_window_length=32" in text(window=32)
    assert "scale=0.25" in text(scale=0.25)
    for whole in (text(), text(window=128), text(window=32, windowed=False)):
        assert "sliding_window_length=0" in whole or "sliding_window_length=None" in whole
    as_data = str(
        jax.make_jaxpr(lambda q, w: causal_attention(q, q, q, "cudnn", window=32, windowed=w))(q, True)
    )
    assert "sliding_window_length=32" not in as_data
    # cuDNN takes a window or a bias, not both.
    documents = document_offsets(jnp.ones((2, 128), int))
    assert "sliding_window_length=32" not in text(window=32, documents=documents)
    assert "1,1,128,128]" in as_data


def test_cudnns_kernel_takes_values_that_are_narrower_than_keys():
    # Traced only, as above: not padded to the width of keys.
    q, v = (jax.ShapeDtypeStruct((2, 128, 4, width), jnp.bfloat16) for width in (192, 128))

    def loss(q, v, **options):
        return jnp.sum(causal_attention(q, q, v, "cudnn", **options).astype(jnp.float32))

    documents = document_offsets(jnp.ones((2, 128), int))
    with aot.cudnn_assumed():
        text = str(jax.make_jaxpr(jax.grad(partial(loss, scale=0.25, window=32), (0, 1)))(q, v))
        gradients = jax.eval_shape(jax.grad(partial(loss, documents=documents), (0, 1)), q, v)
    assert re.search(r":bf16\[2,128,4,128\].* = dot_product_attention_fwd_wrapper\[", text)
    assert "dot_product_attention_bwd_wrapper[" in text
    assert "scale=0.25" in text
    assert "sliding_window_length=32" in text
    assert "mask_type=MaskType.CAUSAL" in text
    assert [x.shape for x in gradients] == [q.shape, v.shape]


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        (7, set()),
        (8, {(128, 128)}),
        (9, {(128, 128), (192, 128), (192, 192), (256, 256)}),
        (10, {(128, 128), (192, 128)}),
    ],
)
def test_auto_knows_which_widths_flash_kernels_have(generation, wanted):
    widths = [(128, 128), (130, 130), (160, 160), (192, 192), (256, 256), (264, 264)]
    widths += [(192, 128), (192, 130), (256, 128)]
    assert {pair for pair in widths if has_flash(*pair, generation=generation)} == wanted


@pytest.mark.parametrize("segmented", [False, True])
def test_cudnn_has_gradients_for_an_odd_time(segmented, monkeypatch):
    # Traced only, as above. JAX refuses these shapes in its own rule.
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    q = jax.ShapeDtypeStruct((2, 127, 4, 64), jnp.bfloat16)
    documents = document_offsets(jnp.ones((2, 127), int)) if segmented else None

    def loss(q):
        return jnp.sum(causal_attention(q, q, q, "cudnn", documents).astype(jnp.float32))

    assert jax.eval_shape(jax.grad(loss), q).shape == q.shape


def test_auto_picks_xla_without_a_gpu():
    q = heads(0).astype(jnp.bfloat16)
    text = str(jax.make_jaxpr(lambda q: causal_attention(q, q, q))(q))
    assert "dot_product_attention_fwd" not in text
    assert "name=attention" in text


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's kernel runs on CUDA only")
@pytest.mark.parametrize("time", [256, 255])
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (256, 256)])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40, "scale": 0.2}, {"window": 40, "data": True}, {"sinks": 8}],
    ids=str,
)
def test_cudnn_gives_values_and_gradients_of_the_plain_formula_in_fp32(options, widths, time):
    if not has_flash(*widths, generation=flash_attention.generation()):
        pytest.skip(f"cuDNN has no heads of {widths} on this GPU")
    if options.get("data"):
        options = {"window": options["window"], "windowed": jnp.array(True)}
    sinks = jnp.linspace(-1, 4, 8) if options.get("sinks") else None
    options = {name: value for name, value in options.items() if name != "sinks"}

    def loss(kernel, q, k, v, sinks=None):
        out = causal_attention(q, k, v, kernel, **options, sinks=sinks).astype(jnp.float32)
        return jnp.sum(out * jnp.cos(jnp.arange(1.0 * widths[1]))), out

    shared = 2 if widths[0] == widths[1] else 8
    shapes = (8, widths[0]), (shared, widths[0]), (shared, widths[1])
    inputs = [heads(i, time=time, count=count, dim=dim) for i, (count, dim) in enumerate(shapes)]
    inputs += [] if sinks is None else [sinks]
    half = [x.astype(jnp.bfloat16) for x in inputs]

    def results(kernel, inputs):
        gradients, out = jax.grad(partial(loss, kernel), argnums=range(len(inputs)), has_aux=True)(*inputs)
        return [out, *gradients]

    ours, exact = results("cudnn", half), results("xla", [x.astype(jnp.float32) for x in half])
    assert all(x.dtype == jnp.bfloat16 for x in ours[1:])
    for mine, theirs in zip(ours, exact, strict=True):
        assert float(jnp.linalg.norm(mine.astype(jnp.float32) - theirs) / jnp.linalg.norm(theirs)) < 0.01
