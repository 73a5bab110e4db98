"""The runs of convergence.py: a variant compiled for all seeds, trained weights, one run as a record."""

import datetime
import statistics
import subprocess
import time
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from zerojax.analysis.comm_report import comm_report
from zerojax.run import checkpoints
from zerojax.run.build import RunSetup
from zerojax.run.config import RunConfig
from zerojax.run.data.batches import Batch
from zerojax.run.data.dataset import Dataset
from zerojax.run.evaluation import mean_loss
from zerojax.run.inputs import abstract_batch, make_batches
from zerojax.run.metrics.queue import MetricsQueue
from zerojax.sharding.layout import from_stored, to_stored
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.train.fields import shardings_of
from zerojax.train.gathering import mean_of_nodes
from zerojax.train.initial import initializer
from zerojax.train.state import initial_base
from zerojax.train.step import lower_eval_step

_CURVE_POINTS = 50


class Trainee:
    """A variant, compiled once for all seeds."""

    def __init__(self, config: RunConfig, threads: Executor) -> None:
        """Lower what a run of it needs, and have it compiled by ``threads``."""
        self.config = config
        self.state = RunSetup(config).abstract_state
        self._init = initializer(self.state.spec)
        batch = abstract_batch(config)
        lowered = (
            self._init.lower(np.uint32(0)),
            zerojax.lower_train_step(self.state, batch),
            lower_eval_step(self.state, batch),
        )
        self._compiled = [threads.submit(one.compile) for one in lowered]
        self.between_nodes = comm_report(self.state, batch).between_nodes

    def first_state(self, seed: int) -> zerojax.TrainState:
        """The state at step 0."""
        state = initial_base(self.state, seed)
        return state.replace(**jax.block_until_ready(self._init(np.uint32(seed))))

    def error(self) -> BaseException | None:
        """Why it does not compile; waits until that is known."""
        return next((error for one in self._compiled if (error := one.exception())), None)


@dataclass(frozen=True)
class Base:
    """Trained weights that runs begin with.

    Attributes:
        described: the checkpoint, for the JSON file.
        state: exact, with the weights.
    """

    described: dict[str, Any]
    state: zerojax.TrainState

    @classmethod
    def of(cls, run: Path, exact: Trainee) -> "Base":
        """The newest checkpoint of a run."""
        path = checkpoints.find(run)
        manifest = checkpoints.read_manifest(path)
        state = checkpoints.restore_weights(path, exact.first_state(0))
        return cls({"step": manifest.step, "saved_at": manifest.saved_at, **manifest.record.metrics}, state)

    def into(self, state: zerojax.TrainState) -> zerojax.TrainState:
        """A state of a variant with these weights."""
        return state.with_params(moved(self.state.params, self.state, state))


def train(
    name: str, trainee: Trainee, seed: int, data: Dataset, exact: Trainee, base: Base | None
) -> dict[str, Any]:
    """One run of a variant, as a record for the JSON file."""
    begun = time.monotonic()
    config = replace(trainee.config, train=replace(trainee.config.train, seed=seed))
    batches, validation = make_batches(config, data)
    state = trainee.first_state(seed)
    curve = []
    if base is not None:
        state = base.into(state)
        curve = [(0, float(mean_loss(state, validation)))]
    steps = []
    with closing(MetricsQueue()) as queue, closing(batches):
        for step in range(1, config.train.steps + 1):
            state, metrics = zerojax.train_step(state, next(batches))
            due = step % config.train.eval_every == 0 or step == config.train.steps
            steps += queue.push(step, metrics, partial(measure, state, validation) if due else None)
    curve += [(one.step, one.values["validation_loss"]) for one in steps if "validation_loss" in one.values]
    # With local updates a step returns the previous step's metrics, and the first has none.
    told = steps[1:] if config.zero.outer_delay else steps
    size = config.train.batch_size * config.train.sequence_length
    return {
        "variant": name,
        "seed": seed,
        "base": None if base is None else base.described,
        "zero": {key: value for key, value in vars(state.spec.zero).items() if key != "units"},
        "steps": config.train.steps,
        "tokens": config.train.steps * size,
        "loss": curve[-1][1],
        "loss_exact": float(mean_loss(with_weights_of(state, exact.state), validation)),
        "loss_mean": float(mean_loss(with_weights_of(at_mean_of_nodes(state), exact.state), validation)),
        "curve": curve,
        "train_loss": means([one.values["loss"] for one in told]),
        "grad_norm": means([one.values["grad_norm"] for one in told]),
        "skipped": sum(one.values["skipped"] for one in told),
        "between_nodes": trainee.between_nodes,
        "tokens_per_second": size / statistics.median(one.seconds for one in steps),
        "seconds": time.monotonic() - begun,
        **environment(),
    }


def measure(state: zerojax.TrainState, validation: list[Batch]) -> dict[str, jax.Array]:
    """The validation loss, for the queue."""
    return {"validation_loss": mean_loss(state, validation)}


def with_weights_of(state: zerojax.TrainState, exact: zerojax.TrainState) -> zerojax.TrainState:
    """A run's weights as an exact run's, to evaluate them as they would be exported."""
    params = moved(state.params, state, exact)
    return exact.replace(params=params, step=state.step, seed=state.seed, model_state=state.model_state)


def at_mean_of_nodes(state: zerojax.TrainState) -> zerojax.TrainState:
    """With local updates at the mean of the nodes' own weights, which the outer ones lag behind."""
    local = state.local
    if local is None:
        return state
    params, *_ = mean_of_nodes(state.spec, local.weights, jnp.ones_like(local.skipped_in_row))
    return state.with_params(params)


def moved(values: Any, state: zerojax.TrainState, other: zerojax.TrainState) -> Any:
    """Parameters or gradients of a run, laid out as another run of the same model has them."""
    pairs = list(zip(state.spec.leaves, other.spec.leaves, strict=True))

    def move(values: Any) -> Any:
        stored = from_tree(values)
        return to_tree({b.path: to_stored(from_stored(stored[a.path], a), b) for a, b in pairs})

    shardings = shardings_of(other.params)
    name = f"moved to {id(other.spec)}"
    # Awaited, because two cores run few programs of XLA:CPU at once: those that wait for each other hang.
    return jax.block_until_ready(
        state.spec.once(name, lambda: jax.jit(move, out_shardings=shardings))(values)
    )


def means(values: list[float]) -> list[float]:
    """The means of 50 equal stretches of a curve, or the values where there are fewer."""
    return [float(np.mean(some)) for some in np.array_split(values, min(_CURVE_POINTS, len(values)))]


def environment() -> dict[str, Any]:
    """The devices, date and versions of a run."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        commit = said.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "processes": jax.process_count(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "jax": jax.__version__,
        "commit": commit,
    }
