"""zerojax.sharding.cuda_driver; on CPUs, that errors of the driver are told."""

import mmap
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import has_gpu

import zerojax
from zerojax.errors import RunError
from zerojax.sharding import cuda_driver


def test_nothing_is_locked_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_library", lambda: pytest.fail("CUDA"))
    with cuda_driver.page_locked(np.zeros(8, np.uint8), zerojax.make_mesh(1, 1)):
        cuda_driver.copy_to_host([])


def test_contexts_work_until_the_driver_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = zerojax.make_mesh(1, 1)
    assert cuda_driver.contexts_work(mesh), "CPUs have none"
    calls = {f"cu{name}": lambda *_: 0 for name in ("DeviceGet", "CtxPushCurrent_v2", "CtxPopCurrent_v2")}
    calls |= {f"cuDevicePrimaryCtx{name}": lambda *_: 0 for name in ("Retain", "Release_v2")}
    library = SimpleNamespace(**calls, cuGetErrorString=lambda *_: 0)
    monkeypatch.setattr(cuda_driver, "_library", lambda: library)
    monkeypatch.setattr(cuda_driver, "on_gpus", lambda _: True)
    for code, works in ((0, True), (700, False)):
        library.cuCtxSynchronize = lambda code=code: code
        assert cuda_driver.contexts_work(mesh) == works


def test_an_error_of_the_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(code: int, place: Any) -> None:
        assert code == 2
        place._obj.value = b"out of memory"

    library = SimpleNamespace(cuDeviceGet=lambda *_: 2, cuGetErrorString=text)
    monkeypatch.setattr(cuda_driver, "_library", lambda: library)
    with pytest.raises(RunError, match=r"CUDA's cuDeviceGet failed: out of memory \(2\)"):
        cuda_driver.copy_to_host([(jnp.ones(3), np.zeros(12, np.uint8))])


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
def test_copies_pass_steps_that_are_queued() -> None:
    mesh = zerojax.make_mesh(1, 1, devices=jax.devices("cuda")[:1])
    memory = np.frombuffer(mmap.mmap(-1, 2 << 20), np.uint8)
    xs = [jax.device_put(jnp.arange(1000) * n, mesh.devices[0, 0]) for n in (1, 2)]
    jax.block_until_ready(xs)
    product = jax.jit(lambda a: jax.lax.fori_loop(0, 200, lambda _, b: (b @ a) * 1e-4, a))
    y = jax.device_put(jnp.ones((8192, 8192), jnp.bfloat16), mesh.devices[0, 0])
    y = product(product(y))
    with cuda_driver.page_locked(memory, mesh):
        cuda_driver.copy_to_host(zip(xs, (memory[:4000], memory[4096:8096]), strict=True))
        assert not y.is_ready(), "the copies have not waited for the products"
    np.testing.assert_array_equal(memory[:4000].view(np.int32), np.arange(1000))
    np.testing.assert_array_equal(memory[4096:8096].view(np.int32), 2 * np.arange(1000))
