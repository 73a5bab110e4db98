"""A Gemma-style decoder: norms before and after, GeGLU, local and global attention in turn, capped logits.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/gemma_style.py"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax

WIDTH, HEADS, VOCAB, WINDOW = 32, 4, 16, 4


class Layer(nnx.Module):
    def __init__(self, rngs, window=None):
        self.window = window
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(4)])
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out, self.down = (nnx.Linear(n * WIDTH, WIDTH, use_bias=False, rngs=rngs) for n in (1, 4))
        self.gate, self.up = (nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=self.window)
        x = x + self.norms[1](self.out(mixed.reshape(x.shape)))
        y = self.norms[2](x)
        return x + self.norms[3](self.down(jax.nn.gelu(self.gate(y)) * self.up(y)))


class Gemma(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.Sequential(*(Layer(rngs, window) for window in [(WINDOW, 0), None]))
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.layers(self.embed(tokens) * WIDTH**0.5)
        return 30 * jnp.tanh(self.embed.attend(self.norm(x)) / 30)


def loss_fn(model, batch):
    scores, labels = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def main():
    zero, mesh = zerojax.ZeroConfig.preset("delta", units=(Layer,), accumulate=2), zerojax.make_mesh(2, 4)
    state = zerojax.TrainState.create(Gemma, optax.adamw(5e-3), loss_fn, mesh=mesh, zero=zero)
    rng = np.random.default_rng(0)
    for step in range(91):
        state, metrics = zerojax.train_step(state, {"tokens": np.tile(rng.integers(0, VOCAB, (64, 3)), 8)})
        if step % 30 == 0:
            print(f"step {step:2d}  loss {float(metrics['loss']):.4f}")
    return float(metrics["loss"])


if __name__ == "__main__":
    main()
