"""A training loop of your own: data, evaluation, checkpoints, trackers. Run it again to resume, on any mesh.

On a machine without accelerators:
XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/nnx_loop.py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax
from zerojax import checkpoints, trackers


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
        self.blocks = zerojax.Stack(Block, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.blocks(self.first(x)))[:, 0]


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def draw(*seed):
    x = np.random.default_rng(seed).standard_normal((64, 8), dtype=np.float32)
    return {"x": x, "y": np.tanh(x.sum(axis=1))}


def main(folder="runs/nnx-loop", nodes=2, local=4, steps=40):
    run = {"model": Network, "tx": optax.adamw(3e-3), "loss_fn": loss_fn}
    run["mesh"], saved = zerojax.make_mesh(nodes, local), Path(folder) / "checkpoints"
    found = checkpoints.resume(saved, zerojax.TrainState.abstract(**run))
    state, start = (found.state, found.step) if found else (zerojax.TrainState.create(**run), 0)
    with checkpoints.Checkpoints(saved) as store, trackers.track(folder, start=start) as log:
        for step in range(start + 1, steps + 1):
            state, metrics = zerojax.train_step(state, draw(1, step))  # the step number decides which rows
            if step % 10 == 0:
                loss, held_out = float(metrics["loss"]), float(zerojax.eval_step(state, draw(0))["loss"])
                print(f"step {step:2d}  loss {loss:.4f}  held out {held_out:.4f}")
                log.write(step, {"loss": loss, "held_out": held_out})
                store.save(step, state, checkpoints.Record(metrics={"validation_loss": held_out}))
    return float(zerojax.eval_step(state, draw(0))["loss"])


if __name__ == "__main__":
    main()
