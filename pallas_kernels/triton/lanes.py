"""Loads and stores for Triton kernels in which a thread owns K neighbouring elements.

The elements are K tensors ("lanes") of T numbers, for T threads. Lane k has the elements t * K + k of a tile.
A thread converts between neighbours and lanes without a change of layout.
"""

import triton
import triton.language as tl


@triton.jit
def _unstack(x, T: tl.constexpr, K: tl.constexpr):
    """x[T * K] as K tensors [T]: neighbours become lanes."""
    parts = (x,)
    for i in tl.static_range(0, 3):
        if (1 << i) < K:
            even = ()
            odd = ()
            for j in tl.static_range(0, len(parts)):
                first, second = tl.split(parts[j].reshape(T * K // (2 << i), 2))
                even = even + (first,)
                odd = odd + (second,)
            parts = even + odd
    return parts


@triton.jit
def _stack(parts, T: tl.constexpr):
    """The inverse of _unstack."""
    K: tl.constexpr = len(parts)
    for i in tl.static_range(0, 5):
        if (1 << i) < K:
            joined = ()
            for j in tl.static_range(0, len(parts) // 2):
                joined = joined + (tl.join(parts[j], parts[j + len(parts) // 2]),)
            parts = joined
    return parts[0].reshape(T * K)


@triton.jit
def _vector_offsets(first, live, COUNT: tl.constexpr, VECTOR: tl.constexpr, INDEX: tl.constexpr):
    """Offsets and masks, [T * VECTOR], of vector INDEX of the COUNT numbers of every thread."""
    T: tl.constexpr = live.shape[0]
    c = tl.arange(0, T * VECTOR)
    offsets = first * COUNT + (c // VECTOR * COUNT + INDEX * VECTOR + c % VECTOR)
    mask = tl.broadcast_to(live[:, None], (T, VECTOR)).reshape(T * VECTOR)
    return offsets, mask


@triton.jit
def _load_words(ptr, first, live, COUNT: tl.constexpr, TYPE: tl.constexpr, MASKED: tl.constexpr):
    """COUNT lanes, for thread t the COUNT neighbouring numbers of TYPE from (first + t) * COUNT on."""
    typed = ptr.to(tl.pointer_type(TYPE), bitcast=True)  # pyrefly: ignore[bad-argument-type]  (unwrapped)
    VECTOR: tl.constexpr = min(COUNT, 16 * 8 // TYPE.primitive_bitwidth)
    words = ()
    for i in tl.static_range(0, COUNT // VECTOR):
        offsets, mask = _vector_offsets(first, live, COUNT, VECTOR, i)
        if MASKED:
            words = words + _unstack(tl.load(typed + offsets, mask=mask, other=0), live.shape[0], VECTOR)
        else:
            words = words + _unstack(tl.load(typed + offsets), live.shape[0], VECTOR)
    return words


@triton.jit
def _store_words(ptr, first, words, live, MASKED: tl.constexpr):
    """The inverse of _load_words."""
    COUNT: tl.constexpr = len(words)
    typed = ptr.to(tl.pointer_type(words[0].dtype), bitcast=True)
    VECTOR: tl.constexpr = min(COUNT, 16 * 8 // words[0].dtype.primitive_bitwidth)
    for i in tl.static_range(0, COUNT // VECTOR):
        part = ()
        for j in tl.static_range(0, VECTOR):
            part = part + (words[i * VECTOR + j],)
        offsets, mask = _vector_offsets(first, live, COUNT, VECTOR, i)
        if MASKED:
            tl.store(typed + offsets, _stack(part, live.shape[0]), mask=mask)
        else:
            tl.store(typed + offsets, _stack(part, live.shape[0]))


@triton.jit
def load_codes(ptr, first, live, BYTES: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """BYTES bytes per thread, as uint32 words (or one widened uint16). 2-aligned rows load by halves."""
    if BYTES == 2:
        half = _load_words(ptr, first, live, 1, tl.uint16, MASKED)
        return (half[0].to(tl.uint32),)
    elif ALIGNED:
        return _load_words(ptr, first, live, BYTES // 4, tl.uint32, MASKED)
    else:
        halves = _load_words(ptr, first, live, BYTES // 2, tl.uint16, MASKED)
        words = ()
        for i in tl.static_range(0, BYTES // 4):
            words = words + (halves[2 * i].to(tl.uint32) | halves[2 * i + 1].to(tl.uint32) << 16,)
        return words


@triton.jit
def store_codes(ptr, first, words, live, BYTES: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """The inverse of load_codes."""
    if BYTES == 2:
        _store_words(ptr, first, (words[0].to(tl.uint16),), live, MASKED)
    elif ALIGNED:
        _store_words(ptr, first, words, live, MASKED)
    else:
        halves = ()
        for i in tl.static_range(0, BYTES // 4):
            halves = halves + (words[i].to(tl.uint16), (words[i] >> 16).to(tl.uint16))
        _store_words(ptr, first, halves, live, MASKED)


@triton.jit
def load_lanes(ptr, first, live, K: tl.constexpr, MASKED: tl.constexpr):
    """fp32 lanes of K neighbouring bf16 or fp32 elements per thread, from (first + t) * K on."""
    if ptr.dtype.element_ty == tl.float32:
        return _load_words(ptr, first, live, K, tl.float32, MASKED)
    else:
        words = _load_words(ptr, first, live, K // 2, tl.uint32, MASKED)
        lanes = ()
        for i in tl.static_range(0, K // 2):
            low = (words[i] << 16).to(tl.float32, bitcast=True)
            high = (words[i] & 0xFFFF0000).to(tl.float32, bitcast=True)
            lanes = lanes + (low, high)
        return lanes


@triton.jit
def store_lanes(ptr, first, lanes, live, MASKED: tl.constexpr):
    """The inverse of load_lanes, rounding to the pointer's type."""
    T: tl.constexpr = live.shape[0]
    K: tl.constexpr = len(lanes)
    if ptr.dtype.element_ty == tl.float32:
        # With more than 16 bytes per thread, reordering through shared memory makes stores write whole
        # sectors.
        offsets = first * K + tl.arange(0, T * K)
        if MASKED:
            mask = tl.broadcast_to(live[:, None], (T, K)).reshape(T * K)
            tl.store(ptr + offsets, _stack(lanes, T), mask=mask)
        else:
            tl.store(ptr + offsets, _stack(lanes, T))
    else:
        words = ()
        for i in tl.static_range(0, len(lanes) // 2):
            word = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;",
                "=r,r,r",
                [lanes[2 * i], lanes[2 * i + 1]],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            )
            words = words + (word,)
        _store_words(ptr, first, words, live, MASKED)
