"""The parts of a run, each made from its settings."""

import functools
import platform
import shlex
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from zerojax.analysis.comm_report import comm_report
from zerojax.errors import ZeroError
from zerojax.models import GPT, Block, flops_per_token, lm_loss
from zerojax.multihost.agreement import from_first
from zerojax.multihost.peers import Peers
from zerojax.multihost.watchdog import Limits, Watchdog, end_alone
from zerojax.run import checkpoints
from zerojax.run.config import ClusterSection, RunConfig
from zerojax.run.data import (
    Batch,
    Dataset,
    TrainBatches,
    make_rows,
    open_dataset,
    prepare,
    validation_batches,
)
from zerojax.run.metrics import RunLog, StepCosts
from zerojax.run.optimizers import make_optimizer, make_schedule
from zerojax.run.run_dir import Resume, RunFolder, check_start
from zerojax.run.trackers import check_trackers
from zerojax.versions import installed

_EVALUATIONS_AHEAD = 8


def abstract_state(config: RunConfig) -> zerojax.TrainState:
    """The shapes and places of a run's model and optimizer, to restore into.

    Raises:
        ZeroError: settings that contradict each other or the devices.
    """
    return zerojax.TrainState.abstract(**_state_arguments(config))


def abstract_model(config: RunConfig) -> zerojax.TrainState:
    """As `abstract_state`, without an optimizer: to look at a trained model, not to train it."""
    return zerojax.TrainState.abstract(**_state_arguments(config, optax.identity()))


def initial_state(config: RunConfig) -> zerojax.TrainState:
    """A run's model and optimizer at step 0, sharded from birth; errors as `abstract_state`."""
    return zerojax.TrainState.create(**_state_arguments(config), seed=config.train.seed)


def _state_arguments(config: RunConfig, tx: optax.GradientTransformation | None = None) -> dict[str, Any]:
    units = () if config.model.scan else (Block,)
    deviations = config.train.spike_deviations
    return {
        "model": lambda rngs: GPT(config.model, rngs=rngs),
        "tx": tx or make_optimizer(config.optimizer, config.train.steps),
        "loss_fn": lm_loss,
        "mesh": zerojax.make_mesh(config.mesh.nodes or None, config.mesh.local or None),
        "zero": config.zero.to_zero(units=units, accumulate=config.train.accumulate),
        "spikes": zerojax.SpikeRule(deviations, config.train.spike_window) if deviations else None,
    }


def check_settings(config: RunConfig) -> None:
    """Refuse a tracker, a mesh, a sharding or a batch that cannot be, before any data is prepared.

    Raises:
        ZeroError: naming the numbers and what would do.
    """
    check_trackers(config.log.trackers)
    arguments = _state_arguments(config)
    devices = arguments["mesh"].size
    size, parts = config.train.batch_size, devices * config.train.accumulate
    if size % parts:
        raise ZeroError(
            f"train.batch_size {size} does not divide into {devices} devices x "
            f"train.accumulate {config.train.accumulate}: {-(-size // parts) * parts} would"
        )


def prepare_data(config: RunConfig, folder: RunFolder) -> Dataset:
    """Make the run folder and its token files on the first process; open them on all.

    Raises:
        ZeroError: the source, the tokenizer or the folder cannot be used, or the model has no embedding
            for some of the tokens.
    """

    def write() -> None:
        folder.create()
        prepare(config.data, folder.data)

    from_first(write)
    data = open_dataset(config.data, folder.data)
    if data.tokenizer.vocab_size > config.model.vocab_size:
        raise ZeroError(
            f"the tokens are of a vocabulary of {data.tokenizer.vocab_size}, and model.vocab_size is "
            f"{config.model.vocab_size}: raise it"
        )
    return data


def choose_checkpoint(
    config: RunConfig, folder: RunFolder, resume: Resume
) -> tuple[checkpoints.Manifest | None, list[str]]:
    """The checkpoint to go on from; the first process looks, and all take the same.

    Damaged ones that are newer are moved aside, so that their steps can be saved again.

    Returns:
        Its manifest, None to start afresh; and a line for each damaged one.

    Raises:
        ZeroError: `resume` cannot be had, or all checkpoints are damaged.
    """

    def look() -> dict[str, Any]:
        choice = checkpoints.newest_valid(folder.checkpoints, checksums=config.checkpoint.verify)
        check_start(choice.step, resume, folder)
        return {"step": choice.step, "lines": checkpoints.set_damaged_aside(folder.checkpoints, choice)}

    found = from_first(look)
    if found["step"] is None:
        return None, found["lines"]
    return checkpoints.read_manifest(folder.checkpoints / str(found["step"])), found["lines"]


