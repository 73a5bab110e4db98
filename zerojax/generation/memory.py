"""The memory of a generation phase on a device, and the form of the weights that fits."""

import functools
from dataclasses import dataclass

import jax

from zerojax.formatting import size
from zerojax.generation.checks import abstract_model
from zerojax.generation.copy import Form, GenerationCopy
from zerojax.generation.engine import Engine
from zerojax.train.memory import device_bytes
from zerojax.train.spec import TrainSpec


@dataclass(frozen=True)
class GenerationMemory:
    """Bytes on one device in addition to the state, without the gathered or computed arrays of a layer.

    Attributes:
        form: the form of the weights.
        weights: bytes of the copy that it does not share with the state.
        cache: bytes of the key-value cache.
        slots: rows of the cache.
        length: tokens of a slot.
    """

    form: Form
    weights: int
    cache: int
    slots: int
    length: int

    @staticmethod
    def of(copy: GenerationCopy, engine: Engine) -> "GenerationMemory":
        """The memory of a copy and its engine."""
        cache = cache_bytes(copy.spec, engine)
        return GenerationMemory(copy.form, copy.new_bytes, cache, engine.slots, engine.length)

    def __str__(self) -> str:
        return (
            f"weights={self.form}: on each device {size(self.weights)} of weights, and {size(self.cache)} of "
            f"key-value cache for {self.slots} slots of {self.length} tokens"
        )


def cache_bytes(spec: TrainSpec, engine: Engine) -> int:
    """Bytes of the key-value cache of a device's slots."""
    bind = functools.partial(abstract_model, spec)
    return device_bytes(jax.eval_shape(lambda: engine.empty_cache(bind, engine.slots, engine.length)))


def fitting_form(spec: TrainSpec, engine: Engine, room: int, *, adapters: bool = True) -> Form:
    """The form that fits into ``room`` MiB of a device together with the cache: "compute" if possible."""

    def whole() -> int:
        copy = GenerationCopy.of(spec, "compute", adapters=adapters)
        return copy.device_bytes + cache_bytes(spec, engine)

    needed = spec.once(f"bytes of generating with {engine} {adapters}", whole)
    return "compute" if needed <= room << 20 else "gathered"
