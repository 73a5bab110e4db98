"""A vision transformer on images: which quarter of the noise is brightest?

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/vit.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax

WIDTH, PATCH, PATCHES = 32, 4, 16


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(3, WIDTH, (PATCH, PATCH), strides=PATCH, rngs=rngs)
        self.position = nnx.Embed(PATCHES, WIDTH, rngs=rngs)
        self.blocks = zerojax.Stack(Block, 3, rngs=rngs)  # compiled once, gathered layer by layer
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images).reshape(-1, PATCHES, WIDTH) + self.position.embedding[...]
        return self.head(jnp.mean(self.blocks(x), axis=1))


def loss_fn(model, batch):
    scores = model(batch["image"])
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]))
    return loss, {"accuracy": jnp.mean(jnp.argmax(scores, axis=-1) == batch["label"])}


def main():
    state = zerojax.TrainState.create(ViT, optax.adamw(5e-3), loss_fn, mesh=zerojax.make_mesh(2, 4))
    rng = np.random.default_rng(0)
    for step in range(81):
        image, label = rng.standard_normal((32, 2, 8, 2, 8, 3)), rng.integers(0, 4, 32)
        image[np.arange(32), label // 2, :, label % 2] += 3.0
        state, metrics = zerojax.train_step(state, {"image": image.reshape(32, 16, 16, 3), "label": label})
        if step % 20 == 0:
            print(f"step {step:2d}  loss {metrics['loss']:.4f}  accuracy {metrics['accuracy']:.2f}")
    return float(metrics["loss"])


if __name__ == "__main__":
    main()
