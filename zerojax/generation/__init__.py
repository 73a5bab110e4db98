"""Generation: sampling, continuous batching with a key-value cache, and the weights of a generation phase."""

from zerojax.generation.generate import Completions as Completions
from zerojax.generation.generate import generate as generate
from zerojax.generation.sampling import Sampling as Sampling
from zerojax.generation.text import stream as stream
