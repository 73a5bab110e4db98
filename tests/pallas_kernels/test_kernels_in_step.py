"""The GPU kernels lower, and a whole ZeRO++ step compiles with them, on a machine without a GPU.

JAX must find its CUDA plugin at start-up for that, which would affect every other test of this process; so
these run in a process of their own.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

from zerojax import aot

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed"),
    pytest.mark.skipif(
        not aot.compiler_dir().is_dir(), reason="no CUDA compiler: run scripts/install_cuda_compiler.sh"
    ),
]


@pytest.mark.parametrize(
    "what",
    [
        ["tests/pallas_kernels/test_lowering.py"],
        ["tests/train/test_compiled_step.py", "-m", "slow", "-k", "zero++"],
        # The kernels have no derivative, and nothing may ask them for one.
        ["tests/schedule/test_derived_losses.py", "-k", "quantized"],
    ],
)
def test_with_the_cuda_plugin(request, what):
    path = os.pathsep.join([str(aot.compiler_dir()), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *what],
        cwd=request.config.rootpath,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
