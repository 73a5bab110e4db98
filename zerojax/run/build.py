"""Builds the parts of a run from its settings."""

import platform
import shlex
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zerojax import compilation_cache
from zerojax.adapters.loss import LossFn
from zerojax.analysis.comm_report import comm_report
from zerojax.analysis.plan import predict_memory
from zerojax.analysis.plan.work import sequences_of, work_of
from zerojax.errors import EXIT_OK, ConfigurationError
from zerojax.models import GPT, GPTConfig, lm_loss, units_of
from zerojax.multihost import standby
from zerojax.multihost.peers import Peers
from zerojax.multihost.watchdog import Watchdog, end_alone
from zerojax.run.config import ClusterSection, RunConfig, config_to_dict
from zerojax.run.metrics.log import Listener, RunLog
from zerojax.run.optimizers import make_optimizer, make_schedule
from zerojax.run.run_dir import RunFolder
from zerojax.run.trackers import check_trackers
from zerojax.train.memory import check_host_memory, held_in_host, reserve_host_memory
from zerojax.train.spec import TrainSpec
from zerojax.train.spikes import SpikeRule
from zerojax.train.state import TrainState, first_state, initial_base
from zerojax.train.step import lower_train_step
from zerojax.versions import installed

_LOOK_EVERY = 5.0
"""Seconds until a standby process looks again for the program, which the job before it compiles."""
_TEXTS = ("tokens", "chosen", "rejected")


