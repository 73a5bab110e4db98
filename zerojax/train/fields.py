"""The arrays of a train state: their shapes, dtypes and shardings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from zerojax.optim.moments import by_moment
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.param_tree import to_tree
from zerojax.train.spec import TrainSpec


def abstract_fields(spec: TrainSpec) -> dict[str, Any]:
    """Every field of a state but ``spec``, as ShapeDtypeStructs with shardings."""

    def like(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: spec.abstract(x.shape, x.dtype), tree)

    def by_leaf(make: Callable[[ParamLayout], jax.ShapeDtypeStruct], wanted: bool = True) -> PyTree:
        return to_tree(spec.by_path(make)) if wanted else {}

    zero, scalar = spec.zero, jax.ShapeDtypeStruct((), jnp.int32)
    params = by_leaf(lambda leaf: spec.abstract(leaf.stored_shape, jnp.float32, spec.param_spec(leaf)))
    opt_state = jax.eval_shape(spec.tx.init, params)
    places = by_moment(
        spec.leaves, opt_state, lambda leaf, _: spec.param_spec(leaf), lambda _: PartitionSpec()
    )
    return {
        "step": like(scalar),
        "skipped_in_row": like(scalar),
        "seed": spec.abstract((), jnp.uint32),
        "params": params,
        "opt_state": jax.tree.map(lambda x, to: spec.abstract(x.shape, x.dtype, to), opt_state, places),
        "model_state": like(spec.adapter.abstract_model_state),
        "secondary": by_leaf(spec.abstract_secondary, zero.weights_delta),
        "residual": by_leaf(spec.abstract_residual, zero.error_feedback),
        "losses": like(jax.eval_shape(spec.spikes.start)) if spec.spikes else {},
        "frozen": to_tree({leaf.path: spec.abstract_frozen(leaf) for leaf in spec.frozen}),
        "base": {"fingerprint": spec.abstract((), jnp.uint32)} if spec.frozen else {},
    }


def state_specs(spec: TrainSpec) -> dict[str, PyTree]:
    """The PartitionSpec of every array of a state, by field."""
    return jax.tree.map(lambda x: x.sharding.spec, abstract_fields(spec))


def shardings_of(tree: PyTree) -> PyTree:
    """The sharding of each leaf of a tree of arrays or of ShapeDtypeStructs."""
    return jax.tree.map(lambda x: x.sharding, tree)


@jax.jit
def copied(x: Array) -> Array:
    """A copy that outlives a donation of ``x``."""
    return jnp.copy(x)
