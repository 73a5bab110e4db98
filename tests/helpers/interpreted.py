"""Runs the Triton kernels on a CPU by Triton's interpreter, with their PTX instructions in numpy.

Import it in a process of its own, with TRITON_INTERPRET=1 set before Triton is imported. `install` makes
`pallas_kernels.triton.calls` run its kernels here, on concrete arrays.
"""

# It replaces functions of Triton by others with fewer names.
# pyrefly: ignore-errors[bad-assignment]
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

F32 = np.float32


def _flush(x):
    return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32(0), x), x)


def _e4m3(x):
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _e5m2(x):
    return np.clip(x, -57344, 57344).astype(ml_dtypes.float8_e5m2).view(np.uint8)


def _reciprocal(x):
    # The instruction is good to an ulp: be wrong by one, to see that the kernel corrects it.
    exact = (F32(1) / x).astype(F32)
    return np.nextafter(exact, np.where(np.arange(exact.size) % 2 == 0, F32(np.inf), F32(0)))


def _bf16_pair(a, b):
    low, high = (v.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for v in (a, b))
    return low | high << 16


def _from_e4m3(pair):
    return tuple(
        byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32) for byte in (pair & 255, pair >> 8)
    )


def _bytes(a, b, selector):
    """Bytes of a (0 to 3) and b (4 to 7), named by the selector's digits."""
    return sum(((a, b)[c >> 2] >> (c & 3) * 8 & 255) << 8 * i for i, c in enumerate(_digits(selector)))


def _digits(selector):
    return [int(selector) >> 4 * i & 7 for i in range(4)]


def _product(a, b):
    wide = a.astype(np.uint64) * np.uint64(b)
    return wide.astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32)


def _half_pair(a, b):
    low, high = (v.astype(np.float16).view(np.uint16).astype(np.uint32) for v in (a, b))
    return low | high << 16


def _fma_halves(*operands):
    def values(shift):
        halves = (np.asarray(x, np.uint32) >> shift & 0xFFFF for x in operands)
        return [half.astype(np.uint16).view(np.float16).astype(np.float64) for half in halves]

    return _half_pair(*(a * b + c for a, b, c in (values(0), values(16))))


def _shuffle(table, index):
    """What the lane at index % 32 of the same warp holds."""
    return table[np.arange(table.size) & ~31 | index & 31]


INSTRUCTIONS = {
    "add.ftz.f32": lambda a, b: _flush(_flush(a) + _flush(b)),
    "sub.ftz.f32": lambda a, b: _flush(_flush(a) - _flush(b)),
    "rcp.approx.ftz.f32": _reciprocal,
    "lop3.b32": lambda a, b, c: (a & np.uint32(b)) ^ np.uint32(c),
    "cvt.rn.bf16x2.f32": _bf16_pair,
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: _e4m3(a).astype(np.uint16) | _e4m3(b).astype(np.uint16) << 8,
    "cvt.rn.satfinite.e5m2x2.f32": lambda a, b: _e5m2(a).astype(np.uint16) | _e5m2(b).astype(np.uint16) << 8,
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "cvt.rn.f16x2.f32": _half_pair,
    "fma.rn.f16x2": _fma_halves,
    "prmt.b32": _bytes,
    "mul.wide.u32": _product,
    "shfl.sync.idx.b32": _shuffle,
    "fma.rn.sat.f32": lambda a, b, c: np.clip(np.float64(a) * b + c, 0, 1).astype(F32),
    "cvt.f32.f16": lambda pair: tuple(
        half.astype(np.uint16).view(np.float16).astype(F32) for half in (pair & 0xFFFF, pair >> 16)
    ),
}


def _inline_asm(asm, constraints, args, dtype, is_pure, pack):
    name = next(name for name in INSTRUCTIONS if name in asm)
    values = [a.handle.data if hasattr(a, "handle") else getattr(a, "value", a) for a in args]
    result: Any = INSTRUCTIONS[name](*values)

    def tensor(data, kind):
        block = tl.block_type(kind, list(data.shape)) if data.shape else kind
        return tl.tensor(interpreter.TensorHandle(data, kind), block)

    if isinstance(dtype, tuple | list | tl.tuple):
        return tuple(tensor(data, kind) for data, kind in zip(result, dtype, strict=True))
    return tensor(result, dtype)


class _Array:
    """An array for the interpreter: its address and its type."""

    def __init__(self, array):
        self.array = array
        self.dtype = {"bfloat16": "bf16", "float32": "fp32", "uint8": "u8", "uint32": "u32", "int32": "i32"}[
            array.dtype.name
        ]

    def data_ptr(self):
        return self.array.ctypes.data


def _triton_call(*arrays, kernel, grid, **options):
    out = options["out_type"] if "out_type" in options else options["out_shape"]
    outs = out if isinstance(out, tuple) else (out,)
    results = [np.full(one.shape, 0xAB, one.dtype) for one in outs]  # poison: all of it must be written
    inputs = [a if isinstance(a, int) else _Array(np.array(a)) for a in arrays]
    names = set(kernel.arg_names)
    with np.errstate(all="ignore"):
        kernel[grid](*inputs, *map(_Array, results), **{k: v for k, v in options.items() if k in names})
    found = tuple(map(jnp.asarray, results))
    return found if isinstance(out, tuple) else found[0]


def _fma(self, x, y, z):
    # The interpreter rounds the product; in double precision it is exact.
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(exact.astype(F32), x.dtype.scalar)


def _dot(self, x, y, added, *_):
    # The interpreter multiplies bfloat16 as the integers that it keeps them in.
    x, y = (
        (one.data.astype(np.uint32) << 16).view(F32) if one.dtype.scalar == tl.bfloat16 else one.data
        for one in (x, y)
    )
    return interpreter.TensorHandle(np.matmul(x, y, dtype=F32) + added.data, added.dtype.scalar)


def install(calls):
    """Make the calls module run interpreted kernels."""
    calls.jax_triton.triton_call = _triton_call
    tl.inline_asm_elementwise = _inline_asm
    interpreter.InterpreterBuilder.create_fma = _fma
    interpreter.InterpreterBuilder.create_dot = _dot
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        # Scalars are arrays of one element, which NumPy no longer converts: the bounds of a loop.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, *args: None
    mangle = triton.runtime.jit.mangle_type
    triton.runtime.jit.mangle_type = lambda a, *rest: (
        "*" + a.dtype if isinstance(a, _Array) else mangle(a, *rest)
    )
