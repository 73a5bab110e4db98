"""Adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT holds A as ``[rank, inputs]`` and B as ``[outputs, rank]``, also for GPT-2, whose weights are (in, out).
Each module has an adapter of its own. zerojax has one for query, key and value together, so each of the three
is written with the same A and with its own columns of B.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from flax import nnx
from jaxtyping import Float32

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.families import Family, describe_model
from zerojax.interop.huggingface.load import FLOATS
from zerojax.interop.huggingface.mapping import TensorPart
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.interop.huggingface.source import read_config_json
from zerojax.matmul.lora import LoRA
from zerojax.models import GPT, GPTConfig
from zerojax.validation.untrusted import short

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KINDS = ("lora_A", "lora_B")

_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",  # the names of the tensors tell which modules have adapters
        "fan_in_fan_out",
        "inference_mode",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
    }
)
_FIRST_VALUES = (True, "gaussian", "orthogonal", "eva")
"""Ways to draw A and B that leave the base as it is; LoftQ, PiSSA and others change it."""


def module_of(tensor: str) -> str:
    """The module of a weight, by the weight's name."""
    return tensor.removesuffix(".weight")


def key_of(module: str, kind: str) -> str:
    """The name of a tensor of a module's adapter; ``kind`` is one of ``KINDS``."""
    return f"base_model.model.{module}.{kind}.weight"


def target_modules(adapted: Collection[str], every: Collection[str]) -> list[str]:
    """The fewest ends of names by which PEFT finds the modules that have adapters, and no others."""
    found = set[str]()
    for module in adapted:
        words = module.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        found.add(
            next(end for end in ends if all(one in adapted for one in every if f".{one}".endswith(f".{end}")))
        )
    return sorted(found)


def write_config(folder: Path, lora: LoRA, family: Family, targets: list[str], base: str | None) -> None:
    """Write adapter_config.json.

    Args:
        folder: an existing folder.
        lora: the adapters' settings.
        family: of the model.
        targets: from ``target_modules``.
        base: the folder or name of the model that the adapters belong to, if it is known.
    """
    values = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": not family.linear,
        "inference_mode": True,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rslora,
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Factor:
    """An A of PEFT, with every B that it is multiplied by.

    Attributes:
        a: ``[inputs, rank]``.
        b: the columns of the weight -> ``[rank, outputs]``.
    """

    a: Float32[np.ndarray, "inputs rank"]
    b: list[tuple[slice, Float32[np.ndarray, "rank outputs"]]]


@dataclass(frozen=True)
class PeftAdapter:
    """PEFT's files of an adapter for a model, checked.

    Attributes:
        origin: their folder.
        own: the settings in the file: rank, alpha, dropout, rslora.
        factors: (name of a weight in ``TensorParts``, index of its block) -> its factors, no two with the
            same A.
        shapes: of the weights, by name.
    """

    origin: Path
    own: LoRA
    factors: Mapping[tuple[str, int], list[Factor]]
    shapes: Mapping[str, tuple[int, int]]

    @classmethod
    def open(cls, folder: Path, model: GPTConfig) -> "PeftAdapter":
        """Read and check both files.

        Raises:
            ConfigurationError: a file is missing or damaged, has an option that zerojax does not support, or
                belongs to another model; names the key or tensor.
        """
        own = _read_settings(folder)
        files, shapes = SafetensorFiles(folder, WEIGHTS), block_matrices(model)
        family, _ = describe_model(model)
        parts = family.parts(model, family.prefix)
        unread, factors = set(files.specs), dict[tuple[str, int], list[Factor]]()
        for name in shapes:
            for layer in range(model.layers):
                found: list[Factor] = []
                for part in parts[name]:
                    module = module_of(part.name.format(layer=layer))
                    _add(found, part, module, shapes[name], own, files, unread)
                if found:
                    factors[name, layer] = found
        if unread:
            raise ConfigurationError(
                f"{folder / WEIGHTS} has {short(min(unread))}, and no such module is among the matrices of "
                f"this {family.architecture}'s {model.layers} blocks: is the adapter for another model?"
            )
        return cls(folder, own, factors, shapes)

    @cached_property
    def count(self) -> int:
        """The most factors of a weight."""
        return max(map(len, self.factors.values()))

    @property
    def lora(self) -> LoRA:
        """The adapters that can hold these: of all factors of a weight side by side."""
        rank = self.count * self.own.rank
        alpha = self.own.scale * (math.sqrt(rank) if self.own.rslora else rank)
        names = sorted({name for name, _ in self.factors})
        targets = tuple(f"blocks/*/{name.removeprefix('block/')}" for name in names)
        return replace(self.own, rank=rank, alpha=alpha, targets=targets)


