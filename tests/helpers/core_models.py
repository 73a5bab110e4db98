"""Small models in every style that users write them, each with its loss and its batches.

``cases()`` names them; a case is used both by zerojax and by the plain loop it is compared with.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import zerojax
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.train.state import begin_with

WIDTH, HIDDEN = 6, 11


def in_fp32(**options: Any) -> zerojax.ZeroConfig:
    """A config that computes in fp32, unless the options say otherwise."""
    options.setdefault("compute_dtype", "float32")
    return zerojax.ZeroConfig(**options)


class SlopeLayer(nnx.Module):
    """A layer whose gradient is a given vector, whatever its weights."""

    def __init__(self, size: int, *, rngs: nnx.Rngs):
        del rngs
        self.w = nnx.Param(jnp.zeros((1, size)))

    def __call__(self, x: jax.Array, slope: jax.Array) -> jax.Array:
        return x + slope @ self.w[0]


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on.

    Attributes:
        model: as ``TrainState.create`` takes it.
        loss: likewise.
        units: classes to name in ``ZeroConfig.units``.
        batch: makes a global batch of so many rows from a numpy generator.
        linen: whether the model needs a sample batch.
    """

    model: Any
    loss: Callable[..., Any]
    units: tuple[type, ...]
    batch: Callable[[np.random.Generator, int], dict[str, np.ndarray]]
    linen: bool = False

    def batches(self, rows: int, steps: int) -> list[dict[str, np.ndarray]]:
        """The same batches at every call."""
        rng = np.random.default_rng(7)
        return [self.batch(rng, rows) for _ in range(steps)]

    def create(self, tx: Any, *, nodes: int, local: int, seed: int = 0, **zero: Any) -> zerojax.TrainState:
        """A state of this case; fp32 and the case's units unless ``zero`` says otherwise."""
        return zerojax.TrainState.create(
            self.model, tx, self.loss, seed=seed, **self._rest(nodes, local, zero)
        )

    def abstract(self, tx: Any, *, nodes: int, local: int, **zero: Any) -> zerojax.TrainState:
        """What a step of such a state is traced and lowered with, without values.

        One object for the same arguments: tests that begin with it share what they trace and compile.
        """
        return _described(self, tx, nodes, local, tuple(sorted(zero.items())))

    def begin(self, tx: Any, *, nodes: int, local: int, **zero: Any) -> zerojax.TrainState:
        """What ``create`` gives for seed 0; the weights are drawn once for all meshes and options."""
        return self.start(tx, _drawn(self), nodes=nodes, local=local, **zero)

    def start(self, tx: Any, given: Any, *, nodes: int, local: int, **zero: Any) -> zerojax.TrainState:
        """A state that begins with given weights; see ``started``."""
        return started(self.abstract(tx, nodes=nodes, local=local, **zero), given)

    def _rest(self, nodes: int, local: int, zero: dict[str, Any]) -> dict[str, Any]:
        config = in_fp32(**{"units": self.units} | zero)
        sample = self.batches(2, 1)[0] if self.linen else None
        return {"mesh": zerojax.make_mesh(nodes, local), "zero": config, "sample_batch": sample}


def started(abstract: zerojax.TrainState, given: Any) -> zerojax.TrainState:
    """A state with values that begins with given weights: no model is initialised, which is half of what a
    test of ten steps compiles. For models without other state and frozen weights."""
    others = (abstract.model_state, abstract.frozen, abstract.encoded, abstract.losses, abstract.local)
    assert not any(others)
    state = zerojax.put_params(abstract, given)
    zeros = {
        name: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), getattr(abstract, name))
        for name in ("step", "skipped_in_row", "seed", "residual")
    }
    first = abstract.spec.first_opt_state(jax.tree.map(np.asarray, state.params))
    values = {"opt_state": jax.tree.map(np.asarray, first), **zeros}
    return state.replace(
        **{
            name: jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), x, getattr(abstract, name))
            for name, x in values.items()
        }
    )


def begun(abstract: zerojax.TrainState, given: Any) -> zerojax.TrainState:
    """``started`` for any model; its other first values are compiled, and its weights are not."""
    return begin_with(abstract, zerojax.put_params(abstract, given).params, 0)


@functools.cache
def _described(
    case: Case, tx: Any, nodes: int, local: int, zero: tuple[tuple[str, Any], ...]
) -> zerojax.TrainState:
    rest = case._rest(nodes, local, dict(zero))
    return zerojax.TrainState.abstract(case.model, tx, case.loss, **rest)


@functools.cache
def _drawn(case: Case) -> Any:
    """A case's first weights, in its own shapes."""
    return zerojax.gather_params(case.create(optax.identity(), nodes=1, local=1, stage=0))


def regression_batch(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    x = rng.standard_normal((rows, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1)).astype(np.float32)}


def slope_case(size: int, batch: Callable[..., dict[str, np.ndarray]] = regression_batch) -> Case:
    """A case whose gradient is the mean of a batch's "slope" over its rows."""

    def make(rngs: nnx.Rngs) -> SlopeLayer:
        return SlopeLayer(size, rngs=rngs)

    return Case(make, lambda model, batch: model(0, batch["slope"]).mean(), (SlopeLayer,), batch)


def slope_loss(model: Any, batch: Any) -> jax.Array:
    """The mean of what a model makes of a batch's "slope"."""
    return model(batch["slope"]).mean()


