"""The translation of each key of a DeepSpeed config."""

import re
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from zerojax.errors import ConfigurationError
from zerojax.interop.deepspeed.draft import ACCUMULATE, FILLED_IN, MICRO, TRAIN, Draft
from zerojax.interop.deepspeed.trainer import check_deepspeed, filled_in, read_arguments
from zerojax.interop.deepspeed.words import NOTES, OPTIMIZERS
from zerojax.run.config import RunConfig, TrainSection, config_from_dict
from zerojax.validation.untrusted import printable, short
from zerojax.zero_config import ZeroConfig

_ZERO = "zero_optimization"
_HPZ = f"{_ZERO}.zero_hpz_partition_size"


@dataclass
class Translation:
    """Translated settings, and notes on keys without an exact counterpart.

    Attributes:
        sections: section -> key -> value, as in a TOML file; only settings that the config decides.
        left_out: a line for each key without a counterpart, "path = value: why".
        differs: a line for each translated key whose meaning differs in a detail.
    """

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def config(self) -> RunConfig:
        """The settings, checked.

        Raises:
            ConfigError: zerojax refuses a value.
        """
        return config_from_dict(self.sections, origin="the translated config")

    def toml(self, origin: str) -> str:
        """A file for ``load_config``; comments name its ``origin`` and the keys without a counterpart."""
        lines = [f"Made from {origin} by zerojax from-deepspeed."]
        for title, items in (("Without counterpart:", self.left_out), ("Differs:", self.differs)):
            lines += ["", title, *(f"- {item}" for item in items)] if items else []
        comments = "".join(f"# {printable(line)}".rstrip() + "\n" for line in lines)
        return f"{comments}\n{tomli_w.dumps({name: own for name, own in self.sections.items() if own})}"


def _finish(draft: Draft) -> Translation:
    """The translation, checked."""
    result = Translation(draft.sections, differs=[*draft.differs, *draft.remarks])
    try:
        config = result.config()
    except ConfigurationError as error:
        named = dict.fromkeys(path for name, path in draft.origins if _names(str(error), name))
        quoted = ", ".join(draft.quote(path) for path in named if draft.given(path))
        raise ConfigurationError(f"{quoted}: {error}" if quoted else str(error)) from error
    settings: dict[str, list[str]] = {}
    for name, path in draft.origins:
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        own = key not in draft.sections.get(section, {})
        settings.setdefault(path, []).append(f"{name} = {value!r}{', its default' * own}")
    for path, made in settings.items():
        if draft.is_auto(path):
            draft.note(path, f"{FILLED_IN}: here {' and '.join(made)}")
    result.left_out = draft.notes()
    return result


def _names(message: str, setting: str) -> bool:
    """Whether a message names a setting, "section.key"."""
    pattern = rf"\b({setting}|ZeroConfig\.{setting.partition('.')[2]})\b"
    return re.search(pattern, message) is not None


def translate(
    data: Any, *, nodes: int = 0, local: int = 0, batch_size: int | None = None, trainer: Any = None
) -> Translation:
    """Translate a DeepSpeed config.

    Args:
        data: the JSON object.
        nodes: number of nodes; 0 if unknown.
        local: devices per node; 0 if unknown.
        batch_size: the global batch, if the config leaves it to the script.
        trainer: the JSON object of the Hugging Face Trainer's arguments, which replace "auto".

    Raises:
        ConfigurationError: the config has no key of DeepSpeed, contradicts itself, or has values of wrong
            types or ranges. Or its batch size depends on the number of devices, which is unknown.
    """
    if not isinstance(data, dict):
        raise ConfigurationError("a DeepSpeed config must be a JSON object")
    check_deepspeed(data)
    arguments = None if trainer is None else read_arguments(trainer)
    draft = Draft(data if arguments is None else filled_in(data, arguments))
    if arguments is not None and arguments["max_steps"] > 0:
        draft.set("train", steps=arguments["max_steps"])
    partition = draft.take(_HPZ, int, 1) or 1
    if partition > 1 and local and partition != local:
        draft.differs.append(
            f"{_HPZ} = {partition}: the secondary partition is always spread over all devices of a node, "
            f"here {local}"
        )
    local = local or (partition if partition > 1 else 0)
    batch, accumulate = _batch(draft, nodes * local, batch_size)
    draft.set("train", batch_size=batch, accumulate=accumulate)
    draft.origins += [("train.batch_size", TRAIN), ("train.accumulate", ACCUMULATE), ("mesh.local", _HPZ)]
    if draft.is_auto(MICRO):
        draft.note(
            MICRO, f"{FILLED_IN}: here it follows from train.batch_size, train.accumulate and the mesh"
        )
    if nodes or local:
        draft.set("mesh", nodes=nodes, local=local)
    _zero(draft, hpz=partition > 1)
    for part in (_precision, _optimizer, _schedule, _logs):
        part(draft)
    for path, why in NOTES.items():
        draft.note(path, why)
    return _finish(draft)


