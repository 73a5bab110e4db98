"""The sharding options: settings with their documentation, their values, and the rules that they obey."""

from zerojax.zero_config.config import PRESETS, ZeroConfig

__all__ = ["PRESETS", "ZeroConfig"]
