"""Going on from the newest checkpoint, in a training loop of one's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zerojax.multihost.agreement import from_first
from zerojax.run.checkpoints.manifest import Record, read_manifest
from zerojax.run.checkpoints.restore import restore
from zerojax.run.checkpoints.select import newest_valid, set_damaged_aside
from zerojax.train.state import TrainState


class Resumed(NamedTuple):
    """Where a run stands.

    Attributes:
        state: the model and its optimizer.
        step: that the checkpoint was saved as.
        record: what was noted with it: ``position``, of the data, for example.
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
    """Go on from the newest sound checkpoint of a folder, whatever mesh, stage or wire format wrote it.

    In several processes all call: the first one chooses, and all take the same. Damaged checkpoints that are
    newer are moved aside (`400.damaged`), so that their steps can be saved again.

    Args:
        folder: of the checkpoints, as of `Checkpoints`; need not be there.
        state: of the program that shall go on, filled or abstract (``TrainState.abstract``); its values are
            not used.
        checksums: read the checkpoint's every byte first; without, only names and sizes are compared.
        say: prints a line for each that is damaged, on the first process.

    Returns:
        None where there is no checkpoint yet: then make a state by ``TrainState.create``.

    Raises:
        ZeroError: all checkpoints are damaged, or the newest is of another model or optimizer.
    """
    path = Path(folder)

    def choose() -> dict[str, Any]:
        choice = newest_valid(path, checksums=checksums)
        return {"step": choice.step, "lines": set_damaged_aside(path, choice)}

    found = from_first(choose)
    if jax.process_index() == 0:
        for line in found["lines"]:
            say(line)
    if found["step"] is None:
        return None
    chosen = path / str(found["step"])
    return Resumed(restore(chosen, state), found["step"], read_manifest(chosen).record)
