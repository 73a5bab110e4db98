"""What each key of a DeepSpeed config is in zerojax."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from zerojax.config import RunConfig, config_from_dict
from zerojax.deepspeed.batch import batch_of
from zerojax.deepspeed.reader import Reader
from zerojax.deepspeed.words import NOTES, OPTIMIZERS
from zerojax.errors import ZeroError

_ZERO = "zero_optimization"
Sections = dict[str, dict[str, Any]]


@dataclass
class Translation:
    """Settings, and what had to be left out of them.

    Attributes:
        sections: section -> key -> value, as a TOML file has them; only what the config decides.
        left_out: a line for each key without counterpart, "path = value: why".
        differs: a line for each that was translated and means something else in a detail.
    """

    sections: Sections = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def config(self) -> RunConfig:
        """The settings, checked.

        Raises:
            ConfigError: a value that zerojax refuses.
        """
        return config_from_dict(self.sections, origin="the translated config")

    def toml(self, origin: str) -> str:
        """A file that `load_config` reads, with everything left out in comments.

        Args:
            origin: the name of the DeepSpeed config.
        """
        lines = [f"Made from {origin} by zerojax from-deepspeed."]
        for title, items in (("Without counterpart:", self.left_out), ("Differs:", self.differs)):
            lines += ["", title, *(f"- {item}" for item in items)] if items else []
        comments = "".join(f"# {_printable(line)}".rstrip() + "\n" for line in lines)
        return f"{comments}\n{tomli_w.dumps({name: own for name, own in self.sections.items() if own})}"

    def set(self, section: str, **values: Any) -> None:
        """Add settings."""
        self.sections.setdefault(section, {}).update(values)


def translate(data: Any, *, nodes: int = 0, local: int = 0) -> Translation:
    """Translate a DeepSpeed config.

    Args:
        data: the JSON object.
        nodes: that it shall run on; 0 where it is not known.
        local: devices of a node; 0 where it is not known.

    Raises:
        ZeroError: the config contradicts itself or has values of wrong types; or it leaves the batch size
            to the number of devices, and that is not known.
    """
    if not isinstance(data, dict):
        raise ZeroError("a DeepSpeed config is a JSON object")
    reader, result = Reader(data), Translation()
    partition = reader.take(f"{_ZERO}.zero_hpz_partition_size", int, 1)
    if partition > 1 and local and partition != local:
        result.differs.append(
            f"{_ZERO}.zero_hpz_partition_size = {partition}: the secondary copy is spread over the {local} "
            "devices of a node, whatever their number"
        )
    local = local or (partition if partition > 1 else 0)
    batch, accumulate = batch_of(reader, nodes * local)
    result.set("train", batch_size=batch, accumulate=accumulate)
    if nodes or local:
        result.set("mesh", nodes=nodes, local=local)
    _zero(reader, result, hpz=partition > 1)
    for part in (_precision, _optimizer, _schedule, _logs):
        part(reader, result)
    for path, why in NOTES.items():
        reader.note(path, why)
    result.left_out = reader.notes()
    result.config().zero.to_zero(accumulate=accumulate)
    return result


def _zero(reader: Reader, result: Translation, *, hpz: bool) -> None:
    stage = reader.take(f"{_ZERO}.stage", int, 0)
    weights = reader.take(f"{_ZERO}.zero_quantized_weights", bool, False)
    grads = reader.take(f"{_ZERO}.zero_quantized_gradients", bool, False)
    if stage < 3 and (weights or grads or hpz):
        raise ZeroError(f"{_ZERO}: ZeRO++'s options need stage 3, and stage is {stage}")
    if weights and grads and hpz:
        result.set("zero", preset="zero++")
        return
    result.set("zero", preset="zero3")
    if stage != 3:
        result.set("zero", stage=stage)
    if weights:
        result.set("zero", weights="int8")
    if hpz:
        result.set("zero", hpz=True)
    if grads:
        result.set("zero", grads=["int4", "int4"])


def _precision(reader: Reader, result: Translation) -> None:
    bf16 = reader.take("bf16.enabled", bool, False) | reader.take("bfloat16.enabled", bool, False)
    fp16 = reader.take("fp16.enabled", bool, False)
    if bf16 and fp16:
        raise ZeroError("bf16.enabled and fp16.enabled exclude each other")
    result.set("zero", compute_dtype="bfloat16" if bf16 or fp16 else "float32")
    if fp16:
        result.differs.append(
            "fp16.enabled = True: becomes bfloat16, whose range needs no loss scaling; a step whose loss or "
            "gradient is not finite is skipped all the same, and train.max_skips of them in a row end the run"
        )
    result.set("optimizer", clip_norm=reader.take("gradient_clipping", float, 0.0))
    sent = reader.take("communication_data_type", str)
    exact = "grads" not in result.sections["zero"] and result.sections["zero"]["preset"] == "zero3"
    if sent == "fp32" and exact:
        result.set("zero", grads=["fp32", "fp32"])
    elif sent is not None:
        result.differs.append(
            f"communication_data_type = {sent!r}: gradients travel in the compute dtype, or quantized "
            "(zero.grads says otherwise)"
        )


def _optimizer(reader: Reader, result: Translation) -> None:
    kind = reader.take("optimizer.type", str)
    if kind is None:
        if not reader.given("optimizer"):
            result.differs.append(
                "there is no optimizer: the script chose it, and [optimizer] must name it now"
            )
        return
    name, remark = OPTIMIZERS.get(kind.lower(), ("adamw", "is not there: adamw stands in its place"))
    if remark:
        result.differs.append(f"optimizer.type = {kind!r}: {remark}")
    at = "optimizer.params"
    betas = reader.take(f"{at}.betas", list, [0.9, 0.999] if name != "lion" else [0.9, 0.99])
    if len(betas) != 2 or not all(isinstance(b, int | float) for b in betas):
        raise ZeroError(f"{at}.betas = {betas!r} should be two numbers")
    beta1, beta2 = map(float, betas)
    if name in ("sgd", "muon"):
        beta1 = reader.take(f"{at}.momentum", float, 0.0 if name == "sgd" else 0.95)
    decay = reader.take(f"{at}.weight_decay", float, 0.0)
    result.set(
        "optimizer",
        name=name,
        learning_rate=reader.take(f"{at}.lr", float, 1e-3),
        beta1=beta1,
        beta2=beta2,
        eps=reader.take(f"{at}.eps", float, 1e-8),
        weight_decay=decay,
    )
    if decay:
        result.differs.append(
            f"{at}.weight_decay = {decay}: pulls on kernels and embeddings, not on norms and biases"
        )
    if not reader.take(f"{at}.adam_w_mode", bool, True):
        result.differs.append(
            f"{at}.adam_w_mode = False: weight decay is decoupled, never added to gradients"
        )
    if not reader.take(f"{at}.bias_correction", bool, True):
        result.differs.append(f"{at}.bias_correction = False: moments are always corrected")
    reader.take(f"{at}.torch_adam", bool)  # another implementation of the same


def _schedule(reader: Reader, result: Translation) -> None:
    kind = reader.take("scheduler.type", str)
    at = "scheduler.params"
    schedules: dict[str, Callable[[], dict[str, Any]]] = {
        "WarmupLR": lambda: {"schedule": "constant"},
        "WarmupDecayLR": lambda: {"schedule": "linear", "final_fraction": 0.0},
        "WarmupCosineLR": lambda: {
            "schedule": "warmup-cosine",
            "final_fraction": reader.take(f"{at}.cos_min_ratio", float, 0.0001),
        },
    }
    if kind not in schedules:
        result.set("optimizer", schedule="constant", warmup_steps=0)
        if kind is not None:
            reader.note("scheduler", "no counterpart: the learning rate stays where the optimizer has it")
        return
    warmup = reader.take(f"{at}.warmup_num_steps", int, 1000)
    result.set("optimizer", **schedules[kind](), warmup_steps=warmup)
    if kind != "WarmupCosineLR":
        result.set("optimizer", learning_rate=reader.take(f"{at}.warmup_max_lr", float, 1e-3))
        if reader.take(f"{at}.warmup_type", str, "log") != "linear":
            result.differs.append(
                f"{at}.warmup_type = 'log', which is DeepSpeed's default: warm-up is linear"
            )
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if reader.take(f"{at}.{name}", float, 0.0):
            result.differs.append(f"{at}.{name}: the first step is at the peak divided by warmup_num_steps")
    steps = reader.take(f"{at}.total_num_steps", int)
    if steps is not None:
        result.set("train", steps=steps)
        if warmup > steps // 2:
            result.differs.append(f"{at}.warmup_num_steps = {warmup}: at most half of the steps warm up")


def _logs(reader: Reader, result: Translation) -> None:
    if (every := reader.take("steps_per_print", int)) is not None:
        result.set("log", every=every)
    trackers = [name for name in ("tensorboard", "wandb") if reader.take(f"{name}.enabled", bool, False)]
    result.set("log", trackers=trackers)
    if (project := reader.take("wandb.project", str)) is not None and "wandb" in trackers:
        result.set("log", project=project)
    if "steps" not in result.sections["train"]:
        result.differs.append("no number of steps: the script decided it, and train.steps must say it now")


def _printable(text: str) -> str:
    """Text without line breaks and other characters that no TOML comment may have."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
