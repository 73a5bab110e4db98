"""Functions with known traffic, for ``zerojax.testing.emulated_cluster.measure_bytes``. Not tests."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def collective(op: str, elements: int, dtype: str, repeats: int) -> Callable[[], list[float]]:
    """``repeats`` times an all_gather or all_to_all over "node" of ``elements`` per device; check sums."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    grid = np.array(devices).reshape(jax.process_count(), -1)
    mesh = Mesh(grid, ("node", "local"), axis_types=(AxisType.Auto,) * 2)
    everywhere = P(("node", "local"))

    def once(x: jax.Array) -> jax.Array:
        if op == "all_gather":
            y = jax.lax.all_gather(x, "node", tiled=True)
        else:
            y = jax.lax.all_to_all(x, "node", 0, 0, tiled=True)
        return jnp.sum(y, dtype=jnp.float32)[None]

    step = jax.jit(jax.shard_map(once, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    sharding = NamedSharding(mesh, everywhere)
    # Device i holds the value i + 1 throughout.
    whole = np.repeat(np.arange(1, len(devices) + 1, dtype=dtype), elements)
    x = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    step(x).block_until_ready()

    def piece() -> list[float]:
        results = [step(x).block_until_ready() for _ in range(repeats)]
        return [float(np.asarray(shard.data)[0]) for shard in results[-1].addressable_shards]

    return piece
