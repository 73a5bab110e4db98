"""From a DeepSpeed config to zerojax's settings."""

from zerojax.deepspeed.translate import Translation, translate

__all__ = ["Translation", "translate"]
