"""What the compiler and NCCL are told, by the mesh."""

import os

import jax
import optax
import pytest
from core_models import CASES

import zerojax
from zerojax import aot
from zerojax.comm.xla_options import (
    CPU_OPTIONS,
    GPU_OPTIONS,
    ONE_PROCESS_OPTIONS,
    SEPARATE_PRODUCTS,
    compiler_options,
)
from zerojax.sharding.strategy import ShardingStrategy

VARIABLE = "NCCL_COMM_SPLIT_SHARE_RESOURCES"


def test_cpus_are_told_to_run_one_operation_after_another():
    assert compiler_options(zerojax.make_mesh(2, 2)) == CPU_OPTIONS


def test_gpus_of_one_process_are_told_to_use_copy_engines_besides(cuda_mesh):
    assert compiler_options(cuda_mesh(1, 4)) == GPU_OPTIONS | ONE_PROCESS_OPTIONS
    assert compiler_options(cuda_mesh(2, 4)) == GPU_OPTIONS
    assert compiler_options(cuda_mesh(2, 4), separate_products=True) == GPU_OPTIONS | SEPARATE_PRODUCTS


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
    ("preset", "fields", "own_stream"),
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
def test_where_hops_between_nodes_have_a_stream_of_their_own(preset, fields, own_stream):
    assert ShardingStrategy.of(zerojax.ZeroConfig.preset(preset, **fields)).own_stream is own_stream


@pytest.mark.timeout(120)
@pytest.mark.parametrize("local", [2, 4])
def test_emulated_devices_do_not_wait_for_each_other_forever(local):
    """Stage 1 gathers a stack in a loop, the rest beside it, and sums tokens at any time: it hung at once."""
    case = CASES["gpt-tied"]
    state = case.create(optax.sgd(0.1), nodes=4 // local, local=local, stage=1, compute_dtype="float32")
    (batch,) = case.batches(8, 1)
    for _ in range(8):
        state, _ = jax.block_until_ready(zerojax.train_step(state, batch))
