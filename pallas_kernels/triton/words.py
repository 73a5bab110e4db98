"""Instructions on the bytes and halves of 32-bit words that Triton lacks."""

import triton
import triton.language as tl


@triton.jit
def select_bytes(a, b, SELECTOR: tl.constexpr):
    """A uint32 of bytes of a (0 to 3) and b (4 to 7), selected by SELECTOR's digits, the lowest first."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True), SELECTOR],
        tl.uint32,
        True,
        1,
    )


@triton.jit
def rotate_bytes(a, COUNT: tl.constexpr):
    """A uint32 rotated left by COUNT bytes, 0 to 3."""
    # One instruction. From shifts, together with a following shift, compilers make two or three.
    if COUNT == 0:
        return a
    else:
        return select_bytes(a, a, (0x32103210 >> (16 - 4 * COUNT)) & 0xFFFF)


@triton.jit
def multiply_wide(a, FACTOR: tl.constexpr):
    """The low and the high word of a uint32 times FACTOR."""
    return tl.inline_asm_elementwise(
        "{ .reg .b64 p; mul.wide.u32 p, $2, $3; mov.b64 {$0, $1}, p; }",
        "=r,=r,r,r",
        [a, FACTOR],
        (tl.uint32, tl.uint32),
        True,
        1,
    )


@triton.jit
def fma_halves(a, FACTOR: tl.constexpr, c):
    """a * FACTOR + c in both halves of a word of fp16. FACTOR is a power of two."""
    ONE: tl.constexpr = 0x3C003C00
    STEP: tl.constexpr = 0x04000400
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, ONE + STEP * (FACTOR.bit_length() - 1), c],
        tl.uint32,
        True,
        1,
    )


@triton.jit
def float_halves(word):
    """fp32 of the low and of the high half of words of fp16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
        "=f,=f,r",
        [word],
        (tl.float32, tl.float32),
        True,
        1,
    )