def make_batches(config: RunConfig, data: Dataset) -> tuple[TrainBatches, list[Batch]]:
    """This process's part of the training batches, and of the batches of every evaluation.

    An evaluation's batches are as large as a micro-batch, so that it needs no more memory than a step.

    Raises:
        DataError: a split is too short.
    """
    train = config.train
    rows = functools.partial(make_rows, length=train.sequence_length, packing=config.data.packing)
    place = {"process": jax.process_index(), "processes": jax.process_count()}
    validation = validation_batches(
        [rows(part.validation) for part in data.parts],
        weights=data.weights,
        batch_size=train.batch_size // train.accumulate,
        batches=train.eval_batches,
        **place,
    )
    batches = TrainBatches(
        [rows(part.train) for part in data.parts],
        weights=data.weights,
        batch_size=train.batch_size,
        seed=train.seed,
        **place,
    )
    return batches, validation


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a run's global batch."""
    shape = (config.train.batch_size, config.train.sequence_length + 1)
    names = ("tokens", "segments") if config.data.packing == "documents" else ("tokens",)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}


def make_log(
    config: RunConfig, folder: RunFolder, state: zerojax.TrainState, step: int, skipped: int
) -> RunLog:
    """The log of a run that stands at `step`; what a step sends is noted in run.json."""
    train = config.train
    report = comm_report(state, abstract_batch(config))
    if is_first():
        counted = report.to_dict()
        del counted["collectives"]
        folder.update_summary(communication=counted)
    schedule = make_schedule(config.optimizer, train.steps)
    predicted = train.batch_size * train.sequence_length
    return RunLog(
        folder,
        config,
        # All at once, before training: asking the device for one a step would wait for the step.
        np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(train.steps))),
        StepCosts(
            tokens=predicted,
            flops=predicted * flops_per_token(config.model, train.sequence_length),
            devices=state.spec.world.size,
            internode_bytes=report.between_nodes,
        ),
        start=step,
        skipped=skipped,
    )


def watchdog_limits(cluster: ClusterSection) -> Limits:
    """How long steps and other phases of a run may take."""
    return Limits(cluster.phase_timeout, cluster.step_timeout, cluster.step_factor)


def make_watchdog(config: RunConfig, folder: RunFolder, peers: Peers | None) -> Watchdog:
    """What ends a hung run, together with its peers if it has any."""
    limits = watchdog_limits(config.cluster)
    stacks = folder.stacks / f"rank-{jax.process_index()}.txt"
    if peers is None:
        return Watchdog(limits, lambda line: end_alone(stacks, line))
    peers.stacks = stacks
    if is_first():
        peers.note = lambda why: folder.update_summary(status="failed", reason=why)
    return Watchdog(limits, peers.stuck)


def mean_loss(state: zerojax.TrainState, batches: list[Batch]) -> jax.Array:
    """The mean loss over all tokens of some batches, in nats per token.

    The last batches are only dispatched: who reads the number waits for them.
    """
    measured = []
    for batch in batches:
        measured.append(zerojax.eval_step(state, batch))
        # XLA:CPU runs 32 programs at a time, and two processes that filled up with different ones hang.
        jax.block_until_ready(measured[:-_EVALUATIONS_AHEAD][-1:])
    loss = sum(metrics["loss"] * metrics["tokens"] for metrics in measured)
    return jnp.asarray(loss / sum(metrics["tokens"] for metrics in measured))


def is_first() -> bool:
    """Whether this process writes the files and speaks for all."""
    return jax.process_index() == 0


def environment() -> dict[str, Any]:
    """What a run ran on."""
    names = ("zerojax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    versions = {name: found for name in names if (found := installed(name))}
    return {
        "versions": {"python": platform.python_version()} | versions,
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "host": platform.node(),
        "system": platform.platform(),
        "command": shlex.join(sys.argv),
    }