class RunSetup:
    """A run's mesh, sharding and optimizer, built once from its settings.

    With ``trains=False`` there is no optimizer: the setup is for inference alone.

    Raises:
        ConfigurationError: settings contradict each other or the devices.
    """

    def __init__(self, config: RunConfig, loss_fn: LossFn = lm_loss, *, trains: bool = True) -> None:
        train = config.train
        self.config = config
        self.mesh = config.mesh.to_mesh()
        self.zero = config.to_zero(units_of(config.model))
        self.tx = make_optimizer(config.optimizer, train.steps) if trains else None
        self.spikes = (
            SpikeRule(train.spike_deviations, train.spike_window) if train.spike_deviations else None
        )
        self.loss_fn = loss_fn

    def check(self) -> None:
        """Like ``check_settings``, and refuse too little host memory. Call it before any data is prepared."""
        self.check_settings()
        if self.zero.host:
            check_host_memory(*self._in_host, saves=True)

    def check_settings(self) -> None:
        """Refuse trackers and log options that do not work, and a batch size that the mesh cannot divide."""
        check_trackers(self.config.log.trackers)
        if self.config.log.fp8 and self.config.zero.matmul_dtype != "fp8":
            raise ConfigurationError(
                'log.fp8 reports on weights of fp8 matmuls: set zero.matmul_dtype to "fp8", or leave it out'
            )
        check_batch(self.config, self.mesh)

    def reserve_host_memory(self) -> None:
        """Lock the host memory that the run will use, before its first arrays are made.

        Raises:
            RunError: the memory is no longer available.
        """
        if self.zero.host:
            reserve_host_memory(held_in_host(*self._in_host), self.mesh.local_devices)

    @cached_property
    def _in_host(self) -> tuple[TrainSpec, int]:
        """The spec of the run's state, and the bytes of a device's activations in host memory."""
        train, spec = self.config.train, self.abstract_state.spec
        rows = sequences_of(train.batch_size, spec.world.size, self.zero)
        work = work_of(spec, self.config.model, sequences=rows, length=train.sequence_length)
        return spec, predict_memory(spec, work).host.get("activations", 0)

    def prepare_step(self, batch: Any) -> None:
        """Trace the step and load its program, as long as this process stands by.

        Raises:
            SystemExit: this process only compiles the program, which is now kept.
        """
        if not standby.waits(0):
            return
        lowered = lower_train_step(self.abstract_state, batch)
        if standby.only_compiles():
            lowered.compile()
            raise SystemExit(EXIT_OK)
        while standby.waits(_LOOK_EVERY):
            if compilation_cache.load(lowered):
                break

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the model and optimizer, to restore into."""
        return TrainState.abstract(
            lambda rngs: GPT(self.config.model, rngs=rngs),
            self.tx,
            self.loss_fn,
            mesh=self.mesh,
            zero=self.zero,
            spikes=self.spikes,
            lora=self.config.lora,
        )

    def initial_state(self, *, base: bool = True) -> TrainState:
        """The model and optimizer at step 0, created sharded; with ``base``, the frozen weights as well."""
        state, seed = self.abstract_state, self.config.train.seed
        if base:
            state = initial_base(state, seed)
        return first_state(state, seed)


def check_batch(config: RunConfig, mesh: Mesh, *, trains: bool = True) -> None:
    """Refuse a batch that does not divide into micro-batches of whole rows on a mesh.

    Commands that do not train can change the mesh only.
    """
    train, sharing = config.train, config.zero.sequence_parallel
    groups = max(1, mesh.size // sharing)
    size, parts = train.batch_size, groups * train.accumulate
    if size % parts:
        devices = f"{groups} devices" if sharing == 1 else f"{groups} groups of {sharing} devices"
        another = f"set it to {-(-size // parts) * parts}, for example, or " if trains else ""
        raise ConfigurationError(
            f"train.batch_size {size} does not divide into {devices} x train.accumulate {train.accumulate}: "
            f"{another}change mesh.nodes and mesh.local"
        )


def abstract_model(config: RunConfig) -> TrainState:
    """The abstract state of a run without its optimizer, for commands that use a trained model."""
    return RunSetup(config, trains=False).abstract_state


class Trained(NamedTuple):
    """A state that each step of a run trains, its model, and its global batch as ShapeDtypeStructs."""

    model: GPTConfig
    state: TrainState
    batch: Any


def make_log(
    config: RunConfig,
    folder: RunFolder,
    trained: Sequence[Trained],
    step: int,
    skipped: int,
    listener: Listener | None = None,
) -> RunLog:
    """The log of a run that starts at ``step``, after ``skipped`` steps without an update.

    Records in run.json the bytes that a step sends for the first state in ``trained``.
    """
    train = config.train
    reports = [comm_report(one.state, one.batch) for one in trained]
    if is_first():
        counted = reports[0].to_dict()
        del counted["collectives"]
        folder.update_summary(communication=counted)
    schedule = make_schedule(config.optimizer, train.steps)
    batch = trained[0].batch
    tokens = sum(batch[name].shape[0] for name in _TEXTS if name in batch) * train.sequence_length
    # Like ``zerojax.models.flops_per_token``, but frozen matrices have no gradients.
    rows = [work_of(one.state.spec, one.model, sequences=1, length=train.sequence_length) for one in trained]
    flops = sum(work.model_flops / work.tokens for work in rows)
    return RunLog(
        folder,
        steps=train.steps,
        max_skips=train.max_skips,
        spikes=train.on_spike if train.spike_deviations else "none",
        every=config.log.every,
        trackers=config.log.trackers,
        project=config.log.project,
        settings=config_to_dict(config),
        tokens=tokens,
        flops=tokens * flops,
        devices=trained[0].state.spec.world.size,
        internode_bytes=sum(report.between_nodes for report in reports),
        # All at once, before training: fetching one per step would wait for the step.
        learning_rates=np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(train.steps))),
        start=step,
        skipped=skipped,
        listener=listener,
    )


def make_watchdog(cluster: ClusterSection, folder: RunFolder, peers: Peers | None) -> Watchdog:
    """The watchdog that ends a hung run, together with the other processes if there are ``peers``."""
    watchdog = partial(
        Watchdog,
        phase_timeout=cluster.phase_timeout,
        step_timeout=cluster.step_timeout,
        step_factor=cluster.step_factor,
    )
    stacks = folder.stacks / f"rank-{jax.process_index()}.txt"
    if peers is None:
        return watchdog(lambda line: end_alone(stacks, line))
    if is_first():
        peers.record_failures(stacks, lambda why: folder.update_summary(status="failed", reason=why))
    else:
        peers.record_failures(stacks)
    return watchdog(peers.stuck)


def is_first() -> bool:
    """Whether this is process zero, which writes the files and prints."""
    return jax.process_index() == 0


def environment() -> dict[str, Any]:
    """Versions, devices, host and command of this process, for run.json."""
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
