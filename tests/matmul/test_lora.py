"""Which columns of a weight have which adapter, and merging adapters into weights."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from matmuls import exact

from zerojax import LoRA, ZeroError
from zerojax.matmul.lora import merged

LORA = LoRA(rank=3, alpha=6.0)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((("*w", 40, 1, 1.0),), r"LoRA.pieces has 40 columns for 'block/w', which has 32"),
        ((("*w", 8, 1, 1.0),), "8 columns for"),
        ((("*w", 0, 1, 1.0), ("*w", 8, 1, 1.0)), r"0 \+ 8 columns for"),
        ((("*w", 0, -1, 1.0),), "columns and rank must be 0 or more"),
        ((("*w", 0, 1, 0.0),), "LoRA.alpha=0.0"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(pieces, words):
    with pytest.raises(ZeroError, match=words):
        replace(LORA, pieces=pieces).pieces_of("block/w", 32)


def test_merging_is_in_fp32_and_rounds_once():
    w = np.asarray(exact(0, 16, 32)).astype(jnp.bfloat16)
    a, b = np.asarray(exact(5, 16, 3)), np.asarray(exact(6, 3, 32))
    wanted = (w.astype(np.float32) + 2 * a @ b).astype(jnp.bfloat16)
    np.testing.assert_array_equal(merged(w, a, b, LORA, "block/w"), wanted)
