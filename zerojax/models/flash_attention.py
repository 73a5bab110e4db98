"""FlashAttention-4 within documents that lie one behind another, by the optional package fa4-jax.

Its kernels (Dao and others; Shepperd's port to JAX) are written in the CuTe DSL. They are compiled when a
program is lowered, which takes 6 to 8 seconds for each width, number of heads and window. They read where
documents begin, so no mask exists in memory. The backward kernel sums a query's gradient in no fixed order.
"""

import functools
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from zerojax.errors import ConfigurationError

ATTENTION_NAME = "attention"
"""The ``checkpoint_name`` of attention's output, and of its residuals other than q, k and v."""

PACKAGE = "fa4-jax"

_BACKEND: Literal["cute", "reference"] = "cute"
"""fa4-jax's kernels; its "reference" is plain JAX."""

Sinks = Float[Array, " heads"]
"""Attention sinks (Xiao et al., 2023): a learned score in each head's softmax, without a value (gpt-oss).

No flash attention kernel needs to know them. A sink increases the scores' log-sum-exp, and scales the output
by the same factor as all probabilities. Backward kernels read only these two. They compute probabilities as
exp(score - log-sum-exp), and a score's gradient as its probability times the difference that its value makes
to sum(gradient x output).
"""

Segments = Int[Array, "batch time"]
"""The document of each position, for rows that hold several documents."""


class Options(NamedTuple):
    """Static options of an attention kernel.

    Attributes:
        reach: earlier positions within the window; None for all.
        scale: factor of the scores; None is 1 / sqrt(dim).
    """

    reach: int | None
    scale: float | None


class Documents(NamedTuple):
    """Documents in the flattened rows of a batch. Every row begins with a new document.

    Attributes:
        offsets: the first position of each document, then the end of the last one; int32, ascending. Unused
            entries hold the number of positions.
        lengths: the length of each document in ``offsets``, int32. It is stored because every layer and pass
            would need a kernel to compute it.
        numbers: the document of each position, counted from 0, int32 [batch, time]; None if ``offsets`` has
            all documents.
    """

    offsets: Int[Array, " most_and_one"]
    lengths: Int[Array, " most"]
    numbers: Segments | None


