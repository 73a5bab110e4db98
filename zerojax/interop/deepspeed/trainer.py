"""The Hugging Face Trainer's arguments, which replace "auto" in a DeepSpeed config.

This follows transformers' ``HfTrainerDeepSpeedConfig.trainer_config_process`` and
``trainer_config_finalize``.
"""

import copy
import math
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.deepspeed.draft import ACCUMULATE, AUTO, MICRO, TRAIN
from zerojax.interop.deepspeed.words import NOTES
from zerojax.validation.untrusted import short

_OWN = (
    *(TRAIN, MICRO, "zero_optimization", "bf16", "bfloat16", "fp16", "optimizer", "scheduler"),
    *("gradient_clipping", "communication_data_type", "steps_per_print", "tensorboard", "wandb"),
)
_KEYS = frozenset([*_OWN, *(path.partition(".")[0] for path in NOTES)])
"""DeepSpeed's tables and keys, without the key that the Trainer's arguments have as well."""

_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    ACCUMULATE: 1,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "max_steps": -1,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "lr_scheduler_type": "linear",
    "bf16": False,
    "fp16": False,
}
"""The arguments that are read, and the Trainer's defaults."""

_FILLED = {
    MICRO: "per_device_train_batch_size",
    ACCUMULATE: ACCUMULATE,
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
}
"""DeepSpeed's key -> the argument that fills it in."""

_SCHEDULERS = {
    "linear": ("WarmupDecayLR", {"warmup_max_lr": AUTO, "total_num_steps": AUTO}),
    "cosine": ("WarmupCosineLR", {"total_num_steps": AUTO, "cos_min_ratio": 0.0}),
    "constant": ("WarmupLR", {"warmup_max_lr": AUTO}),
    "constant_with_warmup": ("WarmupLR", {"warmup_max_lr": AUTO}),
}
"""The Trainer's schedulers that DeepSpeed also has."""


def check_deepspeed(data: dict[str, Any]) -> None:
    """Refuse a JSON file that is no DeepSpeed config."""
    # The Trainer has flags of the same names as two of DeepSpeed's tables.
    flags = {name for name in ("bf16", "fp16") if isinstance(data.get(name), bool)}
    if _KEYS & data.keys() - flags:
        return
    if {"per_device_train_batch_size", "learning_rate", "lr_scheduler_type"} & data.keys():
        raise ConfigurationError(
            "these are arguments of the Hugging Face Trainer, not a DeepSpeed config. Name the config that "
            "the argument deepspeed names, and this file by --trainer-args."
        )
    raise ConfigurationError(
        f"the file has no key of DeepSpeed, such as zero_optimization or {TRAIN}, but {short(sorted(data))}. "
        "Name the JSON file that is passed to deepspeed.initialize."
    )


def read_arguments(trainer: Any) -> dict[str, Any]:
    """The Trainer's arguments that are used, with its defaults.

    Raises:
        ConfigurationError: they are no JSON object, or an argument has the wrong type.
    """
    if not isinstance(trainer, dict):
        raise ConfigurationError("--trainer-args: the Trainer's arguments must be a JSON object")
    read = dict(_DEFAULTS)
    for name, default in _DEFAULTS.items():
        value = trainer.get(name)
        number = type(default) in (int, float) and type(value) in (int, float)
        if value is None:
            continue
        if not number and type(value) is not type(default):
            raise ConfigurationError(
                f"--trainer-args: {name} = {short(value)} should be like its default, {default!r}"
            )
        read[name] = value
    return read


def filled_in(data: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config with the arguments of ``read_arguments`` in place of "auto".

    A config without an optimizer or a scheduler gets the Trainer's own.
    """
    data = copy.deepcopy(data)
    parameters = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
    data.setdefault("optimizer", {"type": "AdamW", "params": parameters})
    if "scheduler" not in data:
        kind, parameters = _SCHEDULERS.get(
            arguments["lr_scheduler_type"], (arguments["lr_scheduler_type"], {})
        )
        parameters = {"warmup_num_steps": AUTO, "warmup_type": "linear", **parameters}
        data["scheduler"] = {"type": kind, "params": parameters}
    steps = arguments["max_steps"] if arguments["max_steps"] > 0 else None  # it depends on the data set
    warmup, ratio = arguments["warmup_steps"], arguments["warmup_ratio"]
    if not warmup and ratio:
        warmup = None if steps is None else math.ceil(ratio * steps)
    values = {path: arguments[name] for path, name in _FILLED.items()} | {
        "optimizer.params.betas": [arguments["adam_beta1"], arguments["adam_beta2"]],
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_num_steps": warmup,
        "scheduler.params.total_num_steps": steps,
    }
    for path, value in values.items():
        _fill(data, path.split("."), value)
    if data.get(TRAIN) == AUTO:
        del data[TRAIN]  # follows from the other two
    return data


def _fill(data: dict[str, Any], keys: list[str], value: Any) -> None:
    """Replace "auto" at a path by a value, if it is known."""
    *tables, last = keys
    for key in tables:
        data = data.get(key, {})
        if not isinstance(data, dict):  # ``Draft.take`` refuses it
            return
    if data.get(last) == AUTO and value is not None:
        data[last] = value
