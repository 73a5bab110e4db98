"""From numbers to codes: scales, dither, rounding and packing, ``reference.encode`` in Triton.

Conversions to integers run at an eighth of the rate of additions, so codes are read from the mantissas of
sums. Packing would take half of the remaining time. Therefore one instruction puts two codes into the halves
of a word, and these pairs are shifted and added.
"""

import triton
import triton.language as tl

from pallas_kernels import reference
from pallas_kernels.triton.words import fma_halves, multiply_wide, rotate_bytes, select_bytes

MIN_SCALE_BITS = tl.constexpr(reference.MIN_SCALE_BITS)
MAX_SCALE_BITS = tl.constexpr(reference.MAX_SCALE_BITS)
NAN_SCALE = tl.constexpr(reference.NAN_SCALE)
ONE_BF16 = tl.constexpr(0x3F80)
STOCHASTIC_MARGIN = tl.constexpr(reference.STOCHASTIC_MARGIN)
ROTATION_NORM = tl.constexpr(32.0**-0.5)
MAGIC = tl.constexpr(12582912.0)
HASH_ROUNDS = tl.constexpr(reference.HASH_ROUNDS)
WEYL = tl.constexpr(reference.WEYL)
PHILOX = tl.constexpr(reference.PHILOX)
DITHER_ULP = tl.constexpr(2.0 ** (16 - 149))
"""Maps the unit of dither, 2**-16, to 2**-149. The bits of up to 2**24 units are then their count."""


@triton.jit
def rotate(lanes):
    """The 32-wide Hadamard butterflies across every 32 lanes, not normalised, flushing subnormals."""
    for i in tl.static_range(0, 5):
        result = ()
        for j in tl.static_range(0, len(lanes)):
            if (j >> i) & 1 == 0:
                value = tl.inline_asm_elementwise(
                    "add.ftz.f32 $0, $1, $2;", "=f,f,f", [lanes[j], lanes[j + (1 << i)]], tl.float32, True, 1
                )
            else:
                value = tl.inline_asm_elementwise(
                    "sub.ftz.f32 $0, $1, $2;", "=f,f,f", [lanes[j - (1 << i)], lanes[j]], tl.float32, True, 1
                )
            result = result + (value,)
        lanes = result
    return lanes


