"""Which layers attend within a sliding window: ``layer_types`` of config.json."""

from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.models import GPTConfig
from zerojax.validation.untrusted import short

FULL, SLIDING = "full_attention", "sliding_attention"


def read_window(keys: ConfigKeys, window: int | None, default: list[str]) -> dict[str, Any]:
    """The model's fields of the window.

    Args:
        keys: of a config.json.
        window: its length, or None for none.
        default: the kind of each layer, where there are no layer_types.

    Raises:
        ConfigurationError: the layers with full attention are not at regular intervals.
    """
    types = keys.take("layer_types", list, default)
    if len(types) != len(default) or not all(kind in (FULL, SLIDING) for kind in types):
        raise ConfigurationError(
            f"layer_types = {short(types)}: {len(default)} of {FULL!r} and {SLIDING!r} are supported"
        )
    if window is None or set(types) == {FULL}:
        return {}
    if set(types) == {SLIDING}:
        return {"sliding_window": window}
    pattern = types.index(FULL) + 1
    if pattern == 1 or types != periodic(len(types), pattern):
        raise ConfigurationError(f"layer_types = {short(types)}: {FULL!r} must be in every n-th layer")
    return {"sliding_window": window, "sliding_window_pattern": pattern}


def periodic(layers: int, pattern: int) -> list[str]:
    """Kinds of layers of which every ``pattern``-th has full attention."""
    return [SLIDING if number % max(pattern, 1) else FULL for number in range(1, layers + 1)]


def write_types(model: GPTConfig) -> list[str]:
    """The kind of each layer."""
    return [SLIDING if windowed else FULL for windowed in model.windowed]
