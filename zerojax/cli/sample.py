"""`zerojax sample RUN --prompt "..."`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro

from zerojax import gather_model
from zerojax.cli.options import read_options
from zerojax.cli.trained import open_trained
from zerojax.errors import ZeroError
from zerojax.models import Sampling, generate
from zerojax.run.config import MeshSection, ZeroSection
from zerojax.run.data import open_tokenizer
from zerojax.run.run_dir import RunFolder

_MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Options:
    """Let a run's latest checkpoint write text, on one device.

    Attributes:
        run: The run's folder.
        prompt: What the text begins with; without one, it begins as a document does.
        tokens: How many tokens to write, unless the text ends before.
        temperature: What the logits are divided by; 0 always takes the likeliest token.
        top_k: Draw from this many likeliest tokens only.
        top_p: Draw from the fewest likeliest tokens that have this probability together.
        seed: The same seed writes the same text.
        ema: Take the average of the weights (optimizer.ema_decay) in their place.
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
        """Refuse a text of no tokens, or of more than fit into memory.

        Raises:
            ZeroError: naming the option.
        """
        if not 1 <= self.tokens <= _MOST_TOKENS:
            raise ZeroError(f"--tokens {self.tokens}: 1 to {_MOST_TOKENS:,}")


def run(arguments: list[str]) -> None:
    """Restore, generate, print."""
    options = read_options(Options, "sample", arguments)
    folder = RunFolder(options.run)
    config = folder.read_config()
    # One device computes with the master weights: how they travelled in training does not matter.
    config = replace(config, zero=ZeroSection())
    trained = open_trained(folder, config, MeshSection(nodes=1, local=1), ema=options.ema)
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
