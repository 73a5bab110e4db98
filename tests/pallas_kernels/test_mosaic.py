"""The bodies of the Mosaic kernels give the reference's bits, and compile for an absent GPU."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import CASES, case, has_gpu, same
from mosaic_cases import FORMATS, call, calls_of

from pallas_kernels import reference
from pallas_kernels.mosaic import calls
from pallas_kernels.mosaic.tiles import choose_tile


@pytest.fixture
def emulated(monkeypatch):
    from mosaic_emulator import emulate

    emulate(monkeypatch)


def check(name, *arrays, **static):
    got, want = (call(module, name, arrays, static) for module in (calls, reference))
    same(np.asarray(got), np.asarray(want))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_encode(name, fmt, dtype):
    x = jnp.asarray(case(name, 2, 256 * 19)).astype(dtype)
    check("encode", x, None, fmt=fmt, block=256, rounding="nearest", rotation=0)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(64, 3, 704), (128, 1, 128 * 37), (2048, 2, 2048 * 5)], ids=str)
def test_shapes(fmt, shape):
    block, rows, n = shape
    for name, arrays, static in calls_of(fmt, block, rows, n):
        check(name, *arrays, **static)


@pytest.mark.parametrize("width", [16, 64, 128, 256, 2048])
@pytest.mark.parametrize("blocks", [8, 11, 16, 100, 4096])
def test_tiles_fit(blocks, width):
    tile = choose_tile(blocks, width, 8, 32)
    assert tile is not None
    assert tile.blocks <= blocks
    assert 0 < tile.lanes * tile.vector <= width
    assert tile.blocks % (128 // tile.lanes) == 0


def test_no_tile_for_three_blocks():
    assert choose_tile(3, 256, 8, 32) is None


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("blocks", [4, 5])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ["normal", "ladder", "broken", "threshold"])
def test_decode(name, fmt, blocks):
    n = 64 * blocks
    options = {"fmt": fmt, "block": 64}
    payload = reference.encode(jnp.asarray(case(name, 2, n)), None, rounding="nearest", rotation=0, **options)
    static = {**options, "n": n, "dtype": jnp.dtype(jnp.bfloat16)}
    check("decode", payload, **static)


@pytest.mark.parametrize("option", [{"rounding": "stochastic"}, {"rotation": 32}, {"fmt": "int2"}])
def test_what_has_no_kernel_is_left_to_others(option):
    static: dict[str, Any] = {"fmt": "int8", "block": 64, "rounding": "nearest", "rotation": 0, **option}
    assert calls.encode(jnp.asarray(case("normal", 2, 64 * 8)), jnp.uint32(1), **static) is None


def _can_compile() -> bool:
    from zerojax import aot

    return aot.compiler_dir().is_dir()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not _can_compile(), reason="no CUDA compiler: run scripts/install_cuda_compiler.sh")
def test_kernels_compile_without_a_gpu(request):
    """In a process of its own: JAX must find its CUDA plugin when it starts."""
    from zerojax import aot

    path = os.pathsep.join([str(aot.compiler_dir()), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "tests/helpers/mosaic_compiled.py"],
        cwd=request.config.rootpath,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "compiled" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
@pytest.mark.parametrize(
    "shape", [(64, 3, 704), (256, 2, 8192), (2048, 3, 2048 * 5), (128, 1, 128 * 257)], ids=str
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_on_a_gpu(fmt, shape):
    block, rows, n = shape
    for kind in CASES:
        for name, arrays, static in calls_of(fmt, block, rows, n, kind):
            got, want = (
                _on(platform, partial(call, module, name, static=static), arrays)
                for platform, module in (("cuda", calls), ("cpu", reference))
            )
            same(got, want)


def _on(platform, function, arrays):
    with jax.default_device(jax.devices(platform)[0]):
        moved = tuple(array if array is None else jnp.asarray(np.asarray(array)) for array in arrays)
        return np.asarray(jax.jit(function)(moved))
