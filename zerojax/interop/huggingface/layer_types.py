"""Differences between layers in config.json: a sliding window (``layer_types``), or no rotary positions."""

from collections.abc import Callable, Mapping
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import ANY, Entry, Fields, key
from zerojax.models.config import GPTConfig
from zerojax.validation.untrusted import short

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_FIRST_WORDS = {"mamba": LINEAR, "attention": FULL}
Kinds = Callable[[ConfigKeys, Fields], list[str]]
"""The kind of each layer in files without layer_types, from other keys and the fields so far."""


def renamed(types: list[Any]) -> list[Any]:
    """``layer_types`` with the words of transformers 5 in place of older words."""
    return [_FIRST_WORDS.get(kind, kind) if isinstance(kind, str) else kind for kind in types]


def checked_types(types: list[Any], layers: int, one: str, other: str) -> list[str]:
    """``layer_types``, if it has one of two words for each layer."""
    if len(types) != layers or not all(kind in (one, other) for kind in types):
        raise ConfigurationError(
            f"layer_types = {short(types)} must be {layers} words, each {one!r} or {other!r}"
        )
    return types


def windows(kinds: Kinds, window: int | None = 4096, *, switch: bool = False) -> Entry:
    """The layers that attend within a sliding window: ``layer_types`` and ``sliding_window``.

    ``kinds`` and ``window`` are the defaults for files without these keys. With ``switch``,
    use_sliding_window turns the window on.
    """

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        width = keys.nullable("sliding_window", int, window)
        default = kinds(keys, found)
        given = keys.take("layer_types", list, None)
        if switch and not keys.take("use_sliding_window", bool, False):
            # Here some of transformers' kernels apply the window, and others do not.
            if width is not None and SLIDING in (given or ()):
                raise ConfigurationError(
                    f"use_sliding_window = false contradicts layer_types, which has {SLIDING!r}: change one"
                )
            width = None
        types = checked_types(default if given is None else given, len(default), FULL, SLIDING)
        if width is None or SLIDING not in types:
            return {"rope_local_theta": None}
        if FULL not in types:
            return {"sliding_window": width}
        pattern = types.index(FULL) + 1
        if pattern > 1 and types == periodic(len(types), pattern):
            return {"sliding_window": width, "sliding_window_pattern": pattern}
        layers = tuple(i for i, kind in enumerate(types) if kind == SLIDING)
        return {"sliding_window": width, "sliding_window_layers": layers}

    def write(model: GPTConfig) -> Mapping[str, Any]:
        types = [SLIDING if windowed else FULL for windowed in model.windowed]
        keys = {"use_sliding_window": SLIDING in types} if switch else {}
        return keys | {"layer_types": types, "sliding_window": model.sliding_window}

    fields = ("sliding_window", "sliding_window_pattern", "sliding_window_layers")
    return Entry(read, write, lambda _: dict.fromkeys(fields, ANY))


def periodic(layers: int, pattern: int) -> list[str]:
    """Kinds of layers where every ``pattern``-th has full attention."""
    return [SLIDING if number % max(pattern, 1) else FULL for number in range(1, layers + 1)]


def patterned(keys: ConfigKeys, found: Fields) -> list[str]:
    """Kinds of layers by ``sliding_window_pattern``, which may be text if layer_types is set."""
    if keys.take("layer_types", list, None) is not None:
        keys.unused("sliding_window_pattern")
        return [FULL] * found["layers"]
    return periodic(found["layers"], keys.take("sliding_window_pattern", int, 4))


def full_unrotated(*, always: bool) -> Entry:
    """Leave layers without the window unrotated.

    If no layer has a window, all are rotated. With ``always`` such a model is refused, because it would
    rotate none.
    """

    def read(keys: ConfigKeys, found: Fields) -> Fields:
        window = found.get("sliding_window")
        if window is None and (always or keys.nullable("sliding_window", int, None) is not None):
            raise ConfigurationError("layer_types is supported only with a sliding window in some layers")
        return {"no_rope_layers": without_window(found)}

    def allowed(model: GPTConfig) -> Mapping[str, object]:
        needed = {"sliding_window": model.sliding_window or "a width"} if always else {}
        return needed | {"no_rope_layers": (without_window(vars(model)),)}

    return Entry(read, allowed=allowed)


def without_window(found: Fields) -> tuple[int, ...]:
    """The layers that attend to all earlier positions, if others have a window."""
    if found.get("sliding_window") is None:
        return ()
    layers, pattern = found.get("sliding_window_layers"), found.get("sliding_window_pattern")
    if layers is not None:
        return tuple(number for number in range(found["layers"]) if number not in layers)
    return () if pattern is None else tuple(range(pattern - 1, found["layers"], pattern))


def _last(keys: ConfigKeys, found: Fields) -> list[str]:
    first = keys.take("max_window_layers", int, 28)
    return [FULL if number < first else SLIDING for number in range(found["layers"])]


LAST_WINDOWS = (
    windows(_last, switch=True),
    Entry(write=lambda model: {"max_window_layers": [*model.windowed, True].index(True)}),
)
"""Qwen's windows: without layer_types, the first ``max_window_layers`` layers have no window."""


def _rotated(keys: ConfigKeys, found: Fields) -> list[int]:
    interval = max(keys.take("no_rope_layer_interval", int, 4), 1)
    return [int(number % interval > 0) for number in range(1, found["layers"] + 1)]


def _unrotated_layers(flags: list[Any], found: Fields) -> tuple[int, ...]:
    layers = found["layers"]
    if len(flags) < layers or not all(flag in (0, 1) for flag in flags):
        raise ConfigurationError(f"no_rope_layers = {short(flags)} must be {layers} numbers, each 0 or 1")
    return tuple(number for number in range(layers) if not flags[number])


NO_ROPE = key(
    "no_rope_layers",
    "no_rope_layers",
    list,
    _rotated,
    decode=_unrotated_layers,
    written=lambda model: [int(kind != "none") for kind in model.rotations],
)
"""SmolLM3's ``no_rope_layers``: a 0 for each layer without rotary positions, and a 1 for others."""


def unrotated(_: ConfigKeys, found: Fields) -> list[str]:
    """SmolLM3's kinds of layers: a window in layers without rotary positions."""
    return [SLIDING if number in found["no_rope_layers"] else FULL for number in range(found["layers"])]
