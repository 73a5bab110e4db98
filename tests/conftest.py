"""Emulated devices for every test, set before JAX starts.

Tests run on twelve CPU devices (enough for a 4 x 3 mesh) unless ``JAX_PLATFORMS`` asks for another platform
as well (CONTRIBUTING.md).
"""

import atexit
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from durations import Meter, Reporter
from environment import (
    check_platforms,
    forget_compiled,
    partition_quickly,
    prepare,
    share_compiled,
    share_optimizers,
)

gc.set_threshold(50_000, 20)  # tracing makes many objects and few cycles
prepare()
# The longest tests come first, so that no process computes one when the others have ended.
_FIRST = ("test_notebooks", "test_interpreted", "test_kernels_in_step", "test_comm_report_on_links")
_PLUGINS = ("cuda_clusters", "finished_runs", "imported_runs", "joined_peers")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run report what its tests cost."""
    parser.addoption("--cost", metavar="FILE", help="print what tests cost; write it as JSON, or - for none")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse platforms on which no test can run; measure each test, and report where the terminal is."""
    check_platforms()
    file = config.getoption("cost")
    if not config.getoption("numprocesses", None):  # else others run the tests, and this one imports nothing
        share_optimizers()
        partition_quickly()
        for plugin in _PLUGINS:
            config.pluginmanager.import_plugin(plugin)
        if file:
            config.pluginmanager.register(Meter())
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporter(file))
    if hasattr(config, "workerinput"):
        # Before JAX clears its caches object by object, which takes ten seconds.
        atexit.register(os._exit, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests."""
    items.sort(key=lambda item: item.path.stem not in _FIRST)


def pytest_collection_finish() -> None:
    """What was imported for the tests stays: collections need not look through it."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What is left at the end goes with the process, without seconds of looking for what is garbage."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile each program once; pytest removes the folder, unless JAX_COMPILATION_CACHE_DIR names it."""
    told = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    # One folder for each worker: JAX writes its entries in place, where another process may read half of one.
    share_compiled(Path(told) if told else tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of thirty documents."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "all work and no play " * (i + 20))
    return folder


@pytest.fixture(autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Free what earlier tests compiled before it is too much for one process."""
    yield
    forget_compiled()
