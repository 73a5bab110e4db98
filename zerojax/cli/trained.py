"""What commands need that look at a finished or running run."""

from dataclasses import dataclass, replace

from zerojax.checkpoint import Checkpoints
from zerojax.config import MeshSection, RunConfig
from zerojax.data import Dataset, open_dataset
from zerojax.errors import ZeroError
from zerojax.run_folder import RunFolder
from zerojax.state import TrainState


@dataclass(frozen=True)
class TrainedRun:
    """A run's latest checkpoint, without what only training needs.

    Attributes:
        config: its settings, on the mesh that was asked for.
        data: its tokens and tokenizer.
        state: restored.
        step: of the checkpoint.
    """

    config: RunConfig
    data: Dataset
    state: TrainState
    step: int


def open_trained(folder: RunFolder, config: RunConfig, mesh: MeshSection) -> TrainedRun:
    """Restore a run's latest checkpoint.

    Args:
        folder: the run's.
        config: its settings.
        mesh: to restore onto; need not be that of the training.

    Raises:
        ZeroError: there is no checkpoint.
    """
    from zerojax.parts import abstract_model

    zero = replace(config.zero, error_feedback=False)  # of gradients, and there are none
    config = replace(config, mesh=mesh, zero=zero)
    if not folder.checkpoints.is_dir():
        raise ZeroError(f"{folder.path} has no checkpoint yet")
    with Checkpoints(folder.checkpoints) as checkpoints:
        if (step := checkpoints.latest) is None:
            raise ZeroError(f"{folder.path} has no checkpoint yet")
        state = checkpoints.restore(step, abstract_model(config))
    return TrainedRun(config, open_dataset(config.data, folder.data), state, step)
