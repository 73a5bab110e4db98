"""zerojax.analysis.aot: described clusters, and no side effects in a process that compiles for them."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax import aot


@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (2, 4), (64, 8)])
def test_topology_orders_devices_by_host(cuda_mesh, nodes, local):
    mesh = cuda_mesh(nodes, local)
    hosts = np.vectorize(lambda d: d.process_index)(mesh.devices)
    np.testing.assert_array_equal(hosts, np.repeat(np.arange(nodes)[:, None], local, axis=1))
    assert mesh.devices.flat[0].platform == "gpu"


@pytest.mark.parametrize(("gpu", "kind"), [("h100", "H100"), ("h200", "H200")])
def test_every_described_gpu_compiles(cuda_mesh, gpu, kind):
    cuda_mesh(1, 1)  # skips without a compiler
    device = aot.topology(1, 1, gpu)[0]
    assert kind in device.device_kind
    sharding = jax.sharding.SingleDeviceSharding(device)
    square = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=sharding)
    text = jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(square, square).compile().as_text()
    assert text is not None
    assert "bf16[256,256]" in text
    assert set(aot.gpus()) == {"h100", "h200"}


def test_the_cpu_stays_the_default(cuda_mesh):
    before = jax.devices()
    cuda_mesh(2, 2)
    assert jax.devices() == before
    assert jax.default_backend() == "cpu"
    assert float(jnp.arange(4.0).sum()) == 6.0
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ or before


def test_a_description_of_ones_own(cuda_mesh, tmp_path: Path):
    cuda_mesh(1, 1)
    text = aot.gpu_description("h100").replace("NVIDIA H100", "NVIDIA X100")
    (tmp_path / "x100.txtpb").write_text(text)
    assert "X100" in aot.topology(1, 2, tmp_path / "x100.txtpb")[1].device_kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 8), "at least 1 node"), ((2, 0), "at least 1 node"), ((1, 1, "h900"), "h100, h200")],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        aot.topology(*arguments)


def test_says_how_to_install_a_missing_compiler(tmp_path: Path):
    program = "from zerojax import aot; aot.topology(1, 1)"
    environment = os.environ | {"ZEROJAX_CUDA_COMPILER": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("this JAX has its own CUDA plugin installed")
    last = done.stderr.strip().splitlines()[-1]
    assert "CompilerMissingError" in last
    assert "scripts/install_cuda_compiler.sh" in last
