"""Emulated devices for every test, set before JAX starts.

Tests run on twelve CPU devices (enough for a 4 x 3 mesh) unless another platform is asked for, as in
``JAX_PLATFORMS=cuda pytest -m gpu``.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_MAPS = Path("/proc/self/maps")
_FLAGS = {
    "--xla_force_host_platform_device_count": 12,
    # Twelve devices on two busy cores may take longer to meet than the 40 s after which XLA aborts.
    "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
}

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for flag, value in _FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()


@pytest.fixture(autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Free what earlier tests compiled before it is too much for one process.

    The kernel lets a process map 65,530 regions; XLA:CPU maps a few for each program, and crashes beyond.
    """
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 25_000:
        import jax  # not before the environment above is set

        jax.clear_caches()
        gc.collect()
