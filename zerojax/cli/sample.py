"""``zerojax sample RUN --prompt "..."``: generate text."""

from dataclasses import dataclass

import jax
import numpy as np

from zerojax import compilation_cache
from zerojax.cli.options import RunPath, read_options
from zerojax.cli.trained import as_stored, open_trained
from zerojax.errors import ConfigurationError
from zerojax.generation import Sampling, stream
from zerojax.models import GPT
from zerojax.run.config import MeshSection
from zerojax.run.data.dataset import open_tokenizer
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
        """The run's model, whole on one device."""
        # One device computes with the stored weights, so wire formats do not matter.
        config, one = as_stored(folder.read_config()), MeshSection(nodes=1, local=1)
        config.model.check_language_model("generation")
        compilation_cache.apply_setting(config.cluster.compilation_cache)
        return gather_model(open_trained(folder, config, one, ema=self.ema).state)


@dataclass(frozen=True)
class Options(SamplingOptions):
    """Generate text with a run's latest checkpoint, on one device.

    Attributes:
        prompt: Beginning of the text; if empty, the model begins a document.
    """

    prompt: str = ""


def run(arguments: list[str]) -> None:
    """Restore the newest checkpoint, generate, and print the text."""
    options = read_options(Options, "sample", arguments)
    how, folder = options.sampling, RunFolder(options.run)
    model = options.open_model(folder)
    tokenizer = open_tokenizer(folder.read_config().data, folder.data)
    prompt = tokenizer.encode(options.prompt.encode(errors="surrogateescape"))
    start, key = np.asarray([tokenizer.begin_of_text, *prompt], np.int32), jax.random.key(options.seed)
    new = stream(model, start, options.tokens, key=key, how=how, stop=tokenizer.end_of_text)
    print(tokenizer.decode([*prompt.tolist(), *new]))
