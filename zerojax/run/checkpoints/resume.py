"""Resumes a custom training loop from its newest checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from zerojax.run.checkpoints.manifest import Record
from zerojax.run.checkpoints.restore import restore
from zerojax.run.checkpoints.select import choose
from zerojax.train.state import TrainState


class Resumed(NamedTuple):
    """A restored checkpoint.

    Attributes:
        state: the model and its optimizer.
        step: the checkpoint's step.
        record: the record saved with it, such as the ``position`` in the data.
    """

    state: TrainState
    step: int
    record: Record


def resume(
    folder: Path | str,
    state: TrainState,
    *,
    checksums: bool = True,
    say: Callable[[str], object] = print,
) -> Resumed | None:
    """Restore the newest valid checkpoint of a folder, whatever mesh, stage or wire format wrote it.

    All processes must call it; the first one chooses for all. Newer checkpoints that are damaged are renamed
    (``400.damaged``), so that their steps can be saved again.

    Args:
        folder: the checkpoints' folder, as for ``Checkpoints``; need not exist.
        state: gives the spec, filled or abstract (``TrainState.abstract``); its values are not used.
        checksums: read every byte of the checkpoint first; otherwise compare names and sizes only.
        say: prints a line for each damaged checkpoint, on the first process. It prints one more if the number
            of nodes with local updates has changed (``restore``).

    Returns:
        None if there is no checkpoint yet: then create a state by ``TrainState.create``.

    Raises:
        ConfigurationError: all checkpoints are damaged, or the newest valid one is of another model or
            optimizer.
    """
    manifest, damaged = choose(Path(folder), checksums=checksums)

    def say_once(line: str) -> None:
        if jax.process_index() == 0:
            say(line)

    for line in damaged:
        say_once(line)
    if manifest is None:
        return None
    state = restore(Path(folder) / str(manifest.step), state, say=say_once)
    return Resumed(state, manifest.step, manifest.record)
