"""Steps compiled for H100s: every product of a listed weight is in fp8, and no such weight is decoded."""

import math

import jax
import numpy as np
import optax
import pytest
from core_models import squared_error
from cuda_clusters import compiled_gpt
from flax import nnx
from hlo.text import Array, Instruction, Program, parse, walk

import zerojax
from pallas_kernels.backends import cuda_kernels
from zerojax import aot
from zerojax.analysis.plan import plan_state
from zerojax.models import GPTConfig

F8 = "__cublas$lt$matmul$f8"
NO_DECODING = ("custom-call", "get-tuple-element", "tuple", "while", "conditional")
# Gate and up read the same activations: small as they are, XLA would merge their products.
CONFIG = GPTConfig(
    vocab_size=64, layers=5, d_model=192, heads=3, max_seq_len=128, attention="xla", mlp="swiglu"
)


def target(instruction: Instruction) -> str:
    return instruction.attribute(r'custom_call_target="([^"]+)"') or ""


def without_ones(array: Array) -> tuple[int, ...]:
    return tuple(sorted(size for size in array.dims if size > 1))


def products_in_fp8(program: Program, kernels: set[tuple[int, ...]]) -> int:
    """How many products a step makes in fp8; that no other has one of the kernels is checked on the way."""
    count = 0
    for visit in walk(program):
        if target(visit.instruction) == F8:
            assert visit.count is not None
            count += visit.count
        elif visit.instruction.opcode == "dot" or "matmul" in target(visit.instruction):
            sources = [visit.computation.by_name[name] for name in visit.instruction.operands]
            shapes = [array for each in (visit.instruction, *sources) for array in each.arrays]
            assert not kernels & {without_ones(array) for array in shapes}, visit.instruction
    return count


@pytest.mark.parametrize(
    "settings",
    [
        # Run by test_kernels_in_step.py as well, with the Triton kernels in it; the test below is without.
        pytest.param({"name": "zero3", "remat": "none"}, marks=pytest.mark.slow),
        pytest.param({"name": "zero++"}, marks=pytest.mark.slow),
        pytest.param({"name": "delta", "rotation": 0, "rounding": "nearest"}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: settings["name"],
)
def test_products_are_in_fp8_and_weights_are_not_decoded(settings):
    zero = zerojax.ZeroConfig.preset(**settings, matmul_dtype="fp8")
    state, compiled = compiled_gpt(CONFIG, zero, nodes=2, local=2)
    plan = plan_state(state).fp8
    assert plan is not None
    kernels = {tuple(sorted(row.shape)) for row in plan.chosen}
    assert kernels == {(192, 192), (192, 512), (192, 576)}
    program = parse(compiled.as_text() or "")
    # Forward, and both gradients. Of a layer that is recomputed, the last product is not needed again. With
    # JAX 0.12 one layer is not recomputed.
    again = {0} if settings.get("remat") == "none" else {4 * CONFIG.layers, 4 * (CONFIG.layers - 1)}
    assert products_in_fp8(program, kernels) - 3 * plan.weights in again
    casts = sum(
        visit.count or 0 for visit in walk(program) if target(visit.instruction) == "triton_kernel_call"
    )
    if settings["name"] == "zero3":  # the others encode by kernels, too
        assert casts == (plan.weights if cuda_kernels("cast_transpose") else 0)

    sizes, gathered = {math.prod(shape) for shape in kernels}, set[int]()
    for computation in program.computations.values():
        for instruction in computation.instructions:
            wide = {a.elements for a in instruction.arrays if a.dtype in ("bf16", "f32")}
            sources = [computation.by_name[name] for name in instruction.operands]
            codes = {a.elements for each in sources for a in each.arrays if a.bits == 8 and a.dtype != "pred"}
            gathered |= sizes & codes
            assert not wide & codes & sizes or instruction.opcode in NO_DECODING, instruction
    assert gathered == sizes


@pytest.mark.slow
def test_wide_products_are_in_fp8():
    """Where XLA may swap transposes with the casts of operands that no kernel has made."""
    wide = GPTConfig(
        vocab_size=64, layers=3, d_model=2048, heads=16, max_seq_len=2048, attention="xla", biases=False
    )
    zero = zerojax.ZeroConfig.preset("zero3", remat="none", matmul_dtype="fp8")
    state, compiled = compiled_gpt(wide, zero, nodes=1, local=1)
    plan = plan_state(state).fp8
    assert plan is not None
    kernels = {tuple(sorted(row.shape)) for row in plan.chosen}
    # Other products of 2048 x 2048 are activations' alone: as long as they are wide.
    assert products_in_fp8(parse(compiled.as_text() or ""), kernels - {(2048, 2048)}) == 3 * plan.weights


class Feedforward(nnx.Module):
    """A block without attention or norm, so that the cotangent of its last product is that of the block."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, 64, rngs=rngs)
        self.down = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


@pytest.mark.slow
def test_a_stack_compiles_whose_cotangent_comes_straight_from_the_loop(cuda_mesh):
    """XLA's double buffering once failed on the barrier before its cast, from six layers on."""
    state = zerojax.TrainState.abstract(
        lambda rngs: zerojax.Stack(Feedforward, 6, rngs=rngs),
        optax.sgd(1e-3),
        squared_error,
        mesh=cuda_mesh(2, 4),
        zero=zerojax.ZeroConfig(matmul_dtype="fp8"),
    )
    batch = {
        "x": jax.ShapeDtypeStruct((64, 64), np.float32),
        "y": jax.ShapeDtypeStruct((64,), np.float32),
    }
    zerojax.lower_train_step(state, batch).compile(dict(aot.COMPILER_OPTIONS))
