"""Translates DeepSpeed configs into zerojax's settings."""

from zerojax.interop.deepspeed.translate import Translation, translate

__all__ = ["Translation", "translate"]
