"""Rollouts by engines: the weights that engines get, and a rollout that they generate beside the training."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.exporting import check_quantizable, plan_export
from zerojax.interop.huggingface.fp8_blocks import FP8Blocks
from zerojax.log import warn
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.multihost.peers.handshake import VARIABLE
from zerojax.multihost.watchdog import Watchdog
from zerojax.posttrain.engines.client import Engine, EngineLost, EngineRefused
from zerojax.posttrain.engines.pool import EngineGenerator, EnginePool
from zerojax.posttrain.engines.weights import EngineWeights, ExportedWeights, SentWeights, Weights
from zerojax.posttrain.processes import any_process
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.posttrain.settings import longest_row
from zerojax.run.config import RunConfig
from zerojax.run.run_dir import RunFolder
from zerojax.train.state import TrainState

_LOOK_SECONDS = 1.0  # between looks at a rollout of the engines
Make = Callable[[EngineGenerator, Callable[[], bool]], Rollout]
"""Makes a rollout by a generator, and stops early once the function returns True."""


class EngineRollouts:
    """The engines of a run, the weights that they have, and the rollout that they generate.

    Args:
        engines: their clients.
        weights: brings weights to their hosts.
    """

    def __init__(self, engines: Sequence[Engine], weights: EngineWeights) -> None:
        self._pool, self._publisher = EnginePool(engines, weights.arrive), weights
        self._weights: Weights | None = None
        self._pending: Future[Rollout] | None = None
        self._stop = threading.Event()  # set to end a rollout early; the run then ends
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engines")

    @classmethod
    def open(cls, config: RunConfig, folder: RunFolder, abstract: TrainState) -> tuple[Self, list[str]]:
        """The engines of the settings, and a line about each that does not respond.

        Raises:
            ConfigurationError: an engine responds, but cannot be used; or the model cannot be exported.
        """
        settings = config.posttrain
        weights = weights_for_engines(config, folder, abstract)
        engines = [Engine(url, settings.engine_seconds, config.model.vocab_size) for url in settings.engines]
        notes = run_on_process_zero(lambda: [*filter(None, (_check(one, config) for one in engines))])
        return cls(engines, weights), notes

    def start(self, state: TrainState, step: int, make: Make) -> Future[Rollout]:
        """Publish the weights of ``step`` unless engines have them, and let ``make`` generate with them.

        All processes call it together. It first waits for the rollout before.
        """
        if self._pending is not None:
            self.wait(self._pending)
        if self._weights is None or self._weights.step != step:
            self._weights = self._publisher.publish(state, step)
        generator = EngineGenerator(self._pool, self._weights)
        self._pending = self._thread.submit(make, generator, self._stop.is_set)
        return self._pending

    def wait(
        self,
        pending: Future[Rollout],
        watchdog: Watchdog | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Rollout:
        """The rollout, once every process has its own. If a process must stop, all of them end it early.

        The watchdog waits along: engines have their own time limit, and without engines a run waits.
        """
        said = ""
        while True:
            waits = not wait([pending], _LOOK_SECONDS).done
            waits, stops = any_process(waits, stopping())
            if stops:
                self._stop.set()
            if not waits:
                return pending.result()
            if (why := self._pool.nothing_works) and not said:
                warn(f"the run waits for an engine: {why}")
            said = why
            if watchdog is not None:
                watchdog.phase("generation by engines")

    @property
    def stops(self) -> bool:
        """Whether a process must stop, so that no other rollout is needed."""
        return self._stop.is_set()

    def close(self) -> None:
        """End the rollout that engines generate, if any."""
        self._stop.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._publisher.close()


def weights_for_engines(config: RunConfig, folder: RunFolder, abstract: TrainState) -> EngineWeights:
    """Brings weights to engines in the way of the settings.

    Raises:
        ConfigurationError: the model cannot be exported, quantized or sent, or there is no token.
    """
    settings, target = config.posttrain, plan_export(abstract, config, folder, None)
    how = FP8Blocks((128, 128)) if settings.engine_weights == "fp8-blocks" else None
    if how is not None:
        check_quantizable(abstract, target, how)
    if not settings.engine_receivers:
        place = Path(settings.engine_folder) if settings.engine_folder else folder.path / "weights"
        return ExportedWeights(config, folder, target, place, how)
    if abstract.spec.frozen:
        raise ConfigurationError(
            "posttrain.engine_receivers get trained weights only, but this run has frozen ones: leave them "
            "out, and the run writes all weights to posttrain.engine_folder"
        )
    if not (token := os.environ.get(VARIABLE, "").strip()):
        raise ConfigurationError(
            f"posttrain.engine_receivers need the job's secret: set {VARIABLE} for this run and for the "
            "receivers. openssl rand -hex 32 makes one"
        )
    return SentWeights(config, folder, token, how)


def _check(engine: Engine, config: RunConfig) -> str:
    """A line about an engine that does not respond, or ""."""
    try:
        fp8 = config.posttrain.engine_weights == "fp8-blocks"
        engine.check(longest_row(config), config.posttrain.temperature, config.model.tied, fp8)
    except EngineRefused as why:
        raise ConfigurationError(
            f"posttrain.engines: {why}. Engines are vLLM 0.32 or newer, started with --enable-scale-out and "
            "VLLM_SERVER_DEV_MODE=1 (docs/posttrain.md)"
        ) from why
    except EngineLost as why:
        return f"{why}; the run goes on without it, and gives it the weights once it responds"
    return ""
