"""JAX's own fully sharded training, for scripts/bench/train.py: `jit`, NamedSharding, XLA's partitioner.

As JAX's documentation recommends: fp32 masters and moments sharded over all devices, cast to bf16 as shards,
and one scan over the layers whose body constrains its weights to be whole: they are gathered layer by layer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.schedule.remat import rematerialised
from zerojax.zero_config.options import Remat

AXES = ("node", "local")
Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]


def make(
    factory: Callable[[nnx.Rngs], Any], tx: optax.GradientTransformation, *, mesh: Mesh, remat: Remat
) -> tuple[Any, Step]:
    """Its state, sharded from birth, and its compiled step.

    Args:
        factory: makes a module whose `blocks` is a `zerojax.Stack`, the model's only parameters, and whose
            `rope(length)` is what every block is given besides.
        tx: the optimizer.
        mesh: (node, local).
        remat: what a layer's backward pass computes again.

    Returns:
        The state, and (state, batch) -> (state, {"loss", "grad_norm"}), which donates the state.
    """

    abstract = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))
    graph = nnx.graphdef(abstract.blocks.block)
    whole = NamedSharding(mesh, PartitionSpec())

    def init(seed: jax.Array) -> Any:
        weights = nnx.state(factory(nnx.Rngs(jax.random.key(seed))).blocks.block, nnx.Param)
        return weights, tx.init(weights)

    places = jax.tree.map(lambda x: _spread(x.shape, mesh), jax.eval_shape(init, jnp.uint32(0)))

    def layer(weights: Any, x: jax.Array, rope: Any) -> jax.Array:
        return nnx.merge(graph, jax.lax.with_sharding_constraint(weights, whole))(x, rope)

    body = rematerialised(layer, remat)

    def loss(masters: Any, batch: dict[str, jax.Array]) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), masters)
        rope = abstract.rope(batch["x"].shape[1])
        out, _ = jax.lax.scan(lambda x, w: (body(w, x, rope), None), batch["x"], weights)
        return jnp.mean(jnp.square(out.astype(jnp.float32) - batch["y"].astype(jnp.float32)))

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        masters, moments = state
        value, grads = jax.value_and_grad(loss)(masters, batch)
        grads = jax.lax.with_sharding_constraint(grads, places[0])
        updates, moments = tx.update(grads, moments, masters)
        metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
        return (optax.apply_updates(masters, updates), moments), metrics

    compiled = jax.jit(step, donate_argnums=0, out_shardings=(places, whole))
    return jax.jit(init, out_shardings=places)(jnp.uint32(0)), compiled


def _spread(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Sharded over all devices along the last dimension that divides; the leading one is layers."""
    for number in range(len(shape) - 1, 0, -1):
        if shape[number] % mesh.size == 0:
            return NamedSharding(mesh, PartitionSpec(*(None,) * number, AXES))
    return NamedSharding(mesh, PartitionSpec())
