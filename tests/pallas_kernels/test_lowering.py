"""Every kernel lowers for CUDA on a machine without a GPU, for a given chip.

scripts/test.sh runs these in a process of their own, whose JAX has the CUDA compiler.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from environment import ROOT
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels as pk

N, BLOCK = 2048, 256
CALL = "triton_kernel_call"


def _can_lower() -> bool:
    if importlib.util.find_spec("jax_triton") is None:
        return False
    from jax._src.lib import gpu_triton

    return hasattr(gpu_triton, "TritonKernel")


needs_triton = pytest.mark.skipif(
    not _can_lower(), reason="needs jax-triton and a JAX CUDA plugin (no GPU), which are not installed"
)


def lowered(call, *shapes, kind="NVIDIA H100") -> str:
    """The CUDA program of call, with a described GPU and no real one."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("d",), abstract_device=device)
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def rows(fmt, count, n=N):
    return (count, pk.nbytes(fmt, n, BLOCK)), jnp.uint8


SEED = ((), jnp.uint32)
CALLS = {
    "encode": lambda f: (
        lambda x, s: pk.encode(x, f, block=BLOCK, rounding="stochastic", seed=s),
        ((2, N), jnp.bfloat16),
        SEED,
    ),
    "encode nearest": lambda f: (lambda x: pk.encode(x, f, block=BLOCK), ((2, N), jnp.bfloat16)),
    "encode rotated": lambda f: (
        lambda x: pk.encode(x, f, block=BLOCK, rotation=32),
        ((2, N), jnp.float32),
    ),
    "encode_delta": lambda f: (
        lambda w, b: pk.encode_delta(w, b, f, block=BLOCK),
        ((2, N), jnp.float32),
        ((2, N), jnp.bfloat16),
    ),
    "encode_reordered": lambda f: (
        lambda g: pk.encode_reordered(g, f, local=2, nodes=2, chunks=2, block=BLOCK),
        ((8 * N,), jnp.bfloat16),
    ),
    "decode": lambda f: (lambda p: pk.decode(p, f, N, block=BLOCK), rows(f, 2)),
    "decode_add": lambda f: (
        lambda p, b: pk.decode_add(p, b, f, block=BLOCK),
        rows(f, 2),
        ((2, N), jnp.bfloat16),
    ),
    "decode_sum": lambda f: (
        lambda p: pk.decode_sum(p, f, N, block=BLOCK, rotation=32, scale=0.25),
        rows(f, 4),
    ),
    "decode_sum_encode": lambda f: (
        lambda p: pk.decode_sum_encode(p, f, "int4", 2, N // 2, block=BLOCK),
        rows(f, 4),
    ),
}


# Every kernel in int4; the other formats are slow.
GRID = [
    pytest.param(name, fmt, marks=() if fmt == "int4" else pytest.mark.slow)
    for name in CALLS
    for fmt in pk.QUANTIZED
]


@needs_triton
@pytest.mark.parametrize(("name", "fmt"), GRID)
def test_kernel_lowers_without_a_gpu(name, fmt):
    call, *shapes = CALLS[name](fmt)
    pallas = name in ("encode nearest", "encode_reordered") and fmt in ("int8", "int4", "fp8")
    assert lowered(call, *shapes).count("mosaic_gpu" if pallas else CALL) >= 1


@needs_triton
def test_rows_of_all_lengths_share_a_triton_kernel():
    """A kernel takes tenths of a second to compile, and a model has leaves of many sizes."""
    compiled = importlib.import_module("jax_triton.triton_lib")._COMPILED_KERNEL_CACHE
    before = len(compiled)

    def call(seed, *rows):
        return [pk.encode(x, "int4", block=64, rounding="stochastic", seed=seed) for x in rows]

    lengths = (64 * 16 * 128, 64 * 16 * 256, 64 * 16 * 1024)
    program = lowered(call, SEED, *(((1, n), jnp.bfloat16) for n in lengths))
    assert program.count(f"@{CALL}") == len(lengths)
    assert len(compiled) == before + 1


@needs_triton
def test_mosaic_asks_for_the_version_of_ptxas_once(monkeypatch):
    """Each conversion of booleans would start ptxas: half of the time to lower a kernel."""
    importlib.import_module("pallas_kernels.mosaic")
    library = importlib.import_module("jax.experimental.mosaic.gpu.fragmented_array").mgpu_lib
    ask = library._mosaic_gpu_ext._get_ptxas_isa_version
    ask()
    asked = ask.cache_info().misses
    call, *shapes = CALLS["encode nearest"]("int4")
    lowered(call, *shapes)
    assert ask.cache_info().misses == asked == 1


PROGRAM = """
import hashlib, sys
import jax, jax.numpy as jnp
import pallas_kernels as pk
from jax.sharding import AbstractDevice, AbstractMesh

def call(x, w, sizes):
    return pk.encode(pk.grouped_rows(x, w, sizes), "int4", block=64, rotation=32)

shapes = ((256, 128), jnp.bfloat16), ((2, 128, 192), jnp.bfloat16), ((2,), jnp.int32)
device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("d",), abstract_device=device)):
    traced = jax.jit(call).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
assert "mosaic_gpu" in text and "triton_kernel_call" in text
print(hashlib.sha256(text.encode()).hexdigest())
"""


@needs_triton
def test_kernels_are_the_same_in_every_process(tmp_path):
    """Otherwise a program with kernels would never be found in the compilation cache."""

    def digest(seed: str) -> str:
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"}
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    assert digest("1") == digest("2") != ""


@needs_triton
@pytest.mark.parametrize(
    "kind", ["NVIDIA A100", "NVIDIA H100", pytest.param("NVIDIA B200", marks=pytest.mark.slow)]
)
def test_decoding_of_nf4_lowers_without_a_gpu(kind):
    payload = (2, pk.nf4_bytes(N, BLOCK)), jnp.uint8
    assert CALL in lowered(lambda p: pk.decode_nf4(p, N, block=BLOCK), payload, kind=kind)


@needs_triton
@pytest.mark.parametrize(("rows", "dtype"), [(64, jnp.bfloat16), (1, jnp.bfloat16), (64, jnp.float32)])
def test_attention_in_bf16_lowers_without_a_gpu(rows, dtype):
    def call(query, keys, values, start, stop):
        return pk.attend_cache(query, keys, values, 1, start, stop, scale=0.1, softcap=30.0)

    cache, counts = ((2, rows, 4, 600, 96), dtype), ((rows,), jnp.int32)
    program = lowered(call, ((rows, 8, 96), dtype), cache, cache, counts, counts)
    assert (CALL in program) == (dtype == jnp.bfloat16)


@needs_triton
@pytest.mark.parametrize(
    ("kind", "shape", "kernel"),
    [
        ("NVIDIA H100", (144, 272), True),
        ("NVIDIA B200", (144, 272), True),
        ("NVIDIA A100", (144, 272), False),
        ("NVIDIA H100", (143, 272), False),
    ],
)
def test_casts_lower_where_chip_and_shape_allow(kind, shape, kernel):
    def call(x, scale):
        return pk.cast_transpose(x, scale, jnp.float8_e5m2)

    program = lowered(call, (shape, jnp.bfloat16), ((), jnp.float32), kind=kind)
    assert (CALL in program) == kernel


@needs_triton
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("encode rotated", "NVIDIA A100"),
        ("decode_sum_encode", "NVIDIA B200"),
        pytest.param("encode rotated", "NVIDIA B200", marks=pytest.mark.slow),
        pytest.param("decode_sum_encode", "NVIDIA A100", marks=pytest.mark.slow),
        pytest.param("decode", "NVIDIA A100", marks=pytest.mark.slow),
        pytest.param("decode", "NVIDIA B200", marks=pytest.mark.slow),
    ],
)
def test_kernel_lowers_for_other_chips(name, kind):
    call, *shapes = CALLS[name]("int4")
    assert CALL in lowered(call, *shapes, kind=kind)


