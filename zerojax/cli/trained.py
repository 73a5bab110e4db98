"""The states of commands that do not train: of trained runs, and abstract ones of configs."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax

from zerojax.cli.cluster import emulate_devices
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import ModelReader
from zerojax.log import warn
from zerojax.posttrain.loss.objectives import preference_loss
from zerojax.posttrain.settings import PREFERENCES, abstract_pairs
from zerojax.run.build import RunSetup, abstract_model
from zerojax.run.checkpoints import damage_line, newest_valid, read_manifest, restore
from zerojax.run.config import MeshSection, RunConfig
from zerojax.run.inputs import abstract_batch
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import with_base
from zerojax.sharding.mesh import MeshShape
from zerojax.train.state import TrainState
from zerojax.zero_config import ZeroConfig


@dataclass(frozen=True)
class TrainedRun:
    """A run's latest checkpoint, without the optimizer, and the run's settings with the requested mesh.

    ``base`` is the source of the frozen weights (``Record.base``). It is None if there are none, or if they
    are drawn from the run's seed.
    """

    config: RunConfig
    state: TrainState
    step: int
    base: Path | None


def as_stored(config: RunConfig) -> RunConfig:
    """A run's settings without wire formats. Frozen weights keep their format, and so their values."""
    names = ["compute_dtype", "precise", "frozen", "frozen_weights"]
    if config.zero.frozen_weights == "fp8":  # operands of fp8 products are scaled layer by layer
        names += ["matmul_dtype", "fp8"]
    kept = {name: getattr(config.zero, name) for name in (*names, "block_size")}
    return replace(config, zero=ZeroConfig(**kept))


def on_its_mesh(config: RunConfig) -> RunConfig:
    """A trained run's settings for its mesh; devices share rows only if the mesh allows it."""
    if MeshShape.of(config.mesh.to_mesh()).local % config.zero.sequence_parallel == 0:
        return config
    return replace(config, zero=config.zero.replace(sequence_parallel=1))


def open_trained(folder: RunFolder, config: RunConfig, mesh: MeshSection, *, ema: bool = False) -> TrainedRun:
    """Restore a run's newest valid checkpoint onto a mesh, which may differ from the mesh of the training.

    With ``ema``, restore the averaged weights instead.
    """
    # Error feedback concerns gradients only.
    config = replace(config, mesh=mesh, zero=config.zero.replace(error_feedback=False))
    config = on_its_mesh(config)
    choice = newest_valid(folder.checkpoints, checksums=config.checkpoint.verify)
    for step, why in choice.damaged.items():
        warn(damage_line(folder.checkpoints, step, why))
    if choice.step is None:
        raise ConfigurationError(f"{folder.path} has no checkpoint yet: train the run first")
    path = folder.checkpoints / str(choice.step)
    record = read_manifest(path).record
    if not record.position:  # imported weights: no step was taken, and nothing is frozen yet
        config = config.all_trained()
    state = with_base(abstract_model(config), folder, record.base, config, ModelReader())
    state = restore(path, state, average=ema)
    return TrainedRun(config, state, choice.step, folder.path / record.base if record.base else None)


def abstract_run(config: RunConfig) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """The abstract state of ``emulated_setup`` and the run's abstract batch; errors as there."""
    setup = emulated_setup(config)
    pairs = config.posttrain.method in PREFERENCES
    return setup.abstract_state, abstract_pairs(config) if pairs else abstract_batch(config)


def emulated_setup(config: RunConfig) -> RunSetup:
    """A run's mesh, sharding and optimizer, on as many emulated CPU devices as its mesh has.

    Raises:
        ConfigurationError: the settings do not say how many these are.
    """
    mesh = config.mesh
    if not (mesh.nodes and mesh.local):
        raise ConfigurationError(
            "the size of the mesh is not known: give --mesh.nodes and --mesh.local; no device is needed"
        )
    jax.config.update("jax_platforms", "cpu")
    config = replace(config, mesh=replace(mesh, emulate=True))
    emulate_devices(config.mesh, processes=1)
    if config.posttrain.method in PREFERENCES:
        return RunSetup(config, loss_fn=preference_loss(config.posttrain))
    return RunSetup(config)