def block_matrices(model: GPTConfig) -> dict[str, tuple[int, int]]:
    """The shapes of the matrices in a block of a model, by their names in ``TensorParts``."""
    abstract = nnx.eval_shape(lambda: GPT(replace(model, scan=False, layers=1), rngs=nnx.Rngs(0)))
    found = {
        "/".join(("block", *map(str, path[2:]))): x.shape
        for path, x in nnx.to_flat_state(nnx.state(abstract, nnx.Param))
        if path[0] == "blocks" and len(x.shape) == 2
    }
    return {name: (shape[0], shape[1]) for name, shape in found.items()}


def _read_settings(folder: Path) -> LoRA:
    values = read_config_json(folder, CONFIG, "a PEFT adapter")
    # PEFT writes all of its options: those that are off are null, false or empty.
    keys = ConfigKeys({name: x for name, x in values.items() if x}, str(folder / CONFIG), _HARMLESS)
    keys.only("peft_type", "LORA")
    keys.only("task_type", "CAUSAL_LM")
    keys.only("bias", "none")
    keys.only("init_lora_weights", *_FIRST_VALUES)
    found = {
        "rank": keys.take("r", int),
        "alpha": keys.take("lora_alpha", float),
        "dropout": keys.take("lora_dropout", float, 0.0),
        "rslora": keys.take("use_rslora", bool, False),
    }
    keys.finish("cannot import an adapter with options other than those of LoRA and rsLoRA")
    try:
        return LoRA(**found)
    except ConfigurationError as error:
        raise ConfigurationError(f"{folder / CONFIG}: {error}") from error


def _add(
    found: list[Factor],
    part: TensorPart,
    module: str,
    shape: tuple[int, int],
    own: LoRA,
    files: SafetensorFiles,
    unread: set[str],
) -> None:
    """Add a module's adapter, if it has one, to the factors of its weight."""
    names = [key_of(module, kind) for kind in KINDS]
    if unread.isdisjoint(names):
        return
    outputs = len(range(shape[1])[part.columns])
    a, b = (
        _read(name, wanted, files)
        for name, wanted in zip(names, ((own.rank, shape[0]), (outputs, own.rank)), strict=True)
    )
    unread.difference_update(names)
    same = next((factor for factor in found if np.array_equal(factor.a, a)), None)
    if same is None:
        found.append(Factor(a, [(part.columns, b)]))
    else:
        same.b.append((part.columns, b))


def _read(name: str, shape: tuple[int, int], files: SafetensorFiles) -> Float32[np.ndarray, "columns rows"]:
    """A tensor, transposed."""
    if name not in files.specs:
        raise ConfigurationError(f"the files lack {name}")
    spec = files.specs[name]
    if spec.shape != shape:
        raise ConfigurationError(
            f"{name} has shape {spec.shape}, and {shape} would fit this model and {CONFIG}: is the adapter "
            "for another model?"
        )
    if spec.dtype not in FLOATS:
        raise ConfigurationError(f"{name} is of dtype {spec.dtype}: adapters are one of {', '.join(FLOATS)}")
    return files.read(name).astype(np.float32).T
