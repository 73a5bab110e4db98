"""The folder of a Hugging Face model: its shape and its tokenizer, read only from the small files."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import FREE
from zerojax.interop.huggingface.families import Family, read_model
from zerojax.interop.huggingface.tokenizer_files import read_tokenizer
from zerojax.interop.huggingface.weight_files import WeightFiles, read_format
from zerojax.models.config import GPTConfig
from zerojax.run.data.tokenizer import BPETokenizer
from zerojax.validation.untrusted import read_json_object

CONFIG = "config.json"
TENSORS = "tensors.json"
"""In RUN/huggingface: the dtype of each tensor of the model's files that is read, by name."""
CARRIED = "carried.safetensors"
"""In RUN/huggingface: the tensors that exports write back unchanged, such as a vision tower."""


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a Hugging Face model; its weights are not read.

    Attributes:
        folder: its path.
        family: the model's family.
        model: the model's shape.
        tokenizer: None if it has none.
        notes: a line for each setting that is not imported.
    """

    folder: Path
    family: Family
    model: GPTConfig
    tokenizer: BPETokenizer | None
    notes: list[str]

    @classmethod
    def open(cls, folder: Path) -> "ModelFolder":
        """Read the config.json and the tokenizer.

        Raises:
            ConfigurationError: there is no model, or zerojax does not support it; names the unsupported part.
        """
        values = read_config_json(folder)
        family, model, notes = read_model(values, str(folder / CONFIG))
        tokenizer = read_tokenizer(folder, values.get("text_config", {}) | values)
        if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
            raise ConfigurationError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but the model embeds only "
                f"{model.vocab_size}. Use the model's own tokenizer"
            )
        return cls(folder, family, model, tokenizer, notes)


def open_files(folder: Path) -> WeightFiles:
    """The tensors of a model's folder."""
    return WeightFiles(folder, read_format(ConfigKeys(read_config_json(folder), str(folder / CONFIG))))


def is_model(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face model, whether or not zerojax can read it."""
    return (folder / CONFIG).is_file()


def read_config_json(folder: Path, name: str = CONFIG, owner: str = "a Hugging Face model") -> dict[str, Any]:
    """The settings in a folder's JSON file, config.json by default. Messages call the folder ``owner``'s.

    Raises:
        ConfigurationError: there is no such file, or it is no JSON object.
    """
    path = folder / name
    if not path.exists():
        raise ConfigurationError(f"{path}: No such file or directory; the folder of {owner} has one")
    return read_json_object(path)


def model_section(source: GPTConfig, wanted: GPTConfig) -> GPTConfig:
    """An imported model's shape, with ``wanted``'s settings that do not change the logits.

    With ``wanted.outputs`` it gets a new head with that many rows.
    """
    changes = {name: getattr(wanted, name) for name in FREE}
    if wanted.outputs is not None:
        changes |= {"outputs": wanted.outputs, "tied": False}
    return replace(source, **changes)
