"""TensorBoard: event files in `RUN/tensorboard`, written by tensorboardX."""

from collections.abc import Mapping
from typing import Any

from tensorboardX import SummaryWriter

from zerojax.run_folder import RunFolder


class TensorBoard:
    """Event files; a run that goes on adds another, which hides the steps that are done again."""

    def __init__(
        self, folder: RunFolder, project: str, settings: Mapping[str, Any], *, start: int, known: str | None
    ) -> None:
        """Open a new event file; arguments as `Tracker`."""
        del project, settings, known
        # Files are named by the second: the suffix keeps a quick restart from writing over the last one.
        self._writer = SummaryWriter(
            str(folder.path / self.identity), purge_step=start + 1, filename_suffix=f".from-{start}"
        )

    @property
    def identity(self) -> str:
        """The folder of the events, in the run's."""
        return "tensorboard"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Flush and close."""
        del failed
        self._writer.close()