def _batch(draft: Draft, world: int, given: int | None = None) -> tuple[int, int]:
    """The global batch and the number of micro-batches, on ``world`` devices (0 if unknown).

    Each of the three numbers follows from the other two, as in DeepSpeed's ``_set_batch_related_parameters``.
    With only one of the two sizes there is no accumulation. Without either, the training script chose the
    batch: the result is ``given``, or zerojax's default, rounded up so that it divides.
    """
    train, micro, accumulate = (draft.take(name, int) for name in (TRAIN, MICRO, ACCUMULATE))
    values = {TRAIN: train, MICRO: micro, ACCUMULATE: accumulate, "--batch-size": given}
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} = {value} must be at least 1")
    if given is not None and train not in (None, given):
        raise ConfigurationError(
            f"{TRAIN} = {train} contradicts --batch-size {given}: leave the option out, or edit the config"
        )
    named = TRAIN if train is not None else "--batch-size"
    train = given if train is None else train
    if train is not None and micro is None:
        return _without_micro(train, accumulate, world, named)
    if micro is None:
        return _default_batch(draft, accumulate or 1, world)
    if not world:
        raise ConfigurationError(
            f"{MICRO} = {micro} is the batch of one device: give the number of devices by --nodes and "
            "--gpus-per-node"
        )
    if train is None:
        accumulate = accumulate or 1
        return micro * accumulate * world, accumulate
    if accumulate is None and train % (micro * world):
        raise ConfigurationError(
            f"{named} = {train} does not divide into {MICRO} = {micro} on {world} devices"
        )
    accumulate = accumulate or train // (micro * world)
    if train != micro * accumulate * world:
        raise ConfigurationError(
            f"{named} = {train} is not {MICRO} = {micro} x {ACCUMULATE} = {accumulate} x {world} devices"
        )
    return train, accumulate


def _without_micro(train: int, accumulate: int | None, world: int, named: str) -> tuple[int, int]:
    if train % ((accumulate or 1) * (world or 1)):
        steps = f" into {ACCUMULATE} = {accumulate}" if accumulate else ""
        devices = f" {'on' if steps else 'over'} {world} devices" if world else ""
        raise ConfigurationError(f"{named} = {train} does not divide{steps}{devices}")
    return train, accumulate or 1