@triton.jit
def block_scales(
    lanes, unit, W: tl.constexpr, QMAX: tl.constexpr, STOCHASTIC: tl.constexpr, ROTATE: tl.constexpr
):
    """bf16 scale bits and inverse scales, [T] each, equal for the W threads of a block.

    The numbers are lanes * unit. The unit is a power of two per block (and a factor of the inverse), or None.
    """
    T: tl.constexpr = lanes[0].shape[0]
    top = tl.zeros([T], tl.int32)
    for k in tl.static_range(0, len(lanes), 2):
        # Floats first, because their abs is free. Then integers, because Hopper compares three at once.
        pair = tl.maximum(tl.abs(lanes[k]), tl.abs(lanes[k + 1]), propagate_nan=tl.PropagateNan.ALL)
        top = tl.maximum(top, pair.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = top.reshape(T // W, W)
    top = tl.broadcast_to(tl.max(top, axis=1)[:, None], (T // W, W)).reshape(T)
    NORM: tl.constexpr = ROTATION_NORM if ROTATE else 1.0
    top = top.to(tl.float32, bitcast=True)
    if unit is not None:
        top *= unit
    exact = (top * (NORM / QMAX)).to(tl.int32, bitcast=True)
    bad = exact > MAX_SCALE_BITS
    dead = bad | (exact < MIN_SCALE_BITS)
    if STOCHASTIC:
        rounded = (exact + 0xFFFF) >> 16
    else:
        rounded = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16
    rounded = tl.where(dead, ONE_BF16, rounded)
    scale = tl.where(dead, tl.where(bad, NAN_SCALE, 0), rounded).to(tl.uint16)
    # A reciprocal within an ulp, made exact by one Newton step (Markstein).
    wide = (rounded << 16).to(tl.float32, bitcast=True)
    guess = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [wide], tl.float32, True, 1)
    inverse = tl.fma(guess, tl.fma(-wide, guess, 1.0), guess)
    if STOCHASTIC:
        inverse = (inverse.to(tl.int32, bitcast=True) - STOCHASTIC_MARGIN).to(tl.float32, bitcast=True)
    if ROTATE:
        inverse *= ROTATION_NORM
    if unit is not None:
        inverse *= unit
    return scale, tl.where(dead, 0.0, inverse)


@triton.jit
def random_words(keys_ptr, octet, COUNT: tl.constexpr):
    """The random words of every four elements, for COUNT groups of eight from octet[T] on."""
    start = octet * WEYL + tl.load(keys_ptr)
    words = ()
    for i in tl.static_range(0, COUNT):
        x = start + (i * WEYL) % (1 << 32)
        y = x
        for j in tl.static_range(0, HASH_ROUNDS):
            low, high = multiply_wide(x, PHILOX)
            x = high ^ y ^ tl.load(keys_ptr + 1 + j)
            y = low
        words = words + (x, y)
    return words


@triton.jit
def _draw(y, random, LANE: tl.constexpr, BIAS: tl.constexpr):
    """BIAS + a neighbour of y, chosen by lane LANE's bits of ``random``, in the high half of int32."""
    bias = tl.full(y.shape, BIAS << 16, tl.int32)
    FIRST: tl.constexpr = 3 - LANE % 4
    SECOND: tl.constexpr = (FIRST + 3) % 4
    dithered = select_bytes(random, bias, 0x7600 + 16 * FIRST + SECOND).to(tl.float32, bitcast=True)
    return tl.fma(y, tl.full(y.shape, DITHER_ULP, tl.float32), dithered).to(tl.int32, bitcast=True)


@triton.jit
def _round(y, BIAS: tl.constexpr):
    """BIAS + rint(y), in the low half of int32."""
    return (y + (MAGIC + BIAS)).to(tl.int32, bitcast=True)


@triton.jit
def _draw_minifloat(y, random, LANE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """A neighbour of y among small floats, int32: exponent and mantissa in fp32's places, then noise.

    Numbers are scaled so that a code's exponent of 0 or 1 equals fp32's. Then a number's bits are its code,
    followed by the bits to round away.
    """
    BITS: tl.constexpr = 23 - MANTISSA
    bits = (y * (2.0 ** (BIAS - 127))).to(tl.uint32, bitcast=True)
    dither = rotate_bytes(random, LANE % 4) >> (32 - BITS)
    return (bits + dither).to(tl.int32, bitcast=True)


@triton.jit
def _minifloat(y, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """exponent | mantissa of y in an int32, the exponent where fp32 has it. Other bits are noise.

    It adds a power of two so large that the mantissa of the sum ends in y's rounded significand. The exponent
    of that power is then put above it. MIN_EXPONENT is fp32's exponent of the smallest normal number with a
    code.
    """
    UP: tl.constexpr = 23 - MANTISSA
    exponent = y.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(exponent + (UP << 23), (MIN_EXPONENT + UP) << 23)
    steps = (tl.abs(y) + power.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return (steps << UP) + power


@triton.jit
def pair_up(codes, DISTANCE: tl.constexpr, HIGH: tl.constexpr):
    """The high or low halves of lanes k and k + DISTANCE, of every 2 * DISTANCE lanes, in one word."""
    pairs = ()
    for k in tl.static_range(0, len(codes)):
        if k // DISTANCE % 2 == 0:
            pairs = pairs + (select_bytes(codes[k], codes[k + DISTANCE], 0x7632 if HIGH else 0x5410),)
    return pairs


@triton.jit
def pack(pairs, BITS: tl.constexpr):
    """uint32 words of the codes of 16 / BITS successive pairs, with the codes of the low halves lowest."""
    PER: tl.constexpr = 16 // BITS
    words = ()
    for i in tl.static_range(0, len(pairs) // PER):
        word = pairs[i * PER]
        for j in tl.static_range(1, PER):
            word += pairs[i * PER + j] << (j * BITS)
        words = words + (word,)
    return words


@triton.jit
def e4m3_pair(a, b):
    """The e4m3 bytes of two fp32 tensors, a's low, in a uint16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [a, b], tl.uint16, True, 1
    )


@triton.jit
def _keep_live(words, inverse, SIGNS: tl.constexpr):
    """Words XORed with SIGNS, or zero in dead blocks."""
    alive = tl.where(inverse == 0.0, 0, 0xFFFFFFFF).to(tl.uint32)
    kept = ()
    for i in tl.static_range(0, len(words)):
        kept = kept + ((words[i] ^ SIGNS) & alive,)
    return kept


@triton.jit
def _rounded_bytes(lanes, inverse, BITS: tl.constexpr):
    """Pairs of bytes with the codes of 8 / BITS lanes: pair_up and the first half of pack in one.

    The conversion to fp16 rounds to units of 2**-24, the last place of its subnormals. Their bits are
    integers, or several integers side by side. fp16's sums of up to 11 such bits are exact.
    """
    COUNT: tl.constexpr = 8 // BITS
    DISTANCE: tl.constexpr = 16 // BITS
    BIAS: tl.constexpr = (1 << (BITS - 1)) * (255 // ((1 << BITS) - 1)) * 0x10001
    small = inverse * 2.0**-24
    pairs = ()
    for k in tl.static_range(0, len(lanes)):
        if k // DISTANCE % 2 == 0:
            pair = tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;",
                "=r,r,r",
                [lanes[k] * small, lanes[k + DISTANCE] * small],
                tl.uint32,
                True,
                1,
            )
            pairs = pairs + (pair,)
    result = ()
    for i in tl.static_range(0, len(pairs) // COUNT):
        total = pairs[i * COUNT + COUNT - 1]
        for j in tl.static_range(1, COUNT - 1):
            total = fma_halves(total, 1 << BITS, pairs[i * COUNT + COUNT - 1 - j])
        if COUNT == 1:
            total = fma_halves(total, 1, BIAS)
        else:
            total = fma_halves(total, 1 << BITS, BIAS)
            total = fma_halves(pairs[i * COUNT], 1, total)
        result = result + (total,)
    return result


@triton.jit
def integer_words(lanes, inverse, random, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, NORMAL: tl.constexpr):
    """The words of the lanes' codes. NORMAL says that ``inverse`` is far from the subnormals."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    if NORMAL and not STOCHASTIC:
        words = pack(_rounded_bytes(lanes, inverse, BITS), 8)
    else:
        codes = ()
        for k in tl.static_range(0, len(lanes)):
            y = lanes[k] * inverse
            if STOCHASTIC:
                codes = codes + (_draw(y, random[k // 4], k, HALF),)
            else:
                codes = codes + (_round(y, HALF),)
        words = pack(pair_up(codes, 16 // BITS, STOCHASTIC), BITS)
    return _keep_live(words, inverse, HALF * (0xFFFFFFFF // ((1 << BITS) - 1)))


@triton.jit
def _minifloat_pairs(
    lanes,
    inverse,
    random,
    DISTANCE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Pairs of magnitudes, from a half's bit 7 - MANTISSA on, amid noise, and pairs with the sign first."""
    # The exponent of _minifloat is too large by a constant. Scaling the numbers makes the constant a multiple
    # of 16, so that the three or four bits of a code's exponent do not have it.
    SHIFT: tl.constexpr = 0 if STOCHASTIC else (BIAS + MANTISSA - 151) % 16
    inverse *= 1.0 * (1 << SHIFT)
    codes = ()
    numbers = ()
    for k in tl.static_range(0, len(lanes)):
        y = lanes[k] * inverse
        if STOCHASTIC:
            code = _draw_minifloat(y, random[k // 4], k, MANTISSA, BIAS)
            number = code
        else:
            code = _minifloat(y, MANTISSA, 128 - BIAS + SHIFT)
            number = y
        codes = codes + (code,)
        numbers = numbers + (number,)
    return pair_up(codes, DISTANCE, True), pair_up(numbers, DISTANCE, True)


@triton.jit
def fp8_words(lanes, inverse, random, STOCHASTIC: tl.constexpr):
    """The words of the lanes' e4m3 codes."""
    words = ()
    if STOCHASTIC:
        codes, signs = _minifloat_pairs(lanes, inverse, random, 2, 3, 7, True)
        for i in tl.static_range(0, len(lanes) // 4):
            word = select_bytes(codes[2 * i] << 4, codes[2 * i + 1] << 4, 0x7351)
            sign = select_bytes(signs[2 * i], signs[2 * i + 1], 0x7351)
            words = words + (word | (sign & 0x80808080),)
    else:
        for i in tl.static_range(0, len(lanes) // 4):
            low = e4m3_pair(lanes[4 * i] * inverse, lanes[4 * i + 1] * inverse)
            high = e4m3_pair(lanes[4 * i + 2] * inverse, lanes[4 * i + 3] * inverse)
            words = words + (low.to(tl.uint32) | high.to(tl.uint32) << 16,)
    return _keep_live(words, inverse, 0)


@triton.jit
def fp6_words(lanes, inverse, random, STOCHASTIC: tl.constexpr):
    """The words of the low four bits of the lanes' e3m2 codes, and the words of their high two bits."""
    codes, signs = _minifloat_pairs(lanes, inverse, random, 8, 2, 3, STOCHASTIC)
    low = ()
    high = ()
    for i in tl.static_range(0, len(codes)):
        low = low + ((codes[i] >> 5) & 0x000F000F,)
        high = high + (((codes[i] >> 9) & 0x00010001) | ((signs[i] >> 14) & 0x00020002),)
    # A word of four pairs holds lanes 0 to 3 and 8 to 11 of sixteen, or lanes 4 to 7 and 12 to 15.
    crossed = pack(low, 4)
    nibbles = ()
    for i in tl.static_range(0, len(crossed), 2):
        first = select_bytes(crossed[i], crossed[i + 1], 0x5410)
        nibbles = nibbles + (first, select_bytes(crossed[i], crossed[i + 1], 0x7632))
    return _keep_live(nibbles, inverse, 0), _keep_live(pack(high, 2), inverse, 0)
