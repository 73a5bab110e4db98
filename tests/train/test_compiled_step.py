"""The real training step, compiled for CUDA clusters without a GPU: what it sends, and in what formats."""

import hlo
import jax
import jax.numpy as jnp
import optax
import pytest
from cuda_clusters import check_traffic
from flax import nnx

import zerojax
from zerojax import aot

WIDTH, LAYERS = 256, 8


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(128, WIDTH, rngs=rngs)
        self.blocks = zerojax.Stack(Block, LAYERS, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 128, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss_fn(model, batch):
    logits = model(batch["tokens"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@pytest.mark.parametrize(
    ("preset", "nodes", "local", "dtypes"),
    [
        pytest.param("zero3", 2, 4, {"bf16"}, marks=pytest.mark.slow),
        # Run by test_kernels_in_step.py every time, with the Triton kernels in it.
        pytest.param("zero++-paper", 2, 4, {"u8"}, marks=pytest.mark.slow),
        pytest.param("zero++", 2, 4, {"u8"}, marks=pytest.mark.slow),
        pytest.param("delta", 2, 4, {"u8"}, marks=pytest.mark.slow),
        pytest.param("delta", 64, 8, {"u8"}, marks=pytest.mark.slow),
    ],
)
def test_the_compiled_step_sends_what_the_traced_one_says(cuda_mesh, preset, nodes, local, dtypes):
    """Two counts that share no code agree: of the jaxpr, and of the text of the compiled program."""
    cuda_mesh(nodes, local)  # skips without a compiler
    mesh = zerojax.make_mesh(nodes, local, devices=aot.topology(nodes, local, "h100"))
    zero = zerojax.ZeroConfig.preset(preset)
    state = zerojax.TrainState.abstract(Model, optax.adamw(1e-3), loss_fn, mesh=mesh, zero=zero)
    row = jax.ShapeDtypeStruct((nodes * local, 128), jnp.int32)
    batch = {"tokens": row, "targets": row}
    compiled = zerojax.lower_train_step(state, batch).compile(dict(aot.COMPILER_OPTIONS))
    report = check_traffic(state, batch, compiled, dtypes, own_streams=preset != "zero3")
    memory = hlo.memory(compiled)
    master = 3 * 4 * report.parameters / mesh.size  # fp32 weights and Adam's two moments
    assert memory.arguments >= master
    assert memory.aliased >= master, "the state is donated"
