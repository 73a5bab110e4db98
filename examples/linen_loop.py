"""A training loop of your own for a Linen model with batch statistics, under ZeRO++. Run it again to resume.

On a machine without accelerators:
XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/linen_loop.py
"""

from pathlib import Path

import numpy as np
import optax
from flax import linen as nn

import zerojax
from zerojax import checkpoints, trackers


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        # Statistics over the rows of all devices; running statistics in evaluation.
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.8, axis_name=("node", "local"))
        return x + nn.relu(norm(nn.Dense(32)(x)))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(32)(x)
        for _ in range(3):
            x = Layer()(x, train)
        return nn.Dense(4)(x)


def loss_fn(model, batch, train=True):
    scores = model(batch["x"], train=train)
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]).mean()
    return loss, {"accuracy": (scores.argmax(-1) == batch["label"]).mean()}


def in_evaluation(model, batch):
    return loss_fn(model, batch, train=False)


ROWS = np.random.default_rng(0).standard_normal((1024, 8), dtype=np.float32)
DATA = {"x": ROWS, "label": (2 * (ROWS[:, 0] > 0) + (ROWS[:, 1] > ROWS[:, 2])).astype(np.int32)}


def take(first, count=64):
    return {name: values[first : first + count] for name, values in DATA.items()}


def main(folder="runs/linen-loop", nodes=2, local=4, steps=40):
    run = {"model": Network(), "tx": optax.adamw(1e-2), "loss_fn": loss_fn, "sample_batch": take(0)}
    run["mesh"] = zerojax.make_mesh(nodes, local)
    run["zero"] = zerojax.ZeroConfig.preset("zero++", units=(Layer,))
    saved = Path(folder) / "checkpoints"
    found = checkpoints.resume(saved, zerojax.TrainState.abstract(**run))
    state, start = (found.state, found.step) if found else (zerojax.TrainState.create(**run), 0)
    row = found.record.position["row"] if found else 0  # the position in the data, saved with the weights
    with checkpoints.Checkpoints(saved) as store, trackers.track(folder, start=start) as log:
        for step in range(start + 1, steps + 1):
            state, metrics = zerojax.train_step(state, take(row))
            row = (row + 64) % 960  # the last 64 rows are held out
            if step % 10 == 0:
                held_out = zerojax.eval_step(state, take(960), in_evaluation)
                values = {"loss": float(metrics["loss"]), "accuracy": float(held_out["accuracy"])}
                print(f"step {step:2d}  loss {values['loss']:.4f}  held out {values['accuracy']:.0%} right")
                log.write(step, values)
                store.save(step, state, checkpoints.Record(position={"row": row}))
    return float(zerojax.eval_step(state, take(960), in_evaluation)["loss"])


if __name__ == "__main__":
    main()
