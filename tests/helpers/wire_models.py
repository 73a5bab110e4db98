"""Models whose bytes are easy to reckon, in the styles that travel differently; and a piece of training.

Not tests themselves.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax
from zerojax.zero_config.config import Preset


class Block(nnx.Module):
    """A residual MLP whose two matrices are all but a few of its weights."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Stacked(nnx.Module):
    """A scanned stack between two layers of no unit."""

    def __init__(self, width: int, hidden: int, layers: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(4, width, rngs=rngs)
        self.blocks = zerojax.Stack(lambda rngs: Block(width, hidden, rngs=rngs), layers, rngs=rngs)
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.blocks(self.embed(x)))


class Kinds(Stacked):
    """The same with blocks of two hidden widths in turn."""

    def __init__(self, width: int, hidden: int, layers: int, *, rngs: nnx.Rngs):
        super().__init__(width, hidden, layers, rngs=rngs)
        kinds = [functools.partial(Block, width, size) for size in (hidden, 2 * hidden)]
        self.blocks = zerojax.Stack(kinds, layers, rngs=rngs)


class Parts(Stacked):
    """The same in two parts: the last layer has another hidden width."""

    def __init__(self, width: int, hidden: int, layers: int, *, rngs: nnx.Rngs):
        super().__init__(width, hidden, layers, rngs=rngs)
        first, last = (functools.partial(Block, width, size) for size in (hidden, 2 * hidden))
        blocks, parts = [*[first] * (layers - 1), last], [layers - 1, 1]
        self.blocks = zerojax.Stack(blocks, layers, rngs=rngs, parts=parts)


class Listed(nnx.Module):
    """The same with a list of blocks, each a unit."""

    def __init__(self, width: int, hidden: int, layers: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(4, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, hidden, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LinenBlock(linen.Module):
    width: int
    hidden: int

    @linen.compact
    def __call__(self, x, _):
        y = linen.relu(linen.Dense(self.hidden)(x))
        return x + linen.Dense(self.width, use_bias=False)(y), None


class LinenScanned(linen.Module):
    """The same in Linen, scanned."""

    width: int
    hidden: int
    layers: int

    @linen.compact
    def __call__(self, x):
        scanned: Any = linen.scan(
            LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x, _ = scanned(self.width, self.hidden, name="blocks")(linen.Dense(self.width)(x), None)
        return linen.Dense(1)(x)


def squared_error(model, batch):
    return jnp.mean((model(batch["x"])[..., 0] - batch["y"]) ** 2)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1)).astype(np.float32)}


_SGD = optax.sgd(0.1)


def abstract_state(
    style: str,
    mesh,
    zero: zerojax.ZeroConfig,
    *,
    width: int = 24,
    hidden: int = 40,
    layers: int = 3,
    tx: optax.GradientTransformation = _SGD,
) -> zerojax.TrainState:
    """A state without values: "stacked", "kinds", "parts", "listed" or "linen"."""
    model: Any = LinenScanned(width, hidden, layers)
    units: tuple[type, ...] = (LinenBlock,)
    sample = batch_of(2)
    if style != "linen":
        cls = {"stacked": Stacked, "kinds": Kinds, "parts": Parts, "listed": Listed}[style]
        model, units, sample = lambda rngs: cls(width, hidden, layers, rngs=rngs), (), None
        units = (Block,) if style == "listed" else ()
    return zerojax.TrainState.abstract(
        model, tx, squared_error, mesh=mesh, zero=zero.replace(units=units), sample_batch=sample
    )


def train(preset: Preset, steps: int, width: int, **settings: Any) -> Callable[[], dict[str, Any]]:
    """For `measure_bytes`: training a stack, and what the report says one node will send meanwhile."""
    zero = zerojax.ZeroConfig.preset(preset, **settings)
    state = zerojax.TrainState.create(
        lambda rngs: Stacked(width, 4 * width, 3, rngs=rngs),
        optax.adam(1e-3),
        squared_error,
        mesh=zerojax.make_mesh(),
        zero=zero,
    )
    batch = batch_of(len(jax.local_devices()) * zero.accumulate)
    report = zerojax.comm_report(state, batch)
    state, _ = zerojax.train_step(state, batch)

    def piece() -> dict[str, Any]:
        after, losses = state, []
        for _ in range(steps):
            after, metrics = zerojax.train_step(after, batch)
            losses.append(metrics["loss"])
        return {
            "losses": [float(loss) for loss in losses],
            "expected": steps * report.between_nodes,
            "zero3": steps * report.zero3_bytes,
        }

    return piece
