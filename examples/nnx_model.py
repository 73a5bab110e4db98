"""Your own NNX model, unchanged, trained with exact ZeRO-3 on two nodes of four devices.

On a machine without accelerators:
XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/nnx_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 32, rngs=rngs)
        self.blocks = nnx.List([Block(32, rngs) for _ in range(3)])
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)[:, 0]


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def main():
    mesh = zerojax.make_mesh(nodes=2, local=4)
    zero = zerojax.ZeroConfig(stage=3, units=(Block,))  # a Block's weights are whole only while it runs
    state = zerojax.TrainState.create(Network, optax.adamw(3e-3), loss_fn, mesh=mesh, zero=zero)
    rng = np.random.default_rng(0)
    for step in range(41):
        x = rng.standard_normal((64, 8), dtype=np.float32)
        state, metrics = zerojax.train_step(state, {"x": x, "y": np.tanh(x.sum(axis=1))})
        if step % 10 == 0:
            print(f"step {step:2d}  loss {float(metrics['loss']):.4f}")
    return float(metrics["loss"])


if __name__ == "__main__":
    main()
