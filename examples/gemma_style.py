"""A decoder in the style of Flax's own examples/gemma: its einsums and names, without rotary positions.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/gemma_style.py"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax

WIDTH, HEADS, HEAD, VOCAB = 32, 4, 8, 16


class Block(nnx.Module):
    def __init__(self, window, rngs):
        self.window = window
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(4)])
        self.qkv_einsum = nnx.Einsum("BTD,SNDH->SBTNH", (3, HEADS, WIDTH, HEAD), rngs=rngs)
        self.attn_vec_einsum = nnx.Einsum("BTNH,NHD->BTD", (HEADS, HEAD, WIDTH), rngs=rngs)
        self.gating_einsum = nnx.Einsum("BTD,SDF->SBTF", (2, WIDTH, 4 * WIDTH), rngs=rngs)
        self.linear = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        q, k, v = self.qkv_einsum(self.norms[0](x))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=self.window)
        x = x + self.norms[1](self.attn_vec_einsum(mixed))
        gate, up = self.gating_einsum(self.norms[2](x))
        return x + self.norms[3](self.linear(nnx.gelu(gate) * up))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embedder, self.final_norm = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.layers = nnx.Sequential(*(Block(window, rngs) for window in [(4, 0), None]))

    def __call__(self, tokens):
        x = self.final_norm(self.layers(self.embedder(tokens) * WIDTH**0.5))
        return 30 * jnp.tanh(self.embedder.attend(x) / 30)


def loss_fn(model, batch):
    scores = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["tokens"][:, 1:]).mean()


def main():
    rng, mesh = np.random.default_rng(0), zerojax.make_mesh(2, 4)
    zero = zerojax.ZeroConfig.preset("delta", units=(Block,), accumulate=2)
    state = zerojax.TrainState.create(Transformer, optax.adamw(5e-3), loss_fn, mesh=mesh, zero=zero)
    for step in range(61):
        state, metrics = zerojax.train_step(state, {"tokens": np.tile(rng.integers(0, VOCAB, (64, 3)), 8)})
        if step % 30 == 0:
            print(f"step {step:2d}  loss {float(metrics['loss']):.4f}")
    return float(metrics["loss"])


if __name__ == "__main__":
    main()