def squared_error(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


class Block(nnx.Module):
    """A residual block with a norm, a matrix that divides nothing, and a bias."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class Listed(nnx.Module):
    """Blocks in a list, between two layers of no unit."""

    def __init__(self, rngs: nnx.Rngs, block: Callable[..., nnx.Module] = Block):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([block(rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Stacked(nnx.Module):
    """Blocks in a scanned stack."""

    def __init__(self, rngs: nnx.Rngs, block: Callable[..., nnx.Module] = Block, layers: int = 3):
        self.stack = zerojax.Stack(block, layers, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.stack(x))


class LinenBlock(linen.Module):
    """The block in Flax Linen."""

    @linen.compact
    def __call__(self, x):
        hidden = linen.Dense(HIDDEN)(linen.LayerNorm()(x))
        return x + linen.Dense(WIDTH)(jnp.tanh(hidden))


class LinenListed(linen.Module):
    """Linen blocks one by one."""

    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = LinenBlock()(x)
        return linen.Dense(1)(x)


class LinenScanned(linen.Module):
    """Linen blocks under ``nn.scan``."""

    @linen.compact
    def __call__(self, x):
        scan = linen.scan(
            lambda block, carry: (block(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = scan(LinenBlock(), x)
        return linen.Dense(1)(x)


class AwkwardBlock(nnx.Module):
    """Prime sizes, a scalar and an empty leaf within a unit."""

    def __init__(self, *, rngs: nnx.Rngs, dtypes: tuple[Any, Any] = (jnp.float32, jnp.float32)):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, 13)) / 3)
        self.down = nnx.Param((jax.random.normal(rngs.params(), (13, WIDTH)) / 5).astype(dtypes[0]))
        self.shift = nnx.Param((jax.random.normal(rngs.params(), (13,)) / 3).astype(dtypes[1]))
        self.gain = nnx.Param(jnp.asarray(0.7))
        self.nothing = nnx.Param(jnp.zeros((0, 5)))

    def __call__(self, x):
        hidden = jnp.tanh(x @ self.up[...] + self.shift[...].astype(jnp.float32))
        nothing = jnp.sum(self.nothing[...])
        return x + self.gain[...] * (hidden @ self.down[...].astype(jnp.float32)) + nothing


class Awkward(nnx.Module):
    """The same outside units: a scalar, an empty leaf and a cube of primes."""

    def __init__(self, rngs: nnx.Rngs, dtypes: tuple[Any, Any] = (jnp.float32, jnp.float32)):
        self.block = AwkwardBlock(rngs=rngs, dtypes=dtypes)
        self.cube = nnx.Param(jax.random.normal(rngs.params(), (3, 7, WIDTH)) / 4)
        self.offset = nnx.Param(jnp.asarray(0.1, dtypes[1]))
        self.nothing = nnx.Param(jnp.zeros((3, 0)))

    def __call__(self, x):
        cubed = jnp.einsum("nw,abw->n", self.block(x), self.cube[...])
        return (cubed + self.offset[...].astype(jnp.float32) + jnp.sum(self.nothing[...]))[:, None]


GPT_TINY = GPTConfig(
    vocab_size=31,
    layers=2,
    d_model=8,
    heads=2,
    max_seq_len=7,
    tied=True,
    init_std=0.2,
    biases=False,
    norm="rms",
)


def token_batch(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    return {"tokens": rng.integers(0, GPT_TINY.vocab_size, (rows, 8)).astype(np.int32)}


def ragged_batch(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """Regression rows that count or not: few in the first quarter, most in the rest, none in the last row."""
    batch = regression_batch(rng, rows)
    share = np.where(np.arange(rows) < rows // 4, 0.2, 0.8)
    counted = (rng.random(rows) < share) & (np.arange(rows) < rows - 1)
    return {**batch, "y": batch["y"] * np.where(share < 0.5, 3, 1).astype(np.float32), "counted": counted}


def mean_over_counted(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean over the rows that count, zero where there are none, and how many there were."""
    count = batch["counted"].sum().astype(jnp.float32)
    error = (model(batch["x"])[:, 0] - batch["y"]) ** 2
    loss = jnp.where(batch["counted"], error, 0).sum() / jnp.maximum(count, 1)
    return loss, {"tokens": count, "offset": model(batch["x"])[:, 0].mean() + 0 * count}


def gpt(rngs: nnx.Rngs) -> GPT:
    return GPT(GPT_TINY, rngs=rngs)


HALVES = (jnp.bfloat16, jnp.float16)

CASES = {
    "nnx": Case(Listed, squared_error, (Block,), regression_batch),
    "stack": Case(Stacked, squared_error, (), regression_batch),
    "linen": Case(LinenListed(), squared_error, (LinenBlock,), regression_batch, linen=True),
    "linen-scan": Case(LinenScanned(), squared_error, (LinenBlock,), regression_batch, linen=True),
    "gpt-tied": Case(gpt, lm_loss, (), token_batch),
    "ragged": Case(Listed, mean_over_counted, (Block,), ragged_batch),
    "awkward": Case(Awkward, squared_error, (AwkwardBlock,), regression_batch),
    "halves": Case(
        functools.partial(Awkward, dtypes=HALVES), squared_error, (AwkwardBlock,), regression_batch
    ),
}


class Normed(nnx.Module):
    """A unit with batch statistics."""

    def __init__(self, *, rngs: nnx.Rngs):
        # What is normed already has no mean but the bias.
        self.up = nnx.Linear(WIDTH, WIDTH, bias_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(self.up(x)))


class NormedModel(nnx.Module):
    """Batch statistics inside units, and outside."""

    def __init__(self, rngs: nnx.Rngs, stacked: bool = False):
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs)
        self.block = zerojax.Stack(Normed, 2, rngs=rngs) if stacked else Normed(rngs=rngs)

    def __call__(self, x):
        return self.block(self.norm(x))[:, :1]
