"""The Weights & Biases tracker; ``WANDB_MODE=offline`` writes to ``RUN/wandb`` for ``wandb sync``."""

from collections.abc import Mapping
from typing import Any

import wandb

from zerojax.run.run_dir import RunFolder


class Wandb:
    """One run in W&B, with the same id in all processes of this run."""

    def __init__(
        self, folder: RunFolder, project: str, settings: Mapping[str, Any], *, start: int, known: str | None
    ) -> None:
        """Begin or resume the run; arguments as for ``Tracker``."""
        del start
        self._run = wandb.init(
            project=project,
            name=folder.path.absolute().name,
            id=known,
            resume=None if known is None else "allow",
            dir=str(folder.path),
            config=dict(settings),
            reinit="create_new",
            settings=wandb.Settings(console="off", quiet=True),
        )
        self.identity: str = self._run.id
        # W&B drops steps below its last one, so the steps repeated after a crash would be missing.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass a row to the client's own process."""
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        """Wait until all values are sent."""
        self._run.finish(exit_code=int(failed))
