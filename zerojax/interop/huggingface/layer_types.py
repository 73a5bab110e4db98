"""What differs between layers in config.json: a sliding window (``layer_types``), or no rotary positions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import ANY, Entry
from zerojax.models import GPTConfig
from zerojax.validation.untrusted import short

FULL, SLIDING = "full_attention", "sliding_attention"
Kinds = Callable[[ConfigKeys, Mapping[str, Any]], list[str]]
"""The kind of each layer, where there are no layer_types, from other keys and the fields so far."""


@dataclass(frozen=True)
class Windows(Entry):
    """The layers that attend within a sliding window: ``layer_types`` and ``sliding_window``.

    Attributes:
        kinds: without layer_types.
        window: without sliding_window.
        switch: whether use_sliding_window turns the window on.
    """

    kinds: Kinds
    window: int | None = 4096
    switch: bool = False

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        window = keys.nullable("sliding_window", int, self.window)
        if self.switch and not keys.take("use_sliding_window", bool, False):
            window = None
        default = self.kinds(keys, found)
        types = keys.take("layer_types", list, default)
        if len(types) != len(default) or not all(kind in (FULL, SLIDING) for kind in types):
            raise ConfigurationError(
                f"layer_types = {short(types)}: {len(default)} of {FULL!r} and {SLIDING!r} are supported"
            )
        if window is None or SLIDING not in types:
            found.pop("rope_local_theta", None)
            return
        found["sliding_window"] = window
        if FULL not in types:
            return
        pattern = types.index(FULL) + 1
        if pattern > 1 and types == periodic(len(types), pattern):
            found["sliding_window_pattern"] = pattern
        else:
            found["sliding_window_layers"] = tuple(i for i, kind in enumerate(types) if kind == SLIDING)

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        types = [SLIDING if windowed else FULL for windowed in model.windowed]
        switch = {"use_sliding_window": SLIDING in types} if self.switch else {}
        return switch | {"layer_types": types, "sliding_window": model.sliding_window}

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        del model
        return dict.fromkeys(("sliding_window", "sliding_window_pattern", "sliding_window_layers"), ANY)


def periodic(layers: int, pattern: int) -> list[str]:
    """Kinds of layers of which every ``pattern``-th has full attention."""
    return [SLIDING if number % max(pattern, 1) else FULL for number in range(1, layers + 1)]


class LastWindows(Windows):
    """Qwen's: without layer_types, ``max_window_layers`` tells how many layers have no window."""

    def __init__(self) -> None:
        super().__init__(_last, switch=True)

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        first = model.windowed.index(True) if any(model.windowed) else model.layers
        return {**super().write(model), "max_window_layers": first}


def _last(keys: ConfigKeys, found: Mapping[str, Any]) -> list[str]:
    first = keys.take("max_window_layers", int, 28)
    return [FULL if number < first else SLIDING for number in range(found["layers"])]


class NoRope(Entry):
    """SmolLM3's: ``no_rope_layers`` has a 0 for each layer without rotary positions, and a 1 for others."""

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        layers, interval = found["layers"], max(keys.take("no_rope_layer_interval", int, 4), 1)
        flags = keys.take(
            "no_rope_layers", list, [int(number % interval > 0) for number in range(1, layers + 1)]
        )
        if len(flags) < layers or not all(flag in (0, 1) for flag in flags):
            raise ConfigurationError(f"no_rope_layers = {short(flags)}: {layers} of 0 and 1 are supported")
        found["no_rope_layers"] = tuple(number for number in range(layers) if not flags[number])

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        return {"no_rope_layers": [int(kind != "none") for kind in model.rotations]}

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        del model
        return {"no_rope_layers": ANY}


def unrotated(keys: ConfigKeys, found: Mapping[str, Any]) -> list[str]:
    """SmolLM3's kinds: a window in the layers without rotary positions."""
    del keys
    return [SLIDING if number in found["no_rope_layers"] else FULL for number in range(found["layers"])]
