"""``zerojax sample RUN --prompt "..."``: generate text."""

from dataclasses import dataclass

import jax
import numpy as np

from zerojax.cli.options import read_options
from zerojax.cli.sampling import SamplingOptions
from zerojax.generation import stream
from zerojax.run.data.dataset import open_tokenizer
from zerojax.run.run_dir import RunFolder


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
