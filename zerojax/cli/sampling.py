"""The common part of ``zerojax sample`` and ``zerojax chat``: options, and a run's model on one device."""

from dataclasses import dataclass

from zerojax import compilation_cache
from zerojax.cli.options import RunPath
from zerojax.cli.trained import as_stored, open_trained
from zerojax.errors import ConfigurationError
from zerojax.generation import Sampling
from zerojax.models import GPT
from zerojax.run.config import MeshSection
from zerojax.run.run_dir import RunFolder
from zerojax.train.gathering import gather_model

_MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class SamplingOptions:
    """How a command samples from a run's latest checkpoint.

    Attributes:
        run: The run's folder.
        tokens: Largest number of tokens to generate.
        temperature: Divisor of the logits; 0 always takes the likeliest token.
        top_k: Sample only from this many likeliest tokens.
        top_p: Sample from the fewest likeliest tokens whose probabilities sum to this.
        seed: The same seed and input give the same text.
        ema: Use the averaged weights (optimizer.ema_decay).
    """

    run: RunPath
    tokens: int = 300
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    ema: bool = False

    def __post_init__(self) -> None:
        """Refuse a number of tokens below 1, or more than fit into memory."""
        if not 1 <= self.tokens <= _MAX_TOKENS:
            raise ConfigurationError(f"--tokens {self.tokens}: must be 1 to {_MAX_TOKENS:,}")

    @property
    def sampling(self) -> Sampling:
        """How to draw a token; raises ConfigurationError for options that contradict each other."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    def open_model(self, folder: RunFolder) -> GPT:
        """The run's model, whole on one device.

        Raises:
            ConfigurationError: as ``open_trained``, or the model is a reward model.
        """
        # One device computes with the stored weights, so wire formats do not matter.
        config, one = as_stored(folder.read_config()), MeshSection(nodes=1, local=1)
        config.model.check_language_model("generation")
        compilation_cache.apply_setting(config.cluster.compilation_cache)
        return gather_model(open_trained(folder, config, one, ema=self.ema).state)
