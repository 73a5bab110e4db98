"""How much page-locked memory a process may have."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest

from zerojax.errors import ConfigurationError
from zerojax.multihost import distributed
from zerojax.sharding import host_memory
from zerojax.sharding.host_memory import (
    LIMIT,
    free_host_memory,
    host_limit,
    limit_variable,
    locked_bytes,
    memory_limits,
    pool_bytes,
    shortage,
)

GIB = 1 << 30


def test_xlas_limit_is_64_gib_or_what_the_variable_says(monkeypatch):
    monkeypatch.delenv(LIMIT, raising=False)
    assert host_limit() == 64 * GIB
    monkeypatch.setenv(LIMIT, "100")
    assert host_limit() == 100 * GIB
    monkeypatch.setenv(LIMIT, "100GB")
    with pytest.raises(ConfigurationError, match="whole number of GiB, such as 96"):
        host_limit()


def test_each_gpu_gets_its_share_of_what_is_free_unless_the_user_has_set_a_limit(monkeypatch):
    monkeypatch.delenv(LIMIT, raising=False)
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 200 * GIB)
    assert limit_variable(1) == {LIMIT: "170"}
    assert limit_variable(4) == {LIMIT: "42"}
    monkeypatch.setenv(LIMIT, "8")
    assert limit_variable(1) == {}


def test_the_pool_is_larger_than_what_is_in_it():
    assert pool_bytes(80 * GIB) == 88 * GIB
    assert pool_bytes(GIB) == 2 * GIB


def test_xla_locks_pieces_that_double_up_to_its_limit(monkeypatch):
    monkeypatch.setenv(LIMIT, "100")
    assert locked_bytes(41 * GIB) == 64 * GIB
    assert locked_bytes(62 * GIB) == 100 * GIB
    monkeypatch.setenv(LIMIT, "50")
    assert locked_bytes(41 * GIB) == 50 * GIB
    monkeypatch.setenv(LIMIT, "40")
    assert locked_bytes(41 * GIB) == 46 * GIB, "the limit is too low for them"


def test_processes_share_the_limits_that_they_name_alike():
    """Two containers of one host, and a process of another host."""
    first, second = {"host": 100, "host a": 60}, {"host": 90, "host b": 40}
    other = {"other": 30}
    assert shortage([(50, first), (40, second), (30, other)]) is None
    assert shortage([(51, first), (40, second), (30, other)]) == (2, 91, 90)
    assert shortage([(20, first), (41, second), (30, other)]) == (1, 41, 40)
    assert shortage([(50, first), (40, second), (35, other)]) == (1, 35, 30)
    assert shortage([(20, first), (30, first), (30, other)]) is None
    assert shortage([(31, first), (30, first), (0, other)]) == (2, 61, 60)
    assert shortage([(1, {"host": -5})]) == (1, 1, 0), "a group may be above its limit for a moment"


def test_processes_of_a_host_name_its_memory_alike():
    ask = "from zerojax.sharding.host_memory import memory_limits; print(*memory_limits(), sep='\\n')"
    there = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert there.stdout.splitlines() == list(memory_limits())


def test_a_process_joins_a_job_with_its_limit_where_there_are_gpus(monkeypatch):
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="0,1"):
        os.environ.pop(LIMIT, None)
        monkeypatch.setattr(distributed, "limit_variable", lambda gpus: {LIMIT: f"{12 / gpus:g}"})
        with distributed.joined():
            assert os.environ[LIMIT] == "6"
        os.environ.pop(LIMIT)
        with distributed.joined(devices=1):
            assert os.environ[LIMIT] == "12"
        os.environ.pop(LIMIT)
        # Four processes of a scheduler's job, each with a GPU of its own.
        monkeypatch.setattr(distributed, "_tasks_of_a_scheduler", lambda: 4)
        monkeypatch.setattr(distributed, "_detected", lambda: ("localhost:1", 0, 1, [0]))
        with distributed.joined():
            assert os.environ[LIMIT] == "3"
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        os.environ.pop(LIMIT, None)
        with distributed.joined():
            assert LIMIT not in os.environ


def group(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def test_a_container_may_have_less_than_its_host(tmp_path):
    """Both versions of control groups; limits of outer ones hold, and a cache of files does not count."""
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("0::/outer/inner\n")
    group(root / "outer/inner", memory_max=9000, memory_current=5000, memory_stat="anon 1\ninactive_file 300")
    group(root / "outer", memory_max=7000, memory_current=6000, memory_stat="anon 1\ninactive_file 400")
    group(root, memory_max="max", memory_current=6000, memory_stat="anon 1")
    assert list(host_memory._left_in_cgroups(own, root)) == [
        (f"memory.max {(root / name).stat().st_ino}", left)
        for name, left in (("outer/inner", 4300), ("outer", 1400))
    ]

    # In a container without a namespace of its own the folder has the host's name, which is not there.
    own.write_text("12:cpu,cpuacct:/docker/1\n5:memory:/docker/1\n")
    (root / "memory").mkdir()
    for name, text in {
        "limit_in_bytes": "5000",
        "usage_in_bytes": "4000",
        "stat": "cache 1\ntotal_inactive_file 50",
    }.items():
        (root / f"memory/memory.{name}").write_text(text)
    assert [left for _, left in host_memory._left_in_cgroups(own, root)] == [1050]
    assert list(host_memory._left_in_cgroups(tmp_path / "none", root)) == []


def test_what_is_free_here_is_no_more_than_the_kernel_says():
    assert 0 < free_host_memory() <= psutil.virtual_memory().total
