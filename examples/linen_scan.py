"""A Linen model whose layers are one `nn.scan`, trained with ZeRO++ on two nodes of four devices.

On a machine without accelerators:
XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/linen_scan.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import zerojax


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(128)(nn.LayerNorm()(x)))
        return x + nn.Dense(32)(hidden), None


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        x, _ = layers()(nn.Dense(32)(x))
        return nn.Dense(4)(x)


def loss_fn(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"])
    return jnp.mean(losses)


def draw(rng):
    x = rng.standard_normal((64, 8), dtype=np.float32)
    return {"x": x, "label": (2 * (x[:, 0] > 0) + (x[:, 1] > x[:, 2])).astype(np.int32)}


def main():
    mesh = zerojax.make_mesh(nodes=2, local=4)
    zero = zerojax.ZeroConfig.preset("zero++", units=(Block,))
    rng = np.random.default_rng(0)
    state = zerojax.TrainState.create(
        Network(), optax.adamw(3e-3), loss_fn, mesh=mesh, zero=zero, sample_batch=draw(rng)
    )
    for step in range(41):
        state, metrics = zerojax.train_step(state, draw(rng))
        if step % 10 == 0:
            print(f"step {step:2d}  loss {float(metrics['loss']):.4f}")
    weights = sum(x.size for x in jax.tree.leaves(zerojax.gather_params(state)))
    print(f"{weights} weights, gathered for export")
    return float(metrics["loss"])


if __name__ == "__main__":
    main()