def document_offsets(segments: Segments, most: int | None = None) -> Documents:
    """The documents of packed rows.

    Args:
        segments: the document of each token, equal for neighbours of one document.
        most: documents that attention handles in one pass; more documents need more passes. None is one for
            each 256 positions, at least 16. An unused entry of these 16 costs a kernel 1% to 3%.
    """
    numbers = jnp.cumsum(begins(segments).reshape(-1), dtype=jnp.int32).reshape(segments.shape) - 1
    most = min(max(segments.size // 256, 16) if most is None else most, segments.size)
    offsets = _offsets(numbers, jnp.arange(most + 1))
    return Documents(offsets, jnp.diff(offsets), numbers)


def begins(segments: Segments) -> Bool[Array, "batch time"]:
    """Whether a document begins at each position; one begins at the start of every row."""
    return jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def one_document_a_row(batch: int, time: int) -> Documents:
    """The documents of ``batch`` rows of ``time`` tokens, one document in each."""
    offsets = jnp.arange(batch + 1, dtype=jnp.int32) * time
    return Documents(offsets, jnp.diff(offsets), None)


def _offsets(numbers: Segments, wanted: Int[Array, " documents"]) -> Int[Array, " documents"]:
    """Where each wanted document begins; the number of positions for one that does not exist."""
    # This is one fused kernel; jnp.nonzero would need several.
    return jnp.searchsorted(numbers.reshape(-1), wanted, method="scan_unrolled").astype(jnp.int32)


def with_sinks(
    out: Float[Array, "*tokens heads dim"], lse: Float[Array, "*tokens heads"], sinks: Sinks
) -> tuple[Float[Array, "*tokens heads dim"], Float[Array, "*tokens heads"]]:
    """Attention's output and log-sum-exp after adding one more score to each head's softmax."""
    sinks = sinks.astype(jnp.float32)
    kept = jax.nn.sigmoid(lse - sinks)[..., None]
    return (out * kept).astype(out.dtype), jnp.logaddexp(lse, sinks)


def gradient_of_sinks(
    out: Float[Array, "*tokens heads dim"],
    lse: Float[Array, "*tokens heads"],
    sinks: Sinks,
    gradient: Float[Array, "*tokens heads dim"],
) -> Sinks:
    """The gradient of the sinks, from ``with_sinks``' results and the gradient of its output."""
    taken = jnp.exp(sinks.astype(jnp.float32) - lse)
    towards = (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
    return -(taken * towards).reshape(-1, sinks.shape[0]).sum(0).astype(sinks.dtype)


def generation() -> int:
    """The major compute capability of this process' GPU: 8 is Ampere, 9 Hopper, and 0 means no GPU."""
    capability = re.match(r"(\d+)\.\d", str(getattr(jax.devices()[0], "compute_capability", "")))
    return 0 if capability is None else int(capability[1])


def missing() -> str | None:
    """The first requirement of the kernels that this process lacks, as text; None if it lacks none."""
    if generation() < 8:
        return "a GPU of NVIDIA's Ampere or a newer generation"
    return None if find_spec("fa4_jax") else f'the package {PACKAGE}, which the extra "gpu" installs'


def attend(
    options: Options,
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch time kv_heads dim"],
    value: Float[Array, "batch time kv_heads value_dim"],
    documents: Documents,
    windowed: Bool[Array, ""] | None = None,
    sinks: Sinks | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Attention of each position to itself and earlier positions of its document.

    Queries are bf16 or fp16, and heads a multiple of 8 wide. ``windowed`` says whether the window applies, as
    data; None if it always does.
    """
    if not find_spec("fa4_jax"):
        raise ConfigurationError(
            f'attention = "flash_attention_4" needs the package {PACKAGE}. Install the extra "gpu", or leave '
            "it out."
        )
    flat = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    attended: Array = _attention(options, *flat, documents, windowed, sinks)
    return attended.reshape(*query.shape[:3], -1)


class _Slots(NamedTuple):
    """Intervals that cover all positions, in the kernels' format.

    Attributes:
        offsets: where each interval begins, then the number of positions.
        used: how many positions of each interval attend; 0 for intervals without a document.
    """

    offsets: Int[Array, " slots_and_one"]
    used: Int[Array, " slots"]


def _slots(offsets: Int[Array, " documents_and_one"], tokens: int) -> _Slots:
    """The intervals of some documents, with one unused interval before and one behind them."""
    used = jnp.pad(jnp.diff(offsets), 1)
    return _Slots(jnp.pad(jnp.pad(offsets, (1, 0)), (0, 1), constant_values=tokens), used)


_Kernel = Callable[..., tuple[Array, ...]]
"""Takes options, slots and arrays. Its results are undefined at positions that are not used."""


def _in_passes(
    kernel: _Kernel, options: Options, documents: Documents, windowed: Array | None, arrays: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Run a kernel on as many documents at a time as ``documents.offsets`` has, and merge its results.

    The number of documents is data, and so is the window of a layer in a scanned stack. Hence this is a
    branch on the device. XLA waits until the GPU reaches the branch before it launches the branch's kernels.
    The GPU is idle for about a few launches, once per layer and pass; conditional nodes of CUDA graphs do not
    change that (docs/benchmarks.md). Bounds that need no branch cost more: the kernels' time and memory grow
    with the bound, and there may be as many documents as positions.
    """
    offsets, lengths, numbers = documents
    tokens, most = arrays[0].shape[0], lengths.size

    def one(options: Options, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        return kernel(options, _Slots(offsets, lengths), *arrays)

    def several(options: Options, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        assert numbers is not None
        known, passes = numbers, numbers.reshape(-1) // most

        def merge(number: Array, merged: tuple[Array, ...]) -> tuple[Array, ...]:
            slots = _slots(_offsets(known, number * most + jnp.arange(most + 1)), tokens)
            own = passes == number
            return tuple(
                # Log-sum-exps are [heads, tokens], all other arrays [tokens, heads, dim].
                jnp.where(own if new.ndim == 2 else own[:, None, None], new, old)
                for new, old in zip(kernel(options, slots, *arrays), merged, strict=True)
            )

        shapes = jax.eval_shape(functools.partial(one, options), arrays)
        return lax.fori_loop(0, passes[-1] + 1, merge, tuple(jnp.zeros(x.shape, x.dtype) for x in shapes))

    branches = [functools.partial(one, options)]
    index = jnp.int32(0)
    if numbers is not None and most < tokens:
        branches += [functools.partial(several, options)]
        index += numbers[-1, -1] >= most
    if windowed is not None:
        index += len(branches) * jnp.logical_not(windowed)
        everything = options._replace(reach=None)
        branches += [functools.partial(branch.func, everything) for branch in branches]
    return lax.switch(index, branches, arrays)


def _forward_kernel(
    options: Options, slots: _Slots, query: Array, key: Array, value: Array
) -> tuple[Array, Array]:
    """The output, and the log-sum-exp of the scores."""
    from fa4_jax import flash_attn_varlen

    return flash_attn_varlen(
        *(query, key, value, slots.offsets, slots.offsets),
        seqused_q=slots.used,
        seqused_k=slots.used,
        causal=True,
        window_size=None if options.reach is None else (options.reach, 0),
        scale=options.scale,
        return_lse=True,
        backend=_BACKEND,
    )


def _backward_kernel(
    options: Options, slots: _Slots, query: Array, key: Array, value: Array, *rest: Array
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values, from the output's gradient."""
    kept_out, kept_lse, gradient = rest
    forward = functools.partial(_forward_kernel, options, slots)
    out, pullback, lse = jax.vjp(forward, query, key, value, has_aux=True)
    # The library offers the backward pass only as a VJP. Its residuals are replaced by the kept arrays, so
    # nothing reads the results of this forward kernel, and XLA removes it.
    kept = {id(out): kept_out, id(lse): kept_lse}
    return jax.tree.map(lambda residual: kept.get(id(residual), residual), pullback)(gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    options: Options,
    query: Array,
    key: Array,
    value: Array,
    documents: Documents,
    windowed: Array | None,
    sinks: Sinks | None,
) -> Array:
    return _attention_forward(options, query, key, value, documents, windowed, sinks)[0]


def _attention_forward(
    options: Options,
    query: Array,
    key: Array,
    value: Array,
    documents: Documents,
    windowed: Array | None,
    sinks: Sinks | None,
) -> tuple[Array, tuple]:
    arrays = (query, key, value)
    # Without the barrier XLA runs the kernel twice where a scan stacks its results: once in the fusion that
    # writes into the stack, and once for the layer itself.
    out, lse = lax.optimization_barrier(_in_passes(_forward_kernel, options, documents, windowed, arrays))
    if sinks is not None:
        out, by_token = with_sinks(out, lse.T, sinks)
        lse = by_token.T
    out, lse = (checkpoint_name(x, ATTENTION_NAME) for x in (out, lse))
    return out, (documents, windowed, sinks, (*arrays, out, lse))


def _attention_backward(
    options: Options, residuals: tuple, gradient: Array
) -> tuple[Array, Array, Array, None, None, Array | None]:
    documents, windowed, sinks, arrays = residuals
    gradients = _in_passes(_backward_kernel, options, documents, windowed, (*arrays, gradient))
    *_, out, lse = arrays
    of_sinks = None if sinks is None else gradient_of_sinks(out, lse.T, sinks, gradient)
    return gradients[0], gradients[1], gradients[2], None, None, of_sinks


_attention.defvjp(_attention_forward, _attention_backward)
