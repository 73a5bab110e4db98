"""What PEFT makes of its files, in numpy: Hu et al., "LoRA" (arXiv:2106.09685), section 4.1."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]


def settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def modules(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of each module that has an adapter, by the module's name in transformers."""
    found = load_file(folder / "adapter_model.safetensors")
    ends = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in found}
    key = "base_model.model.{}.lora_{}.weight".format
    assert found.keys() == {key(end, kind) for end in ends for kind in "AB"}
    return {end: (found[key(end, "A")], found[key(end, "B")]) for end in ends}


def merged(base: Tensors, folder: Path) -> Tensors:
    """The tensors of a model with an adapter added to its weights."""
    about = settings(folder)
    rank = about["r"]
    scale = about["lora_alpha"] / (math.sqrt(rank) if about["use_rslora"] else rank)
    out = dict(base)
    for module, (a, b) in modules(folder).items():
        added = scale * b @ a
        weight = base[f"{module}.weight"]
        out[f"{module}.weight"] = weight + (added.T if about["fan_in_fan_out"] else added)
    return out


def targeted(base: Tensors, folder: Path) -> set[str]:
    """The modules that ``target_modules`` names: PEFT compares the ends of their names."""
    every = {name.removesuffix(".weight") for name in base if name.endswith(".weight")}
    ends = settings(folder)["target_modules"]
    return {name for name in every if any(name == end or name.endswith(f".{end}") for end in ends)}
