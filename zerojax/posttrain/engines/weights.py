"""How engines get each version of the weights: as files that they can read, or as patches to their hosts."""

import secrets
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, override

from zerojax.interop.engines.publisher import Publisher
from zerojax.interop.huggingface.exporting import Target, export_model
from zerojax.interop.huggingface.fp8_blocks import FP8Blocks
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


class EngineWeights(ABC):
    """Brings weights to the hosts of engines."""

    @abstractmethod
    def publish(self, state: TrainState, step: int) -> Weights:
        """Start to bring a state's weights to all hosts; all processes must call it."""

    def arrive(self, engine: int, weights: Weights, seconds: float) -> str:
        """Wait until the folder on the host of an engine, by its index, has the weights.

        Returns:
            Why it does not have them after some seconds; "" once it has.
        """
        return ""

    def close(self) -> None:
        """Stop bringing weights to the hosts."""
        return


@dataclass(frozen=True)
class ExportedWeights(EngineWeights):
    """Writes each version as a Hugging Face folder with ``zerojax export``'s tensors, which appears complete.

    Attributes:
        config: the run's settings.
        folder: the run's folder.
        target: the contents of an export.
        place: the folder of the versions, which the engines' hosts share.
        how: the quantization of the linear layers; None for none.
    """

    config: RunConfig
    folder: RunFolder
    target: Target
    place: Path
    how: FP8Blocks | None = None

    @override
    def publish(self, state: TrainState, step: int) -> Weights:
        name = _name(step)
        out = self.place.absolute() / name
        export_model(state, self.config, self.folder, self.target, out, self.how)
        if is_first():
            versions = sorted(self.place.glob("step-*"), key=lambda path: path.stat().st_mtime)
            for old in versions[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        return Weights(step, name, out)


class SentWeights(EngineWeights):
    """Sends the changed elements to a receiver beside each engine (docs/engines.md).

    Args:
        config: the run's settings.
        folder: the run's folder.
        token: the job's secret.
        how: as ``ExportedWeights``.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, token: str, how: FP8Blocks | None = None
    ) -> None:
        self._config, self._folder, self._token, self._how = config, folder, token, how
        self._publisher: Publisher | None = None

    @override
    def publish(self, state: TrainState, step: int) -> Weights:
        settings = self._config.posttrain
        if self._publisher is None:
            self._publisher = Publisher(
                state,
                self._config,
                self._folder,
                settings.engine_receivers,
                token=self._token,
                dtype=None,
                how=self._how,
            )
        self._publisher.publish(state, step)
        return Weights(step, _name(step), Path(settings.engine_folder) / "current")

    @override
    def arrive(self, engine: int, weights: Weights, seconds: float) -> str:
        assert self._publisher is not None
        receiver = self._config.posttrain.engine_receivers[engine]
        if self._publisher.wait(weights.step, seconds, receiver):
            return ""
        serving = self._publisher.serving[receiver]
        why = self._publisher.errors.get(receiver, "it has not arrived")
        return f"the receiver {receiver} has version {serving} instead of {weights.step}: {why}"

    @override
    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _name(step: int) -> str:
    return run_on_process_zero(lambda: f"step-{step}-{secrets.token_hex(4)}")
