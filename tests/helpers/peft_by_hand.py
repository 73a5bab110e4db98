"""What PEFT makes of its files, in numpy: Hu et al., "LoRA" (arXiv:2106.09685), section 4.1."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]


def settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def modules(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of each module that has an adapter, by the module's name in transformers."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, x in load_file(folder / "adapter_model.safetensors").items():
        if match := re.fullmatch(r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(\.weight)?", name):
            found.setdefault(match[1], {})[match[2]] = x
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def whole(folder: Path) -> Tensors:
    """The tensors of the model itself, by their names in transformers."""
    found = load_file(folder / "adapter_model.safetensors")
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): x
        for name, x in found.items()
        if ".lora_" not in name
    }


def merged(base: Tensors, folder: Path) -> Tensors:
    """The tensors of a model with an adapter added to its weights."""
    about = settings(folder)
    out = base | whole(folder)
    for module, (a, b) in modules(folder).items():
        alphas = (
            alpha for key, alpha in about["alpha_pattern"].items() if re.fullmatch(rf"(.*\.)?({key})", module)
        )
        alpha, rank = next(alphas, about["lora_alpha"]), len(a)
        added = alpha / (math.sqrt(rank) if about["use_rslora"] else rank) * b @ a
        turned = about["fan_in_fan_out"] or module.endswith("embed_tokens")
        out[f"{module}.weight"] = out[f"{module}.weight"] + (added.T if turned else added)
    return out


def targeted(base: Tensors, folder: Path) -> set[str]:
    """The modules that ``target_modules`` names: PEFT compares the ends of their names."""
    every = {name.removesuffix(".weight") for name in base if name.endswith(".weight")}
    ends = settings(folder)["target_modules"]
    return {name for name in every if any(name == end or name.endswith(f".{end}") for end in ends)}
