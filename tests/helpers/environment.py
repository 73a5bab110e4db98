"""What JAX finds in the environment of the tests, and of the programs that they start.

Most of a test's time is compiling: so the compiler optimizes less than it does by default, and what one test
has compiled, the next one finds. ``XLA_FLAGS=--xla_backend_optimization_level=3 pytest`` compiles as usual.
"""

import functools
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_LEVEL = "--xla_backend_optimization_level"
_FLAGS = {
    "--xla_force_host_platform_device_count": 12,  # enough for a 4 x 3 mesh
    # Twelve devices on two busy cores may take longer to meet than the 40 s after which XLA aborts.
    "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
}
_QUICK = {
    _LEVEL: 0,
    # The newer emitters set up MLIR's passes for each fusion, which takes most of a compile.
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count": 1,
    # XLA checks its own work after each group of passes.
    "--xla_disable_hlo_passes": "hlo-verifier",
}
_compiled: dict[str, Any] = {}
"""The programs of this process, by JAX's key of each."""
_requested: list[str] = []
"""The keys of the programs that were needed since the process last counted its regions of memory."""
_MAPS = Path("/proc/self/maps")


def prepare() -> None:
    """Set the variables of this process, before JAX reads them."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Several processes share a GPU, of whose memory JAX would give three quarters to the first.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["COLUMNS"] = "120"  # tables and lines do not depend on the terminal
    given = os.environ.get("XLA_FLAGS", "")
    wanted = _FLAGS if _LEVEL in given else _FLAGS | _QUICK
    flags = [f"{flag}={value}" for flag, value in wanted.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *flags]).strip()
    # Programs carry a traceback for each operation, which the compiler rewrites from form to form.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


def check_platforms() -> None:
    """Check that tests on another platform find the CPU devices with which they compare it.

    Raises:
        pytest.UsageError: ``JAX_PLATFORMS`` excludes them.
    """
    given = os.environ.get("JAX_PLATFORMS", "")
    if given and "cpu" not in given.split(","):
        raise pytest.UsageError(
            f"JAX_PLATFORMS={given} leaves out JAX's CPU devices, with which the tests compare the others. "
            f"Run JAX_PLATFORMS={given},cpu pytest -m gpu"
        )


def partition_quickly() -> None:
    """Let this process's programs for CPUs be partitioned by GSPMD.

    Shardy translates each program into its own form and back, a fifth of the time to compile. Neither has
    much to do: in ``shard_map`` over all axes a program says itself what each device does. Programs that the
    tests start, and tests on GPUs, use Shardy as users do.
    """
    if os.environ["JAX_PLATFORMS"] == "cpu" and f"{_LEVEL}=0" in os.environ["XLA_FLAGS"]:
        import jax  # not before the environment is prepared

        jax.config.update("jax_use_shardy_partitioner", False)


def share_compiled(folder: Path) -> None:
    """Compile each program once: this process keeps them in memory, and those that it starts in a folder."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.05,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    import jax  # not before the environment is prepared
    from jax._src import compiler

    from zerojax import compilation_cache

    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    keep, read = compilation_cache._keep, compiler._cache_read

    def here() -> bool:
        return jax.config.jax_compilation_cache_dir == str(folder)

    def keep_here(key: str, *rest: Any) -> None:
        if here():
            *_, _compiled[key] = rest
        else:  # a test of the folder
            keep(key, *rest)

    def read_here(name: str, key: str, *rest: Any) -> tuple[Any, int | None]:
        _requested.append(key)
        *_, callbacks = rest
        if here() and not callbacks:
            return _compiled.get(key), 0
        return read(name, key, *rest)

    compilation_cache._keep = keep_here  # pyrefly: ignore[bad-assignment]  (with fewer names)
    compiler._cache_read = read_here  # pyrefly: ignore[bad-assignment]  (same)
    compilation_cache.use_compilation_cache()


def forget_compiled() -> None:
    """Free the programs that are kept in memory before they are too many for one process.

    The kernel lets a process map 65,530 regions; XLA:CPU maps a few for each program, and crashes beyond.
    Counting 50,000 takes as long as compiling two small programs, so it happens after every 64 programs.
    Freeing them takes half a minute, and the next tests compile again what they share.
    """
    if len(_requested) < 64 or not _MAPS.exists():
        return
    _requested.clear()
    if _MAPS.read_bytes().count(b"\n") > 56_000:
        _forget()


def _forget() -> None:
    import jax

    _compiled.clear()
    jax.clear_caches()
    gc.collect()


def share_optimizers() -> None:
    """Let optax give one object for the same arguments, so that zerojax checks it once with each model."""
    import optax  # not before the environment is prepared

    def shared(make: Callable[..., Any]) -> Callable[..., Any]:
        once = functools.cache(make)

        @functools.wraps(make)
        def get(*args: Any, **kwargs: Any) -> Any:
            try:
                return once(*args, **kwargs)
            except TypeError:  # an argument has no hash
                return make(*args, **kwargs)

        return get

    for name in ("adam", "adamw", "chain", "clip_by_global_norm", "identity", "sgd"):
        setattr(optax, name, shared(getattr(optax, name)))


def for_programs() -> dict[str, str]:
    """The variables of a program that emulates its devices itself, as one that a person starts does."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if flag.startswith(tuple(_QUICK))]
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


def zerojax(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, as a person does."""
    command = [sys.executable, "-m", "zerojax", *map(str, arguments)]
    return subprocess.run(command, env=for_programs(), capture_output=True, text=True, timeout=500)
