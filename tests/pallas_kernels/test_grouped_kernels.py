"""The kernels of grouped matmuls against their specification: interpreted, and on a GPU if there is one."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import has_gpu

import pallas_kernels
from pallas_kernels import grouped_reference
from pallas_kernels.mosaic import calls, grouped

public: Any = pallas_kernels
"""The functions of the package, which also take numpy's arrays; and of its specification."""
reference: Any = grouped_reference


def operands(sizes, others, k, n):
    """x, w, g and sizes, with NaN in the rows of nobody."""
    rng = np.random.default_rng(k + n)
    rows = sum(sizes) + others
    x, w, g = (rng.standard_normal(s) for s in ((rows, k), (len(sizes), k, n), (rows, n)))
    x[sum(sizes) :] = g[sum(sizes) :] = np.nan
    x, w, g = (np.asarray(jnp.asarray(a, jnp.bfloat16)) for a in (x, w, g))
    return x, w, g, np.array(sizes, np.int32)


def products(module, x, w, g, sizes):
    yield jax.jit(partial(module.grouped_rows, transposed=False))(x, w, sizes)
    yield jax.jit(partial(module.grouped_rows, transposed=True))(g, w, sizes)
    yield jax.jit(module.grouped_sums)(x, g, sizes)


def compare(found, wanted, atol=1e-2):
    for a, b in zip(found, wanted, strict=True):
        # Sums in fp32, in another order: results may be rounded to different neighbours.
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=atol)


@pytest.fixture
def interpreted(monkeypatch):
    """Pallas' interpreter, which knows neither transposed references nor two views of one buffer."""

    def begin_rows(source, first, column, width, slot_of, full):
        for start in range(0, grouped.STEP, 8):
            rows = source.at[pl.ds(first + start, 8), pl.ds(column, width)]
            plgpu.copy_gmem_to_smem(rows, slot_of(0).at[pl.ds(start, 8)], full)

    monkeypatch.setattr(grouped, "_begin_rows", begin_rows)
    monkeypatch.setattr(grouped, "_in_columns", lambda g: g)
    monkeypatch.setattr(grouped, "_both", lambda views: (views[0], views[0]))
    monkeypatch.setattr(grouped, "multiprocessors", lambda: 2)
    with plgpu.force_gpu_interpret_mode():
        yield


@pytest.mark.usefixtures("interpreted")
def test_interpreted_kernels_equal_the_specification():
    given = operands((1, 0, 65, 70), 9, 192, 64)
    compare(list(products(calls, *given)), products(grouped_reference, *given))


@pytest.mark.usefixtures("interpreted")
def test_interpreted_with_fewer_rows_than_a_warpgroup_multiplies():
    x, w, _, sizes = operands((0, 3, 2), 1, 64, 64)
    found, wanted = (
        jax.jit(partial(module.grouped_rows, transposed=False))(x, w, sizes)
        for module in (calls, grouped_reference)
    )
    compare([found], [wanted])


def operands_in_fp8(sizes, others, k, n):
    x, w, g, sizes = operands(sizes, others, k, n)
    x, w, g = (
        np.asarray(jnp.asarray(a, dtype))
        for a, dtype in zip((x, w, g), (jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2), strict=True)
    )
    return x, w, g, sizes, np.float32(0.25)


def products_in_fp8(module, x, w, g, sizes, scale):
    """As products with e4m3 and, of gradients, e5m2 are."""
    for rows, transposed in ((x, False), (g, True)):
        options = {"transposed": transposed, "dtype": jnp.dtype(jnp.bfloat16)}
        yield jax.jit(partial(module.grouped_rows_fp8, **options))(rows, w, sizes, scale)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_interpreted_kernels_equal_the_specification_in_fp8():
    given = operands_in_fp8((1, 0, 70), 9, 128, 128)
    compare(list(products_in_fp8(calls, *given)), products_in_fp8(grouped_reference, *given))


def columns_by_numpy(x, sizes):
    """Each group's rows as columns, with zeros up to a multiple of 128."""
    groups = np.split(x[: sum(sizes)], np.cumsum(sizes)[:-1])
    padded = [np.pad(own, ((0, -len(own) % 128), (0, 0))) for own in groups]
    return np.concatenate(padded).T


@pytest.mark.parametrize("sizes", [(1, 0, 130, 128), (0, 0), (300,)])
@pytest.mark.parametrize("indexed", [False, True])
def test_columns_are_the_rows_of_groups_padded_with_zeros(sizes, indexed):
    x, _, _, sizes = operands(sizes, 9, 24, 8)
    x = x.astype(jnp.float8_e4m3fn)
    index = np.random.default_rng(0).permutation(len(x)).astype(np.int32) if indexed else None
    found = np.asarray(public.grouped_columns(x, sizes, index))
    wanted = columns_by_numpy(x if index is None else x[index], sizes)
    assert found.shape[1] % 128 == 0
    np.testing.assert_array_equal(found[:, : wanted.shape[1]].view(np.uint8), wanted.view(np.uint8))
    assert not found[:, wanted.shape[1] :].view(np.uint8).any()


def test_a_cast_of_groups_has_their_columns():
    x, _, _, sizes = operands((1, 0, 130), 9, 24, 8)
    codes, columns = public.cast_transpose(x, jnp.float32(64), jnp.float8_e5m2, sizes)
    wanted = public.cast_transpose(x, jnp.float32(64), jnp.float8_e5m2)[0]
    for a, b in ((codes, wanted), (columns, public.grouped_columns(wanted, sizes))):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2])
def test_gathered_rows_are_those_of_the_index(dtype):
    x = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(7, 24)), dtype))
    index = np.array([6, 0, 3, 3], np.int32)
    np.testing.assert_array_equal(
        np.asarray(public.gather_rows(x, index)).view(np.uint8), x[index].view(np.uint8)
    )


