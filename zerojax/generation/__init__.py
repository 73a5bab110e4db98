"""Generation: sampling, continuous batching with a key-value cache, and the weights of a generation phase."""

from zerojax.generation.generate import Completions, generate
from zerojax.generation.sampling import Sampling
from zerojax.generation.text import stream

__all__ = ["Completions", "Sampling", "generate", "stream"]
