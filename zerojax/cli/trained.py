"""What commands need that look at a finished or running run."""

import sys
from dataclasses import dataclass, replace

from zerojax.errors import ZeroError
from zerojax.run.build import abstract_model
from zerojax.run.checkpoints import damage_line, newest_valid, restore
from zerojax.run.config import MeshSection, RunConfig
from zerojax.run.run_dir import RunFolder
from zerojax.train.state import TrainState


@dataclass(frozen=True)
class TrainedRun:
    """A run's latest checkpoint, without what only training needs.

    Attributes:
        config: its settings, on the mesh that was asked for.
        state: restored.
        step: of the checkpoint.
    """

    config: RunConfig
    state: TrainState
    step: int


def open_trained(folder: RunFolder, config: RunConfig, mesh: MeshSection, *, ema: bool = False) -> TrainedRun:
    """Restore a run's newest valid checkpoint.

    Args:
        folder: the run's.
        config: its settings.
        mesh: to restore onto; need not be that of the training.
        ema: take the average of the weights in their place.

    Raises:
        ZeroError: there is no checkpoint, or all are damaged; or the run keeps no average.
    """
    zero = replace(config.zero, error_feedback=False)  # of gradients, and there are none
    config = replace(config, mesh=mesh, zero=zero)
    choice = newest_valid(folder.checkpoints, checksums=config.checkpoint.verify)
    for step, why in choice.damaged.items():
        print(f"zerojax: {damage_line(folder.checkpoints, step, why)}", file=sys.stderr)
    if choice.step is None:
        raise ZeroError(f"{folder.path} has no checkpoint yet")
    state = restore(folder.checkpoints / str(choice.step), abstract_model(config), average=ema)
    return TrainedRun(config, state, choice.step)
