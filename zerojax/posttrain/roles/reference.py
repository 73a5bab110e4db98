"""The reference: the weights that a run began with, to measure how far it has moved from them."""

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
    """The model that a run began with.

    Attributes:
        state: a state of frozen weights; None for a run of adapters alone, whose own base it is.
    """

    state: TrainState | None

    @classmethod
    def of(
        cls, config: RunConfig, folder: RunFolder, base: str, trained: TrainState, reader: WeightReader
    ) -> "Reference":
        """The reference of a run, whose first weights are at ``base`` (``Record.base``).

        Raises:
            ConfigurationError: they are gone.
        """
        setup = reference_setup(config, trained.spec)
        if setup is None:
            return cls(None)
        path = folder.path / base  # an absolute one stands for itself
        if not path.exists():
            raise ConfigurationError(
                f"{folder.path} is compared with its first weights, which were in {path}: it is gone, put it "
                "back."
            )
        return cls(reader.weights(path, setup.initial_state(base=False)))

    def log_probs(self, trained: TrainState, batch: Any, fn: Any) -> Any:
        """``predict_step`` with the reference's weights."""
        if self.state is None:
            return predict_step(trained, batch, fn, adapters=False)
        return predict_step(self.state, batch, fn)


def reference_setup(config: RunConfig, spec: TrainSpec) -> RunSetup | None:
    """How the state of a reference is built; None if the policy, of this spec, trains adapters alone."""
    if all(leaf.frozen for leaf in spec.weights):
        return None
    # Weights that the policy trains are read in the compute format, and so are the reference's.
    exact = [(leaf.name, config.zero.compute_format) for leaf in spec.weights if not leaf.frozen]
    zero = config.zero.replace(precise=(*config.zero.precise, *exact))
    return frozen_setup(replace(config, lora=None, zero=zero))


def frozen_setup(config: RunConfig) -> RunSetup:
    """How a state of frozen weights, for inference alone, is built."""
    # Stored once per node, so that no byte of them crosses nodes.
    zero = config.zero.replace(frozen=("*",), weights_delta=False, error_feedback=False)
    return RunSetup(replace(config, zero=zero), trains=False)