def sums_in_fp8(module, x, g, sizes, scale):
    """From rows, in bf16."""
    options = {"dtype": jnp.dtype(jnp.bfloat16)}
    rows = (public.grouped_columns(a, sizes) for a in (x, g))
    return jax.jit(partial(module.grouped_sums_fp8, **options))(*rows, sizes, scale)


def sums_by_numpy(x, g, sizes, scale):
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    parts = [slice(*bounds[i : i + 2]) for i in range(len(sizes))]
    x, g = (np.asarray(a, np.float32) for a in (x, g))
    return np.stack([x[own].T @ g[own] for own in parts]) * scale


def test_sums_in_fp8_are_those_of_numpy():
    x, _, g, sizes, scale = operands_in_fp8((1, 0, 130, 128), 9, 24, 16)
    compare([sums_in_fp8(grouped_reference, x, g, sizes, scale)], [sums_by_numpy(x, g, sizes, scale)])


@pytest.mark.usefixtures("interpreted")
def test_interpreted_sums_equal_the_specification_in_fp8():
    x, _, g, sizes, scale = operands_in_fp8((1, 0, 130), 9, 128, 256)
    compare([sums_in_fp8(calls, x, g, sizes, scale)], [sums_by_numpy(x, g, sizes, scale)])


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
@pytest.mark.parametrize(("k", "n"), [(256, 384), (384, 128)])
def test_sums_on_a_gpu_equal_the_specification_in_fp8(k, n):
    sizes = (0, 1, 127, 128, 129, 0, 5000, 191) * 6
    x, _, g, sizes, scale = operands_in_fp8(sizes, 33, k, n)
    index = np.random.default_rng(0).permutation(len(x)).astype(np.int32)
    with jax.default_device(jax.devices("cuda")[0]):
        for rows, kept in ((x, index), (g, None)):
            found = np.asarray(public.grouped_columns(rows, sizes, kept))
            wanted = reference.grouped_columns(rows, sizes, kept)
            np.testing.assert_array_equal(found.view(np.uint8), np.asarray(wanted).view(np.uint8))
            gathered = np.asarray(public.gather_rows(rows, index))
            np.testing.assert_array_equal(gathered.view(np.uint8), rows[index].view(np.uint8))
        wide = jnp.asarray(np.float32(x), jnp.bfloat16)
        given = wide, jnp.float32(scale), jnp.asarray(sizes)
        cast = (
            public.cast_transpose(*given[:2], g.dtype, sizes),
            grouped_reference.cast_transpose(*given, dtype=g.dtype),
        )
        for a, b, count in zip(*cast, (sum(sizes), None), strict=True):
            mine, theirs = (np.asarray(codes)[:count].view(np.uint8) for codes in (a, b))
            np.testing.assert_array_equal(mine, theirs)
        # Sums of 128 products have about 14 bits, and the sum of up to 5000 rows is added in fp32.
        found, wanted = sums_in_fp8(calls, x, g, sizes, scale), sums_by_numpy(x, g, sizes, scale)
        compare([found], [wanted], atol=2e-3 * np.abs(wanted).max())
        assert np.linalg.norm(np.float32(found) - wanted) < 3e-3 * np.linalg.norm(wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
@pytest.mark.parametrize(("k", "n"), [(256, 384), (192, 320), (704, 64)])
def test_kernels_on_a_gpu_equal_the_specification(k, n):
    """More tiles than multiprocessors; groups that fill no tile, and tiles beyond the edge of a matrix."""
    sizes = (0, 1, 63, 64, 65, 0, 127, 128, 129, 700, 191) * 12
    given = operands(sizes, 33, k, n)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = [np.asarray(a) for a in products(grouped_reference, *given)]
    with jax.default_device(jax.devices("cuda")[0]):
        for _ in range(3):
            compare(list(products(calls, *given)), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
@pytest.mark.parametrize(("dtype", "atol"), [(jnp.bfloat16, 1e-2), (jnp.float32, 1e-4)])
@pytest.mark.parametrize(("k", "n"), [(256, 384), (100, 300), (72, 1000)])
def test_triton_kernels_on_a_gpu_equal_the_specification(k, n, dtype, atol):
    from pallas_kernels.triton import calls as triton_calls

    x, w, g, sizes = operands((0, 1, 63, 64, 65, 0, 127, 128, 129, 700, 191), 33, k, n)
    x, w, g = (np.asarray(jnp.asarray(a, dtype)) for a in (x, w, g))
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = [np.asarray(a) for a in products(grouped_reference, x, w, g, sizes)]
    with jax.default_device(jax.devices("cuda")[0]):
        compare(list(products(triton_calls, x, w, g, sizes)), wanted, atol=atol)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
@pytest.mark.parametrize(("k", "n"), [(256, 384), (128, 640), (192, 320)])
def test_kernels_on_a_gpu_equal_the_specification_in_fp8(k, n):
    """The last matrices are decoded: their sides are no multiples of 128."""
    given = operands_in_fp8((0, 1, 63, 64, 65, 0, 127, 128, 129, 700, 191) * 12, 33, k, n)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = [np.asarray(a) for a in products_in_fp8(grouped_reference, *given)]
    with jax.default_device(jax.devices("cuda")[0]):
        # Hopper sums products of fp8 with about 14 bits (DeepSeek-V3, section 3.3.2): of 2.3 million results
        # for 128 x 640 one was 0.016 off, where simulated sums with 13 bits are up to 0.023 off.
        compare(list(products_in_fp8(pallas_kernels, *given)), wanted, atol=0.03)
