"""Cotangents in loops: integers have those of dtype float0, which no loop can carry."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def inexact(cotangents: Any) -> list[Array]:
    """The cotangents that are more than float0."""
    return [x for x in jax.tree.leaves(cotangents) if x.dtype != jax.dtypes.float0]


def with_float0(cotangents: list[Array], primals: Any) -> Any:
    """Undo ``inexact``: a cotangent for each of ``primals``, of which shapes and dtypes suffice."""
    given = iter(cotangents)

    def fill(primal: Any) -> Any:
        if jnp.issubdtype(primal.dtype, jnp.inexact):
            return next(given)
        return np.zeros(primal.shape, jax.dtypes.float0)

    return jax.tree.map(fill, primals)
