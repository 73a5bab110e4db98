"""How much page-locked memory a process may have."""

import os
from pathlib import Path
from unittest import mock

import psutil
import pytest

from zerojax.errors import ConfigurationError
from zerojax.multihost import distributed
from zerojax.sharding import host_memory
from zerojax.sharding.host_memory import LIMIT, free_host_memory, host_limit, limit_variable, pool_bytes

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
    assert sorted(host_memory._left_in_cgroups(own, root)) == [1400, 4300]

    # In a container without a namespace of its own the folder has the host's name, which is not there.
    own.write_text("12:cpu,cpuacct:/docker/1\n5:memory:/docker/1\n")
    (root / "memory").mkdir()
    for name, text in {
        "limit_in_bytes": "5000",
        "usage_in_bytes": "4000",
        "stat": "cache 1\ntotal_inactive_file 50",
    }.items():
        (root / f"memory/memory.{name}").write_text(text)
    assert list(host_memory._left_in_cgroups(own, root)) == [1050]
    assert list(host_memory._left_in_cgroups(tmp_path / "none", root)) == []


def test_what_is_free_here_is_no_more_than_the_kernel_says():
    assert 0 < free_host_memory() <= psutil.virtual_memory().total
