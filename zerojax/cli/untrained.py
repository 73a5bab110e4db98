"""The state of a config that is not going to be trained: what `zerojax plan` and `zerojax comm` look at."""

import dataclasses

import jax

from zerojax.cli.cluster import emulate_devices
from zerojax.errors import ZeroError
from zerojax.run.build import RunSetup, abstract_batch
from zerojax.run.config import RunConfig
from zerojax.train.state import TrainState


def abstract_run(config: RunConfig) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """A run's state and batch without values, on emulated CPU devices: as many as its mesh asks for.

    Raises:
        ZeroError: the config does not say how large the mesh is, or its settings contradict each other.
    """
    mesh = config.mesh
    if not (mesh.nodes and mesh.local):
        raise ZeroError("which cluster? Give --mesh.nodes and --mesh.local; no device has to be there")
    jax.config.update("jax_platforms", "cpu")
    emulated = dataclasses.replace(mesh, emulate=True)
    emulate_devices(emulated, processes=1)
    state = RunSetup.of(dataclasses.replace(config, mesh=emulated)).abstract_state()
    return state, abstract_batch(config)