@needs_triton
def test_fp8_is_left_to_xla_before_ada():
    call, *shapes = CALLS["decode"]("fp8")
    assert CALL not in lowered(call, *shapes, kind="NVIDIA A100")


def recorded(compiled, compile_kernel):
    """The function that compiles a kernel, which also appends its PTX, chip and bytes of shared memory."""

    def compile_and_record(ttir, backend, options, chip):
        result = compile_kernel(ttir, backend, options, chip)
        compiled.append((result.binary, chip, result.shared_mem_bytes))
        return result

    return compile_and_record


def assemble(ptx: str, folder: Path) -> None:
    """Turn PTX into machine code by the assembler that comes with Triton."""
    import triton.backends.nvidia as nvidia

    target = re.search(r"^\.target (sm_(\d+)a?)", ptx, re.MULTILINE)
    assert target is not None
    name = "ptxas-blackwell" if int(target[2]) >= 100 else "ptxas"
    (folder / "kernel.ptx").write_text(ptx)
    assembler = [Path(nvidia.__path__[0]) / "bin" / name, "-O0", f"--gpu-name={target[1]}"]
    subprocess.run([*assembler, folder / "kernel.ptx", "-o", folder / "kernel.cubin"], check=True)


CHIPS = ("NVIDIA A100", "NVIDIA A10", "NVIDIA L40S", "NVIDIA H100", "NVIDIA B200", "NVIDIA GeForce RTX 5090")
GROUPED = {
    "rows": lambda x, w, g, sizes: pk.grouped_rows(x, w, sizes),
    "rows transposed": lambda x, w, g, sizes: pk.grouped_rows(g, w, sizes, transposed=True),
    "sums": lambda x, w, g, sizes: pk.grouped_sums(x, g, sizes),
}


