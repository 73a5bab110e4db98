"""What a generation phase holds on a device, and in which form its weights fit."""

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
    """Bytes on one device in addition to the state, without what is gathered or computed for a layer.

    Attributes:
        form: of the weights.
        weights: bytes of their copy that are not the state's.
        cache: bytes of the key-value cache.
        slots: of the cache.
        length: tokens of a slot.
    """

    form: Form
    weights: int
    cache: int
    slots: int
    length: int

    @staticmethod
    def of(copy: GenerationCopy, engine: Engine) -> "GenerationMemory":
        """The memory of a copy and the engine that runs on it."""
        cache = cache_bytes(copy.spec, engine)
        return GenerationMemory(copy.form, copy.new_bytes, cache, engine.slots, engine.length)

    def __str__(self) -> str:
        return (
            f"weights={self.form}: on each device {size(self.weights)} of weights, and {size(self.cache)} of "
            f"key-value cache for {self.slots} slots of {self.length} tokens"
        )


def cache_bytes(spec: TrainSpec, engine: Engine) -> int:
    """Bytes of the cache of a device's slots."""
    bind = functools.partial(abstract_model, spec)
    return device_bytes(jax.eval_shape(lambda: engine.empty_cache(bind, engine.slots, engine.length)))


def fitting_form(spec: TrainSpec, engine: Engine, room: int, *, adapters: bool = True) -> Form:
    """The form of the weights that fits into ``room`` MiB of a device: whole if possible."""

    def whole() -> int:
        copy = GenerationCopy.of(spec, "compute", adapters=adapters)
        return copy.device_bytes + cache_bytes(spec, engine)

    needed = spec.once(f"bytes of generating with {engine} {adapters}", whole)
    return "compute" if needed <= room << 20 else "gathered"
