"""Muon on shards: one device orthogonalises each whole matrix, and all devices share the work.

Muon (Jordan, 2024) replaces a matrix's momentum by a nearly orthogonal matrix of the same row and column
spaces. That needs the whole matrix, while ZeRO stores it in pieces. So the matrices of one shape are dealt
out to the devices. One all-to-all brings each device all pieces of its few matrices. The device runs
Newton-Schulz on them, and a second all-to-all returns the pieces to their owners. A device sends each of its
elements twice, for any number of devices. On N nodes that is 2 P (N - 1)/N elements per step between all of
them. Gathering the weights once would send N times as many.

The experts of a layer are as many matrices, which go to a device together. If experts are spread over a
node's devices, the pieces of an expert are only on different nodes.

Momentum is shaped, sharded and checkpointed like the parameters.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32, PyTree, Shaped

from zerojax.comm.in_order import on_mesh
from zerojax.optim.shard_check import OnLayout
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import LOCAL
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.zero_config import ZeroConfig

# Updates get the root mean square of AdamW's (Liu et al., "Muon is Scalable for LLM Training", section 2.2),
# so that one learning rate and one weight decay fit both.
_CONSISTENT_RMS = 0.2


def is_hidden_matrix(leaf: ParamLayout) -> bool:
    """Whether a leaf is a matrix, or one for each expert, but no embedding, whose rows are looked up."""
    name = leaf.path[-1]
    return len(leaf.shape) == 2 + leaf.of_experts and name != "embedding" and not name.endswith("bias")


def scale_by_muon(
    *,
    beta: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    is_matrix: Callable[[ParamLayout], bool] = is_hidden_matrix,
) -> OnLayout:
    """Muon for matrices and Adam for the rest, like optax's ``muon(consistent_rms=0.2)`` on whole leaves.

    A learning rate must follow, and weight decay, if wanted:
    ``zerojax.chain(zerojax.scale_by_muon(), optax.scale_by_learning_rate(1e-3))``.

    Args:
        beta: decay of the matrices' momentum.
        b1: decay of the first moment of other leaves.
        b2: decay of the second moment of other leaves.
        eps: added to the root of the second moment of other leaves.
        is_matrix: whether Muon updates a leaf. Such a leaf must have two dimensions in one layer, or three if
            the first one is the experts' (``leaf.of_experts``).

    Returns:
        An optimizer for ``TrainState.create``, which builds the transform for its layout.
    """

    def make(mesh: Mesh, leaves: Sequence[ParamLayout], zero: ZeroConfig) -> optax.GradientTransformation:
        matrices = [leaf for leaf in leaves if is_matrix(leaf) and leaf.size]
        mine = {leaf.path for leaf in matrices}
        labels = to_tree({leaf.path: "muon" if leaf.path in mine else "adam" for leaf in leaves})
        # Orthogonalising needs no more precision than the forward pass, and saves traffic.
        wire = jnp.dtype(zero.compute_dtype)
        muon = optax.chain(_momentum(beta), _orthogonalised(mesh, matrices, zero.stage > 0, wire))
        return optax.partition({"muon": muon, "adam": optax.scale_by_adam(b1, b2, eps)}, labels)

    return OnLayout(make, is_matrix)


def by_shape(matrices: Sequence[ParamLayout]) -> list[list[ParamLayout]]:
    """Matrices in groups that are dealt out together."""
    shapes: dict[tuple[int, ...], list[ParamLayout]] = {}
    for leaf in matrices:
        shapes.setdefault((*leaf.shape, leaf.owned, leaf.parts), []).append(leaf)
    return list(shapes.values())


def dealt_over(leaf: ParamLayout) -> tuple[str, ...]:
    """The mesh axes over which the pieces of a matrix are spread, in the order of their owners."""
    return tuple(axis for axis in leaf.owners if axis != LOCAL or leaf.parts == 1)


def most_dealt(same: Sequence[ParamLayout]) -> int:
    """The most matrices of a ``by_shape`` group that a device gets; of experts, the most layers."""
    own = same[0].on_device
    return -(-sum(leaf.layers for leaf in same) * own.owned // own.padded)


class MomentumState(NamedTuple):
    """The exponential average of the gradients, shaped like the weights, and how many gradients are in it."""

    updates: Int32[Array, ""]
    mu: PyTree[Array]


def _momentum(beta: float) -> optax.GradientTransformation:
    """Debiased Nesterov momentum: the element-wise part of optax's ``scale_by_muon``."""

    def init(params: PyTree[Array]) -> MomentumState:
        return MomentumState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(
        updates: PyTree[Array], state: PyTree[Array], params: PyTree[Array] = None
    ) -> tuple[PyTree[Array], MomentumState]:
        del params
        before = MomentumState(*state)
        mu = optax.tree.update_moment(updates, before.mu, beta, 1)
        count = jnp.asarray(optax.safe_increment(before.updates))
        # Like optax: the average debiased as at the next update, and this gradient once more.
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(updates, beta, count)
        return jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now), MomentumState(count, mu)

    return optax.GradientTransformation(init, update)


