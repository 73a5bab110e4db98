"""A run small enough to make in seconds."""

from pathlib import Path
from typing import Any

from zerojax.run.config import RunConfig, config_from_dict

MICRO: dict[str, dict[str, Any]] = {
    "train": {
        "steps": 8,
        "batch_size": 8,
        "sequence_length": 16,
        "eval_every": 4,
        "eval_batches": 2,
        "max_skips": 3,
    },
    "model": {"vocab_size": 256, "layers": 2, "d_model": 16, "heads": 2, "max_seq_len": 32},
    "data": {"validation": 0.2},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
    "zero": {"compute_dtype": "float32"},
    "mesh": {"nodes": 2, "local": 4},
    "checkpoint": {"every": 3},
    "log": {"trackers": []},
}


def micro_config(text: Path, **sections: dict[str, Any]) -> RunConfig:
    """The settings of a micro run, some changed."""
    data = {name: dict(values) for name, values in MICRO.items()}
    data["data"]["source"] = str(text)
    for name, values in sections.items():
        data[name] |= values
    return config_from_dict(data)
