"""Programs compiled for CUDA clusters on this CPU, and how a test asks for one."""

import re
from collections.abc import Callable
from typing import Any

import hlo
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import aot
from zerojax.analysis.comm_report import CommReport, comm_report
from zerojax.models import GPT, GPTConfig, lm_loss

EVERYWHERE = P(("node", "local"))
Compile = Callable[..., jax.stages.Compiled]
_ADAMW = optax.adamw(1e-3)


def compiled_gpt(
    config: GPTConfig,
    zero: zerojax.ZeroConfig,
    nodes: int,
    local: int,
    lora: zerojax.LoRA | None = None,
    tx: Any = _ADAMW,
    rows: int = 1,
) -> tuple[zerojax.TrainState, jax.stages.Compiled]:
    """A model's step on H100s, ``rows`` sequences of full length each; skips without a compiler."""
    try:
        devices = aot.topology(nodes, local, gpu="h100")
    except aot.CompilerMissingError as error:
        pytest.skip(str(error))
    state = zerojax.TrainState.abstract(
        lambda rngs: GPT(config, rngs=rngs),
        tx,
        lm_loss,
        mesh=zerojax.make_mesh(nodes, local, devices=devices),
        zero=zero,
        lora=lora,
    )
    lowered = zerojax.lower_train_step(state, gpt_batch(config, nodes * local * rows))
    return state, lowered.compile(dict(aot.COMPILER_OPTIONS))


def gpt_batch(config: GPTConfig, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Sequences of full length."""
    return {"tokens": jax.ShapeDtypeStruct((rows, config.max_seq_len + 1), np.int32)}


def check_traffic(
    state: zerojax.TrainState,
    batch: Any,
    compiled: jax.stages.Compiled,
    dtypes: set[str],
    *,
    own_streams: bool,
) -> CommReport:
    """Two counts that share no code agree: of the jaxpr, and of the text of the compiled program.

    Args:
        state: the step's.
        batch: the step's.
        compiled: the step.
        dtypes: of all that crosses nodes, by XLA's names.
        own_streams: whether hops between nodes have streams of their own, where each pass has one of them.

    Returns:
        The count of the jaxpr.
    """
    local, text = state.spec.mesh.shape["local"], compiled.as_text()
    assert text is not None
    collectives, report = hlo.collectives(text), comm_report(state, batch)
    # XLA adds sums of norms on its own, a few bytes a leaf.
    sent = [sum(c.sent(local)[i] for c in collectives) for i in (0, 1)]
    assert sent == pytest.approx([report.local_bytes, report.node_bytes], rel=1e-3, abs=256)
    crossing = [c for c in collectives if c.crosses_nodes(local)]
    scalars = [c for c in crossing if c.op == "all-reduce" and c.elements < 32]  # loss, counts, norms
    values = [c for c in crossing if c not in scalars]
    assert {c.dtype for c in values} == dtypes
    assert len(values) >= 2, "weights and gradients"
    apart = set(re.findall(r"%([\w.-]+) = [^\n]*SCALE_UP_FABRIC", text))
    looped = {c.name: c.crosses_nodes(local) for c in collectives if c.count > 1}
    assert set(looped.values()) == {True, False}
    assert {name for name in looped if name in apart} == {
        name for name, crosses in looped.items() if crosses and own_streams
    }
    return report


@pytest.fixture(scope="session")
def cuda_mesh() -> Callable[[int, int], Mesh]:
    """(nodes, local) -> a mesh of described H100s; skips where the compiler is not installed."""

    def make(nodes: int, local: int) -> Mesh:
        try:
            devices = aot.topology(nodes, local, gpu="h100")
        except aot.CompilerMissingError as error:
            pytest.skip(str(error))
        grid = np.array(devices).reshape(nodes, local)
        return Mesh(grid, ("node", "local"), axis_types=(AxisType.Auto,) * 2)

    return make


@pytest.fixture(scope="session")
def compile_spmd(cuda_mesh: Callable[[int, int], Mesh]) -> Compile:
    """Compile a shard_map program whose arguments are all sharded over every device."""

    def compile_(
        function: Callable[..., Any],
        *shapes: tuple[tuple[int, ...], Any],
        nodes: int,
        local: int,
        **options: bool | int | str,
    ) -> jax.stages.Compiled:
        mesh = cuda_mesh(nodes, local)
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=EVERYWHERE, out_specs=EVERYWHERE, check_vma=False
        )
        sharding = NamedSharding(mesh, EVERYWHERE)
        arguments = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in shapes]
        return jax.jit(mapped).lower(*arguments).compile({**aot.COMPILER_OPTIONS, **options})

    return compile_