def _default_batch(draft: Draft, accumulate: int, world: int) -> tuple[int, int]:
    parts = accumulate * (world or 1)
    train = -(-TrainSection.batch_size // parts) * parts
    why = (
        "zerojax's default" if train == TrainSection.batch_size else "zerojax's default, rounded up to divide"
    )
    draft.remarks.append(
        f"the config has no batch size (the training script sets it): train.batch_size = {train} is {why}; "
        "--batch-size sets another"
    )
    return train, accumulate


def _zero(draft: Draft, *, hpz: bool) -> None:
    stage = draft.take(f"{_ZERO}.stage", int, 0, auto=3)
    weights = draft.take(f"{_ZERO}.zero_quantized_weights", bool, False)
    grads = draft.take(f"{_ZERO}.zero_quantized_gradients", bool, False)
    draft.origins.append(("zero.stage", f"{_ZERO}.stage"))
    if stage < 3 and (weights or grads or hpz):
        raise ConfigurationError(f"{_ZERO}: ZeRO++'s options need stage 3, not stage {stage}")
    every = weights and grads and hpz
    draft.set("zero", preset="zero++-paper" if every else "zero3")
    if stage != 3:
        draft.set("zero", stage=stage)
    _offload(draft)
    options = {"weights": (weights, "int8"), "hpz": (hpz, True), "grads": (grads, ["int4", "int4"])}
    draft.set("zero", **{name: value for name, (on, value) in options.items() if on and not every})


def _offload(draft: Draft) -> None:
    """The tables of offloading: which of optimizer state, master weights and weights are in host memory."""
    stores = {
        "optimizer": ("offload_optimizer", "cpu_offload"),
        "weights": ("offload_param", "cpu_offload_params"),
    }
    host = list[str]()
    for store, (table, flag) in stores.items():
        path = f"{_ZERO}.{table}"
        device = draft.take(f"{path}.device", str, "none")
        if device == "nvme":
            draft.differs.append(
                f"{path}.device = 'nvme': becomes host memory; zerojax keeps nothing on disks"
            )
        if device in ("cpu", "nvme") or draft.take(f"{_ZERO}.{flag}", bool, False):
            host.append(store)
        draft.origins.append(("zero.host", f"{path}.device"))
    if host == ["weights"]:
        host = ["optimizer", "weights"]
        draft.differs.append(
            f"{_ZERO}.offload_param: trained weights move together with the optimizer's state"
        )
    if host:
        draft.set("zero", host=host)


def _precision(draft: Draft) -> None:
    paths = [f"{name}.enabled" for name in ("bf16", "bfloat16", "fp16")]
    *bf16, fp16 = (draft.take(path, bool, False) for path in paths)
    if any(bf16) and fp16:
        raise ConfigurationError("bf16.enabled and fp16.enabled exclude each other")
    # "auto" leaves the dtype to the Trainer. The file does not say whether its user chose bf16 or fp16.
    if any(bf16) or fp16:
        draft.set("zero", compute_dtype="bfloat16")
    elif not any(map(draft.is_auto, paths)):
        draft.set("zero", compute_dtype="float32")
    for path in filter(draft.is_auto, paths):
        used = draft.sections["zero"].get("compute_dtype", f"{ZeroConfig.compute_dtype}, its default")
        draft.note(path, f"{FILLED_IN}: here zero.compute_dtype = {used}")
    if fp16:
        draft.differs.append(
            "fp16.enabled = True: becomes bfloat16, whose range needs no loss scaling. Steps with a "
            "non-finite loss or gradient are still skipped, and train.max_skips such steps in a row end the "
            "run"
        )
    draft.adopt("optimizer.clip_norm", "gradient_clipping", float, 0.0)
    sent = draft.take("communication_data_type", str)
    zero = draft.sections["zero"]
    if sent == "fp32" and "grads" not in zero and zero["preset"] == "zero3":
        draft.set("zero", grads=["fp32", "fp32"])
    elif sent is not None:
        draft.differs.append(
            f"communication_data_type = {sent!r}: gradients are sent in the compute dtype, or quantized (set "
            "zero.grads to change it)"
        )


def _optimizer(draft: Draft) -> None:
    kind = draft.take("optimizer.type", str)
    if kind is None:
        if not draft.given("optimizer"):
            draft.differs.append("the config has no optimizer (the script makes it): name it in [optimizer]")
        return
    name, remark = OPTIMIZERS.get(kind.lower(), ("adamw", "is not available: replaced by adamw"))
    if remark:
        draft.differs.append(f"optimizer.type = {short(kind)}: {remark}")
    at = "optimizer.params"
    draft.set("optimizer", name=name)
    draft.adopt("optimizer.learning_rate", f"{at}.lr", float, 1e-3)
    _betas(draft, name, at)
    draft.adopt("optimizer.eps", f"{at}.eps", float, 1e-8)
    if decay := draft.adopt("optimizer.weight_decay", f"{at}.weight_decay", float, 0.0):
        draft.differs.append(
            f"{at}.weight_decay = {decay}: applies to kernels and embeddings, not to norms and biases"
        )
    if draft.take(f"{at}.adam_w_mode", bool, True) is False:
        draft.differs.append(f"{at}.adam_w_mode = False: weight decay is decoupled, never added to gradients")
    if draft.take(f"{at}.bias_correction", bool, True) is False:
        draft.differs.append(f"{at}.bias_correction = False: moments are always corrected")
    draft.take(f"{at}.torch_adam", bool)  # only selects an implementation


def _betas(draft: Draft, name: str, at: str) -> None:
    momentum = name in ("sgd", "muon")
    betas = draft.take(f"{at}.betas", list, [0.9, 0.99] if name == "lion" else [0.9, 0.999])
    draft.origins += [("optimizer.beta1", f"{at}.betas"), ("optimizer.beta2", f"{at}.betas")]
    if betas is not None:
        if len(betas) != 2 or any(type(beta) not in (int, float) for beta in betas):
            raise ConfigurationError(f"{at}.betas = {short(betas)} should be two numbers")
        draft.set("optimizer", beta1=float(betas[0]), beta2=float(betas[1]))
    if momentum:
        draft.sections["optimizer"].pop("beta1", None)
        draft.adopt("optimizer.beta1", f"{at}.momentum", float, 0.0 if name == "sgd" else 0.95)


def _schedule(draft: Draft) -> None:
    kind = draft.take("scheduler.type", str)
    at = "scheduler.params"
    if draft.is_auto("scheduler.type"):
        return
    if kind not in _SCHEDULES:
        draft.set("optimizer", schedule="constant", warmup_steps=0)
        if kind is not None:
            draft.note("scheduler", "no counterpart: the learning rate stays constant")
        return
    draft.set("optimizer", **_SCHEDULES[kind])
    if kind == "WarmupCosineLR":
        draft.adopt("optimizer.final_fraction", f"{at}.cos_min_ratio", float, 0.0001)
    warmup = draft.adopt("optimizer.warmup_steps", f"{at}.warmup_num_steps", int, 1000)
    if kind != "WarmupCosineLR":
        draft.adopt("optimizer.learning_rate", f"{at}.warmup_max_lr", float, 1e-3)
        if draft.take(f"{at}.warmup_type", str, "log", auto="linear") != "linear":
            draft.differs.append(f"{at}.warmup_type = 'log', which is DeepSpeed's default: warm-up is linear")
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if draft.take(f"{at}.{name}", float, 0.0):
            draft.differs.append(f"{at}.{name}: the first step is at the peak divided by warmup_num_steps")
    steps = draft.adopt("train.steps", f"{at}.total_num_steps", int)
    if steps is not None and warmup is not None and warmup > steps // 2:
        draft.differs.append(f"{at}.warmup_num_steps = {warmup}: at most half of the steps warm up")


_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"schedule": "constant"},
    "WarmupDecayLR": {"schedule": "linear", "final_fraction": 0.0},
    "WarmupCosineLR": {"schedule": "warmup-cosine"},
}


def _logs(draft: Draft) -> None:
    draft.adopt("log.every", "steps_per_print", int)
    enabled = {name: draft.take(f"{name}.enabled", bool, False) for name in ("tensorboard", "wandb")}
    if not any(draft.is_auto(f"{name}.enabled") for name in enabled):
        draft.set("log", trackers=[name for name, on in enabled.items() if on])
    if (project := draft.take("wandb.project", str)) is not None and enabled["wandb"]:
        draft.set("log", project=project)
        draft.origins.append(("log.project", "wandb.project"))
    if "steps" not in draft.sections["train"]:
        draft.differs.append("the config has no number of steps (the script sets it): set train.steps")
