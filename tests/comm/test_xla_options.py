"""What the compiler and NCCL are told, by the mesh."""

import os

import pytest

import zerojax
from zerojax import aot
from zerojax.comm.xla_options import (
    GPU_OPTIONS,
    HOST_MEMORY,
    KEPT_PRODUCTS,
    ONE_PROCESS_OPTIONS,
    SEPARATE_PRODUCTS,
    UPDATES_IN_BACKWARD,
    compiler_options,
)
from zerojax.sharding.strategy import ShardingStrategy

VARIABLE = "NCCL_COMM_SPLIT_SHARE_RESOURCES"


def test_cpus_are_told_nothing():
    assert compiler_options(zerojax.make_mesh(2, 2)) == {}


def test_gpus_of_one_process_are_told_to_use_copy_engines_besides(cuda_mesh):
    assert compiler_options(cuda_mesh(1, 4)) == GPU_OPTIONS | ONE_PROCESS_OPTIONS
    assert compiler_options(cuda_mesh(2, 4)) == GPU_OPTIONS
    assert compiler_options(cuda_mesh(2, 4), separate_products=True) == GPU_OPTIONS | SEPARATE_PRODUCTS
    assert compiler_options(cuda_mesh(2, 4), kept_products=True) == GPU_OPTIONS | KEPT_PRODUCTS
    assert compiler_options(cuda_mesh(2, 4), host_memory=True) == GPU_OPTIONS | HOST_MEMORY
    assert compiler_options(cuda_mesh(2, 4), updates_in_backward=True) == GPU_OPTIONS | UPDATES_IN_BACKWARD


def test_what_is_compiled_without_a_gpu_runs_but_for_tuning():
    other = {name for name, value in aot.COMPILER_OPTIONS.items() if GPU_OPTIONS.get(name) != value}
    assert other == {"xla_gpu_autotune_level"}


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_communicators_are_kept_apart_unless_somebody_said_otherwise(cuda_mesh, monkeypatch, before, after):
    cuda_mesh(2, 4)  # skips without a compiler
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE) if before is None else monkeypatch.setenv(VARIABLE, before)
    zerojax.make_mesh(1, 4, devices=aot.topology(1, 4))
    assert os.environ.get(VARIABLE) == before
    zerojax.make_mesh(2, 4, devices=aot.topology(2, 4))
    assert os.environ[VARIABLE] == after


@pytest.mark.parametrize(
    ("preset", "fields", "separate_stream"),
    [
        ("zero3", {}, False),  # backward, weights and gradients cross nodes
        ("zero3", {"hpz": True}, False),  # gradients would be joined at full size
        ("zero++", {}, True),
        ("zero++", {"chunks": 2}, False),
        ("delta", {}, True),
        ("delta", {"accumulate": 8}, False),  # nothing crosses nodes while a micro-batch is computed
        ("delta", {"accumulate": 8, "grad_sync": "micro"}, True),
        ("delta", {"accumulate": 8, "accumulate_order": "breadth"}, True),
    ],
)
def test_where_hops_between_nodes_have_a_stream_of_their_own(preset, fields, separate_stream):
    assert ShardingStrategy.of(zerojax.ZeroConfig.preset(preset, **fields)).separate_stream is separate_stream
