"""Abstract states of configs, for ``zerojax plan`` and ``zerojax comm``."""

import dataclasses

import jax

from zerojax.cli.cluster import emulate_devices
from zerojax.errors import ConfigurationError
from zerojax.posttrain.loss.preference import preference_loss
from zerojax.posttrain.settings import PREFERENCES, abstract_pairs
from zerojax.run.build import RunSetup
from zerojax.run.config import RunConfig
from zerojax.run.inputs import abstract_batch
from zerojax.train.state import TrainState


def abstract_run(config: RunConfig) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """The abstract state of ``emulated_setup`` and the run's abstract batch; errors as there."""
    setup = emulated_setup(config)
    pairs = config.posttrain.method in PREFERENCES
    return setup.abstract_state(), abstract_pairs(config) if pairs else abstract_batch(config)


def emulated_setup(config: RunConfig) -> RunSetup:
    """A run's mesh, sharding and optimizer, on as many emulated CPU devices as its mesh has."""
    mesh = config.mesh
    if not (mesh.nodes and mesh.local):
        raise ConfigurationError(
            "the size of the mesh is not known: give --mesh.nodes and --mesh.local; no device is needed"
        )
    jax.config.update("jax_platforms", "cpu")
    emulated = dataclasses.replace(mesh, emulate=True)
    emulate_devices(emulated, processes=1)
    run = dataclasses.replace(config, mesh=emulated)
    if config.posttrain.method in PREFERENCES:
        return RunSetup(run, loss_fn=preference_loss(config.posttrain))
    return RunSetup(run)
