"""``zerojax sample RUN --prompt "..."``: generate text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro

from zerojax import gather_model
from zerojax.cli.options import read_options
from zerojax.cli.trained import as_stored, open_trained
from zerojax.errors import ConfigurationError
from zerojax.models import Sampling, generate
from zerojax.run.config import MeshSection
from zerojax.run.data import open_tokenizer
from zerojax.run.run_dir import RunFolder

_MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Options:
    """Generate text with a run's latest checkpoint, on one device.

    Attributes:
        run: The run's folder.
        prompt: Beginning of the text; empty for the beginning of a document.
        tokens: Number of tokens to generate, unless the text ends earlier.
        temperature: Divisor of the logits; 0 always takes the likeliest token.
        top_k: Sample from this many likeliest tokens only.
        top_p: Sample from the fewest likeliest tokens whose probabilities sum to this.
        seed: The same seed gives the same text.
        ema: Use the averaged weights (optimizer.ema_decay).
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    prompt: str = ""
    tokens: int = 300
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    ema: bool = False

    def __post_init__(self) -> None:
        """Refuse a number of tokens below 1, or more than fit into memory.

        Raises:
            ConfigurationError: names the option.
        """
        if not 1 <= self.tokens <= _MOST_TOKENS:
            raise ConfigurationError(f"--tokens {self.tokens}: must be 1 to {_MOST_TOKENS:,}")


def run(arguments: list[str]) -> None:
    """Restore the newest checkpoint, generate, and print the text."""
    options = read_options(Options, "sample", arguments)
    folder = RunFolder(options.run)
    config = folder.read_config()
    # One device computes with the weights as they are stored: wire formats do not matter.
    trained = open_trained(folder, as_stored(config), MeshSection(nodes=1, local=1), ema=options.ema)
    tokenizer = open_tokenizer(config.data, folder.data)
    prompt = tokenizer.encode(options.prompt.encode())
    start = jnp.asarray([tokenizer.begin_of_text, *prompt.tolist()], jnp.int32)
    new = generate(
        gather_model(trained.state),
        start[None, :],
        options.tokens,
        key=jax.random.key(options.seed),
        how=Sampling(options.temperature, options.top_k, options.top_p),
        stop=tokenizer.end_of_text,
    )
    print(tokenizer.decode([*prompt.tolist(), *new[0].tolist()]))
