"""Programs compiled for CUDA clusters on this CPU, and how a test asks for one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import aot
from zerojax.models import GPT, GPTConfig, lm_loss

EVERYWHERE = P(("node", "local"))
Compile = Callable[..., jax.stages.Compiled]


def compiled_gpt(
    config: GPTConfig, zero: zerojax.ZeroConfig, nodes: int, local: int
) -> tuple[zerojax.TrainState, jax.stages.Compiled]:
    """A model's step with AdamW on H100s, a sequence of full length each; skips without a compiler."""
    try:
        devices = aot.topology(nodes, local, gpu="h100")
    except aot.CompilerMissingError as error:
        pytest.skip(str(error))
    state = zerojax.TrainState.abstract(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        lm_loss,
        mesh=zerojax.make_mesh(nodes, local, devices=devices),
        zero=zero,
    )
    batch = {"tokens": jax.ShapeDtypeStruct((nodes * local, config.max_seq_len + 1), np.int32)}
    return state, zerojax.lower_train_step(state, batch).compile(dict(aot.COMPILER_OPTIONS))


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
