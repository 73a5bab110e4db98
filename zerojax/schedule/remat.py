"""Rematerialisation policies: what a unit's backward pass recomputes and what it keeps."""

from collections.abc import Callable
from contextvars import ContextVar

import jax
from jax.extend.core import Primitive

from zerojax.matmul.fp8 import SCALE
from zerojax.matmul.low_rank import SUM
from zerojax.schedule.transforms import holding
from zerojax.zero_config.options import Remat

# Operations whose results are kept under "none". All others fuse into their readers: a kept result would be
# written to memory and read back, and kept casts or transposes would be copies of gathered weights.
_EXPENSIVE = frozenset(
    (
        "conv_general_dilated",
        "cumsum",
        "dot_general",
        "fft",
        "gather",
        "ragged_dot",
        "scatter",
        "sort",
        "top_k",
    )
)
RECOMPUTED = ContextVar("recomputed", default=False)
"""Whether the backward pass computes again whatever is traced in this context."""
_KERNELS = ("attention", "call", "ffi", "pallas", "triton")


def rematerialised[**P, T](body: Callable[P, T], remat: Remat) -> Callable[P, T]:
    """``body``, whose vjp keeps the results that the policy names, and weights uncopied."""
    policies = {
        # A scale would cost a pass over activations to compute again.
        "full": jax.checkpoint_policies.save_only_these_names(SCALE),
        "attention": _is_attention,
        "none": _is_expensive,
    }

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with holding(RECOMPUTED, remat != "none"):
            return body(*args, **kwargs)

    # The backward pass gathers its own weights, so the compiler cannot merge it with the forward pass.
    return jax.checkpoint(run, policy=policies[remat], prevent_cse=False)


def _is_attention(primitive: Primitive, *_: object, **params: object) -> bool:
    return params.get("name") in ("attention", SCALE) or "dot_product_attention" in primitive.name


def _is_expensive(primitive: Primitive, *_: object, **params: object) -> bool:
    named = params.get("name") in ("experts", SUM)  # "experts": ``zerojax.experts.mlp``
    if named or primitive.name in _EXPENSIVE or _is_attention(primitive, **params):
        return True
    return any(part in primitive.name for part in _KERNELS)