@needs_triton
@pytest.mark.parametrize(
    ("kind", "side", "pallas"),
    [("NVIDIA H100", 192, True), ("NVIDIA H100", 100, False), ("NVIDIA A100", 192, False)],
)
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_matmuls_are_by_pallas_where_it_can(kind, side, pallas, name):
    shapes = ((640, side), jnp.bfloat16), ((2, side, 256), jnp.bfloat16), ((640, 256), jnp.bfloat16)
    program = lowered(GROUPED[name], *shapes, ((2,), jnp.int32), kind=kind)
    assert ("mosaic_gpu" in program) == pallas
    assert (CALL in program) != pallas


@needs_triton
@pytest.mark.parametrize(
    ("kind", "side", "pallas"), [("NVIDIA H100", 128, True), ("NVIDIA A100", 128, False)]
)
def test_gradients_of_matrices_in_fp8_are_by_pallas_where_it_can(kind, side, pallas):
    def call(x, g, sizes, scale):
        rows = pk.grouped_columns(x, sizes), pk.grouped_columns(g, sizes)
        return pk.grouped_sums_fp8(*rows, sizes, scale, dtype=jnp.bfloat16)

    shapes = ((640, side), jnp.float8_e4m3fn), ((640, 384), jnp.float8_e5m2), ((2,), jnp.int32)
    program = lowered(call, *shapes, ((), jnp.float32), kind=kind)
    assert ("mosaic_gpu" in program) == pallas
    assert program.count(f"@{CALL}") == (2 if pallas else 3)


@needs_triton
def test_a_mixture_gathers_rows_of_tokens_by_kernels_and_sums_them_without():
    """Tokens in both passes, and the gradient of the output. Each of the sums' gathers would be stored."""
    from zerojax.experts.mlp import ExpertWeights, Plan, mlp
    from zerojax.experts.rows import rows_of

    tokens, d, f, count, per_token = 32, 128, 256, 4, 2

    def loss(own, x, weights, experts):
        rows = rows_of(experts, 0, count, experts.size)
        return jnp.sum(mlp(Plan("swiglu", experts.size, 1, True), x, weights, ExpertWeights(*own), rows))

    def call(gate, up, down, *others):
        return jax.grad(loss, (0, 1, 2))((gate, up, down), *others)

    wide, narrow = ((count, d, f), jnp.bfloat16), ((count, f, d), jnp.bfloat16)
    each = (tokens, per_token)
    given = ((tokens, d), jnp.bfloat16), (each, jnp.float32), (each, jnp.int32)
    assert lowered(call, wide, wide, narrow, *given).count("call @gather_rows") == 3


