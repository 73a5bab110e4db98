"""How engines get each version of the weights."""

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from zerojax.interop.huggingface.exporting import Target, export_model
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.run.build import is_first
from zerojax.run.config import RunConfig
from zerojax.run.run_dir import RunFolder
from zerojax.train.state import TrainState

_KEPT = 2  # versions on disk: an engine may still read the last one


class Weights(NamedTuple):
    """A version of the weights.

    Attributes:
        step: the optimizer step after which they were published.
        name: differs from the name of any other version, also of other starts of the run.
        folder: the Hugging Face folder that an engine loads.
    """

    step: int
    name: str
    folder: Path


class EngineWeights(Protocol):
    """Brings weights to the hosts of engines."""

    def publish(self, state: TrainState, step: int) -> Weights:
        """Start to bring the weights of a state there; all processes must call it."""
        ...

    def arrive(self, engine: int, weights: Weights, seconds: float) -> str:
        """Wait until the folder on the host of an engine, by its index, has the weights.

        Returns:
            Why it does not have them after some seconds; "" once it has.
        """
        ...

    def close(self) -> None:
        """Stop."""
        ...


@dataclass(frozen=True)
class ExportedWeights:
    """Writes each version as a Hugging Face folder, with the tensors of ``zerojax export``.

    Attributes:
        config: the run's settings.
        folder: the run's folder.
        target: the contents of an export.
        place: the folder of the versions, which the engines' hosts share.
    """

    config: RunConfig
    folder: RunFolder
    target: Target
    place: Path

    def publish(self, state: TrainState, step: int) -> Weights:
        """Write the weights, and remove old versions."""
        name = _name(step)
        out = self.place.absolute() / name
        export_model(state, self.config, self.folder, self.target, out)
        if is_first():
            versions = sorted(self.place.glob("step-*"), key=lambda path: path.stat().st_mtime)
            for old in versions[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        return Weights(step, name, out)

    def arrive(self, engine: int, weights: Weights, seconds: float) -> str:
        """Returns at once, because the folder appears when it is complete."""
        return ""

    def close(self) -> None:
        """Keep the last versions."""


def _name(step: int) -> str:
    return run_on_process_zero(lambda: f"step-{step}-{secrets.token_hex(4)}")
