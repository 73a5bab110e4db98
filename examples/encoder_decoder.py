"""An encoder-decoder that learns to reverse a sequence: the second of two stacks attends to the first.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/encoder_decoder.py"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax

WIDTH, LENGTH, LETTERS = 32, 6, 10


class Layer(nnx.Module):
    def __init__(self, decoder, *, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.itself = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        if decoder:
            self.other = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = (nnx.Linear(*size, rngs=rngs) for size in ((WIDTH, 128), (128, WIDTH)))

    def __call__(self, x, memory=None):
        mask = None if memory is None else nnx.make_causal_mask(x[..., 0])
        x = x + self.itself(self.norms[0](x), mask=mask)
        if memory is not None:
            x = x + self.other(self.norms[1](x), memory)
        return x + self.down(nnx.relu(self.up(self.norms[2](x))))


class Translator(nnx.Module):
    def __init__(self, rngs):
        self.letters, self.position = (nnx.Embed(n, WIDTH, rngs=rngs) for n in (LETTERS + 1, LENGTH))
        self.encoder = zerojax.Stack(lambda rngs: Layer(False, rngs=rngs), 2, rngs=rngs)
        self.decoder = zerojax.Stack(lambda rngs: Layer(True, rngs=rngs), 2, rngs=rngs)

    def __call__(self, source, target):
        place = self.position.embedding[...]
        start = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=LETTERS)
        memory = self.encoder(self.letters(source) + place)
        return self.letters.attend(self.decoder(self.letters(start) + place, memory))


def loss_fn(model, batch):
    source, target = batch["letters"], batch["letters"][:, ::-1]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(source, target), target))


def main():
    state = zerojax.TrainState.create(Translator, optax.adamw(5e-3), loss_fn, mesh=zerojax.make_mesh(2, 4))
    rng = np.random.default_rng(0)
    for step in range(121):
        state, metrics = zerojax.train_step(state, {"letters": rng.integers(0, LETTERS, (64, LENGTH))})
        if step % 30 == 0:
            print(f"step {step:3d}  loss {float(metrics['loss']):.4f}")
    return float(metrics["loss"])


if __name__ == "__main__":
    main()
