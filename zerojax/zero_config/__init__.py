"""The sharding options: settings with their documentation, their values, and the rules that they obey."""

from zerojax.zero_config.config import PRESETS as PRESETS
from zerojax.zero_config.config import ZeroConfig as ZeroConfig
