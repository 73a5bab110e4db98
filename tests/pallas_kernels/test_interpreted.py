"""The Triton kernels on a CPU, by Triton's interpreter, against the reference."""

import importlib.util
import os
import subprocess
import sys

import pytest
from environment import ROOT

import pallas_kernels as pk
from zerojax import aot

HERE = ROOT / "tests" / "helpers"


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
@pytest.mark.skipif(
    not aot.compiler_dir().is_dir(), reason="no CUDA compiler: run scripts/install_cuda_compiler.sh"
)
@pytest.mark.parametrize(
    "names",
    [
        # In one process: importing JAX and Triton takes longer than most of them.
        ("attention", "cast", "columns", "grouped", "delta_chunks"),
        *(pytest.param((fmt,), marks=pytest.mark.slow) for fmt in (*pk.STORED, *pk.QUANTIZED)),
        pytest.param(("delta_chunks of every kind",), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_interpreted_kernels_equal_the_reference(names):
    # jax-triton can't be imported without JAX's CUDA plugin.
    path = os.pathsep.join([str(HERE.parents[1]), str(aot.compiler_dir()), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted_checks.py"), *names],
        env={**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"{name} agrees" for name in names]
