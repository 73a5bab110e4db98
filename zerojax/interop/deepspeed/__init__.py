"""From a DeepSpeed config to zerojax's settings."""

from zerojax.interop.deepspeed.translate import Translation, translate

__all__ = ["Translation", "translate"]
