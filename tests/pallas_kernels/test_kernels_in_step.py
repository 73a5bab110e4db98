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


STEP = "tests/train/test_compiled_step.py::test_the_compiled_step_sends_what_the_traced_one_says"
LOWERING = "tests/pallas_kernels/test_lowering.py"
FP8 = "tests/matmul/test_compiled.py::test_products_are_in_fp8_and_weights_are_not_decoded[zero3]"
# The kernels have no derivative, and nothing may ask them for one.
REFUSED = "tests/matmul/test_fp8.py::test_a_second_derivative_is_refused"
DERIVED = "tests/schedule/test_derived_losses.py::test_quantized_gradients_of_a_penalty_are_near"


@pytest.mark.parametrize(
    ("chosen", "tests"),
    [
        # All of these, though their own marks are slow; scripts/test.sh lowers the others.
        ("", [f"{STEP}[zero++-paper-2-4-dtypes1]", REFUSED]),
        pytest.param(
            "slow or Stacked or Listed or fp8",
            [LOWERING, FP8, f"{DERIVED}[Stacked-units0]", f"{DERIVED}[Listed-units1]"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["always", "the rest"],
)
def test_with_the_cuda_plugin(request, chosen, tests):
    path = os.pathsep.join([str(aot.compiler_dir()), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "-k", chosen, *tests],
        cwd=request.config.rootpath,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
