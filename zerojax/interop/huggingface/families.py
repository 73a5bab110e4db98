"""The model families that can be imported and exported."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import gemma, gpt2, llama, mistral, opt, phi3, qwen
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.mapping import TensorParts
from zerojax.models import GPTConfig
from zerojax.validation.untrusted import short

Read = Callable[[ConfigKeys], GPTConfig]
Write = Callable[[GPTConfig], dict[str, Any]]
Parts = Callable[[GPTConfig, str], TensorParts]


@dataclass(frozen=True)
class Family:
    """A family of models: the mapping between transformers' names and zerojax's.

    Attributes:
        model_type: in the config.json.
        architecture: in the config.json, of the causal language model.
        prefix: of the tensors' names; files of a model without its head leave it out.
        buffers: patterns of the names of tensors in old files that hold no weights.
        linear: whether its kernels are ``torch.nn.Linear``, which compressed-tensors can quantize.
        read: the model of a config.json. Raises ConfigurationError for a value that zerojax does not support.
        write: the config.json of a model, as transformers 4 and 5 both read it. Raises ConfigurationError,
            which names the field, for a model that the family does not have. None if an earlier family has
            all its models.
        parts: the tensors of each leaf, for a model and a prefix.
    """

    model_type: str
    architecture: str
    prefix: str
    buffers: tuple[str, ...]
    linear: bool
    read: Read
    write: Write | None
    parts: Parts

    @property
    def base(self) -> str:
        """The architecture without its head."""
        return re.sub(r"(LMHeadModel|ForCausalLM)$", "Model", self.architecture)

    def prefix_in(self, names: Collection[str]) -> str:
        """The prefix of the names in a file: the family's, or none."""
        return self.prefix if any(name.startswith(self.prefix) for name in names) else ""

    def is_buffer(self, name: str) -> bool:
        """Whether the tensor of this name is a mask or a table that the model computes itself."""
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)


def _like_llama(
    model_type: str, architecture: str, read: Read, write: Write | None, parts: Parts = llama.parts
) -> Family:
    """A family whose tensors are those of LLaMA, or more of the same."""
    buffers = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    return Family(model_type, architecture, "model.", buffers, True, read, write, parts)


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            "transformer.",
            (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
            False,
            gpt2.read,
            gpt2.write,
            gpt2.parts,
        ),
        Family("opt", "OPTForCausalLM", "model.", (), True, opt.read, opt.write, opt.parts),
        _like_llama("llama", "LlamaForCausalLM", llama.read, llama.write),
        _like_llama("mistral", "MistralForCausalLM", mistral.read, mistral.write),
        _like_llama("qwen2", "Qwen2ForCausalLM", qwen.read_qwen2, qwen.write_qwen2),
        _like_llama("qwen3", "Qwen3ForCausalLM", qwen.read_qwen3, qwen.write_qwen3),
        _like_llama("gemma", "GemmaForCausalLM", gemma.read_gemma, gemma.write_gemma),
        _like_llama("gemma2", "Gemma2ForCausalLM", gemma.read_gemma2, gemma.write_gemma2),
        _like_llama("gemma3_text", "Gemma3ForCausalLM", gemma.read_gemma3, gemma.write_gemma3),
        _like_llama("phi3", "Phi3ForCausalLM", phi3.read, None, phi3.parts),
    )
}


def read_model(values: dict[str, Any], origin: str) -> tuple[Family, GPTConfig, list[str]]:
    """The family and shape of the model of a config.json; ``origin`` names the file in errors.

    Returns:
        The family, the model's shape, and a line for each key that is not imported.

    Raises:
        ConfigurationError: an architecture, key or value is not supported; names it.
    """
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise ConfigurationError(f"{origin}: model_type = {short(kind)} is not supported, only {known}")
    keys = ConfigKeys(values, origin)
    for name in keys.take("architectures", list, []):
        if name not in (family.architecture, family.base):
            raise ConfigurationError(
                f"{origin}: architectures = {short(name)} is not supported, only causal language models"
            )
    try:
        model = family.read(keys)
    except ConfigurationError as error:
        raise ConfigurationError(f"{origin}: {str(error).removeprefix(f'{origin}: ')}") from error
    keys.finish()
    return family, model, keys.notes


def describe_model(model: GPTConfig) -> tuple[Family, dict[str, Any]]:
    """The family of a model, and its config.json.

    Raises:
        ConfigurationError: it belongs to no family; says why, for each.
    """
    reasons = []
    for family in FAMILIES.values():
        if family.write is None:
            continue
        try:
            config = family.write(model)
        except ConfigurationError as error:
            reasons.append(str(error))
            continue
        about = {"architectures": [family.architecture], "model_type": family.model_type}
        return family, about | config | {"initializer_range": model.init_std}
    raise ConfigurationError(f"no Hugging Face family fits this model: {'; '.join(reasons)}")