def _orthogonalised(
    mesh: Mesh, matrices: Sequence[ParamLayout], sharded: bool, wire: jnp.dtype
) -> optax.GradientTransformation:
    """Orthogonalise stored leaves, and scale them by shape."""
    shapes = by_shape(matrices)
    specs = {leaf.path: leaf.spec(leaf.owners if sharded else ()) for leaf in matrices}

    def on_device(blocks: dict[Path, Array]) -> dict[Path, Array]:
        result = {}
        for leaves in shapes:
            parts = [blocks[leaf.path].reshape(leaf.layers, -1) for leaf in leaves]
            axes = dealt_over(leaves[0]) if sharded else ()
            rows = _dealt_out(jnp.concatenate(parts), leaves[0].on_device, axes, wire)
            ends = [sum(len(part) for part in parts[: i + 1]) for i in range(len(parts) - 1)]
            for leaf, part in zip(leaves, jnp.split(rows, ends), strict=True):
                result[leaf.path] = part.reshape(blocks[leaf.path].shape)
        return result

    run = on_mesh(on_device, mesh, in_specs=(specs,), out_specs=specs)

    def update(updates: PyTree[Array], params: PyTree[Array] = None) -> PyTree[Array]:
        del params
        given = from_tree(updates)
        return to_tree(given | run({path: given[path] for path in specs}))

    return optax.stateless(update)


@jax.named_scope("orthogonalise")
def _dealt_out(
    rows: Float[Array, "n owned"], leaf: ParamLayout, axes: tuple[str, ...], wire: jnp.dtype
) -> Float[Array, "n owned"]:
    """This device's pieces of n matrices, each orthogonalised on the device that it is dealt to."""
    n = len(rows)
    devices = leaf.padded // leaf.owned if axes else 1
    each = -(-n // devices)
    sent = jnp.pad(rows, ((0, each * devices - n), (0, 0))).reshape(devices, each, -1)
    pieces = _exchange(sent.astype(wire), axes).astype(jnp.float32)
    # The pieces of a matrix in the order of their owners are the whole of it, and padding.
    whole = pieces.transpose(1, 0, 2).reshape(each, -1)
    done = _orthogonal(whole[:, : leaf.size].reshape(-1, *leaf.shape[-2:])).reshape(each, -1)
    done = jnp.pad(done, ((0, 0), (0, leaf.padded - leaf.size)))
    back = done.reshape(each, devices, -1).transpose(1, 0, 2)
    return _exchange(back.astype(wire), axes).astype(jnp.float32).reshape(devices * each, -1)[:n]


def _exchange(x: Shaped[Array, "devices each owned"], axes: tuple[str, ...]) -> Array:
    """All-to-all: row i goes to device i, where it is in the row of this device's index."""
    if not axes:
        return x
    # Without the barrier the compiler may move the cast to the wire's dtype behind the exchange.
    return lax.all_to_all(lax.optimization_barrier(x), axes, split_axis=0, concat_axis=0, tiled=True)


def _orthogonal(matrices: Float[Array, "n rows columns"]) -> Float[Array, "n rows columns"]:
    """Newton-Schulz by optax, whose transform does nothing else without momentum; zeros stay zeros."""
    dims = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    transform = optax.chain(
        optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=dims),
        optax.scale(_CONSISTENT_RMS * math.sqrt(max(matrices.shape[1:]))),
    )
    return cast(Array, transform.update(matrices, transform.init(matrices))[0])
