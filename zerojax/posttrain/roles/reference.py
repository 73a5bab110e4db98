"""The reference: a run's first weights, to measure the divergence from them."""

from dataclasses import dataclass, replace
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.run.build import RunSetup
from zerojax.run.config import RunConfig
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import WeightReader
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState
from zerojax.train.step import predict_step


@dataclass(frozen=True)
class Reference:
    """The model that a run started with.

    Attributes:
        state: a state of frozen weights; None if the run only trains adapters, because its base is the
            reference.
    """

    state: TrainState | None

    @classmethod
    def of(
        cls, config: RunConfig, folder: RunFolder, base: str, trained: TrainState, reader: WeightReader
    ) -> "Reference":
        """Load the reference of a run. Its first weights are at ``base`` (``Record.base``).

        Raises:
            ConfigurationError: they are no longer there.
        """
        setup = reference_setup(config, trained.spec)
        if setup is None:
            return cls(None)
        path = folder.path / base  # pathlib keeps an absolute ``base``
        if not path.exists():
            raise ConfigurationError(
                f"{folder.path} needs its first weights as the reference, but {path} is gone: put it back."
            )
        return cls(reader.weights(path, setup.initial_state(base=False)))

    def log_probs(self, trained: TrainState, batch: Any, fn: Any) -> Any:
        """``predict_step`` with the reference's weights."""
        if self.state is None:
            return predict_step(trained, batch, fn, adapters=False)
        return predict_step(self.state, batch, fn)


def reference_setup(config: RunConfig, spec: TrainSpec) -> RunSetup | None:
    """The setup of a reference's state; None if the policy's ``spec`` only trains adapters."""
    if all(leaf.frozen for leaf in spec.weights):
        return None
    # The policy reads the weights that it trains in the compute format, so the reference does, too.
    exact = [(leaf.name, config.zero.compute_format) for leaf in spec.weights if not leaf.frozen]
    zero = config.zero.replace(precise=(*config.zero.precise, *exact))
    return frozen_setup(replace(config, lora=None, zero=zero))


def frozen_setup(config: RunConfig) -> RunSetup:
    """The setup of a state of frozen weights, for inference only."""
    # Each node stores the weights, so none of them crosses nodes.
    zero = config.zero.replace(frozen=("*",), weights_delta=False, error_feedback=False)
    return RunSetup(replace(config, zero=zero), trains=False)