def delta_rule(*args):
    """All kernels of the gated delta rule, forward and backward."""
    *rows, documents, state = args

    def total(query, key, value, log_decay, beta, state):
        out, last = pk.delta_rule(query, key, value, log_decay, beta, documents, state)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(last)

    return jax.value_and_grad(total, tuple(range(6)))(*rows, state)


def check_machine_code(program, shapes, kind, monkeypatch, folder):
    """Compile and assemble all kernels of a program, and check that a chip has the shared memory for them."""
    from jax_triton import triton_lib

    compiled = []
    ptx_of = recorded(compiled, triton_lib.compile_ttir_to_ptx_inplace)
    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", ptx_of)
    assert CALL in lowered(program, *shapes, kind=kind)
    assert compiled, "no kernel was compiled"
    for ptx, chip, shared in compiled:
        assert shared <= 1024 * (227 if chip in (90, 100) else 163 if chip == 80 else 99)
        assemble(ptx, folder)


@needs_triton
@pytest.mark.parametrize(
    "kind",
    # An L40S has the tiles of an A10.
    [pytest.param(kind, marks=pytest.mark.slow) if kind == "NVIDIA L40S" else kind for kind in CHIPS],
)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(jnp.bfloat16, name) for name in GROUPED]
    + [pytest.param(jnp.float32, name, marks=pytest.mark.slow) for name in GROUPED],
)
def test_grouped_matmuls_assemble_for_every_chip(kind, dtype, name, monkeypatch, tmp_path):
    """With sides that divide no tile, which Hopper takes, too."""
    k, n, groups, rows = 200, 300, 4, 1000
    shapes = ((rows, k), dtype), ((groups, k, n), dtype), ((rows, n), dtype), ((groups,), jnp.int32)
    check_machine_code(GROUPED[name], shapes, kind, monkeypatch, tmp_path)


@needs_triton
@pytest.mark.parametrize(
    ("kind", "dtype", "dim", "channels"),
    # The widest keys, which need the most memory, and the chip with the least.
    [("NVIDIA H100", jnp.bfloat16, 256, False), ("NVIDIA A10", jnp.bfloat16, 128, True)]
    + [pytest.param("NVIDIA H100", jnp.bfloat16, 256, True, marks=pytest.mark.slow)]
    + [
        pytest.param(kind, jnp.bfloat16, 128, channels, marks=pytest.mark.slow)
        for kind in CHIPS
        for channels in (False, True)
        if (kind, channels) != ("NVIDIA A10", True)
    ]
    + [
        # What fits into the shared memory of a chip.
        pytest.param(kind, jnp.float32, dim, channels, marks=pytest.mark.slow)
        for kind, dim in zip(CHIPS, (128, 64, 64, 128, 64, 64), strict=True)
        for channels in (False, True)
    ],
)
def test_the_delta_rule_assembles_for_every_chip(kind, dtype, dim, channels, monkeypatch, tmp_path):
    width = min(dim, 128)
    keys, values, each = (2, 192, 1, dim), (2, 192, 2, width), (2, 192, 2)
    decays = (*each, dim) if channels else each
    shapes = (
        *((keys, dtype), (keys, dtype), (values, dtype), (decays, jnp.float32), (each, jnp.float32)),
        *((each[:2], jnp.int32), ((2, 2, dim, width), jnp.float32)),
    )
    check_machine_code(delta_rule, shapes, kind, monkeypatch, tmp_path)
