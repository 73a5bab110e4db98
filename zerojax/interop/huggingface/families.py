"""The model families that zerojax imports and exports."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import experts, gemma, gpt2, hybrid, llama, parallel
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import Table, differences, key_names, read_fields, write_keys
from zerojax.interop.huggingface.llama import LLAMA_NAMES
from zerojax.interop.huggingface.mapping import Names, TensorParts
from zerojax.interop.huggingface.weight_files import QUANTIZATION, read_format
from zerojax.models import GPTConfig
from zerojax.validation.untrusted import printable, short


@dataclass(frozen=True)
class Family:
    """A family of models: the mapping between transformers' names and zerojax's.

    Attributes:
        label: its name in errors.
        model_type: its model_type in config.json.
        architecture: the causal language model's name in config.json.
        table: the keys of its config.json.
        names: the names of its modules.
        prefix: prefix of the tensors' names; files of a model without its head leave it out.
        buffers: patterns of tensors in old files that hold no weights.
        predicts: whether files may have layers behind the last one. They predict further tokens and are not
            read.
        linear: whether its kernels are ``torch.nn.Linear``, which compressed-tensors can quantize.
    """

    label: str
    model_type: str
    architecture: str
    table: Table
    names: Names = LLAMA_NAMES
    prefix: str = "model."
    buffers: tuple[str, ...] = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    predicts: bool = False
    linear: bool = True

    def read(self, keys: ConfigKeys) -> GPTConfig:
        """The model that a config.json describes."""
        return GPTConfig(**read_fields(self.table, keys, {}))

    def why_not(self, model: GPTConfig) -> list[str]:
        """The reasons why a model is not of this family, field by field; empty if it is."""
        if wrong := differences(self.table, model, self.label):
            return wrong
        try:
            write_keys(self.table, model)
        except ConfigurationError as error:
            return [str(error)]
        return []

    def exported(self, values: dict[str, Any]) -> dict[str, Any]:
        """An imported model's config.json, without the settings that are not imported."""
        kept = {name: value for name, value in values.items() if name != QUANTIZATION}
        return kept | ({experts.PREDICTING: 0} if self.predicts else {})

    def parts(self, model: GPTConfig, prefix: str) -> TensorParts:
        """The tensors of each leaf, for a model and the prefix of their names."""
        return self.names.parts(model, prefix)

    @property
    def base(self) -> str:
        """The architecture's name without its head."""
        return re.sub(r"(LMHeadModel|ForCausalLM)$", "Model", self.architecture)

    def prefix_in(self, names: Collection[str]) -> str:
        """The prefix of the names in a file: the family's, or none."""
        return self.prefix if any(name.startswith(self.prefix) for name in names) else ""

    def is_left_out(self, name: str, layers: int) -> bool:
        """Whether a model with this many layers does not read the tensor."""
        behind = re.match(r"(?:model\.)?layers\.(\d+)\.", name) if self.predicts else None
        if behind is not None and int(behind[1]) >= layers:
            return True
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)


_NEAREST = 3
"""Most families or keys that a refusal names."""
_LONGEST_NAME = 80
"""Characters of a model_type that are compared."""
_GPT2_MASKS = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)
# A model that was not imported is exported as the first family that fits.
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            *("GPT-2", "gpt2", "GPT2LMHeadModel", gpt2.GPT2, gpt2.GPT2_NAMES, "transformer.", _GPT2_MASKS),
            linear=False,
        ),
        Family("OPT", "opt", "OPTForCausalLM", gpt2.OPT, gpt2.OPT_NAMES, buffers=()),
        Family("LLaMA", "llama", "LlamaForCausalLM", llama.LLAMA),
        Family("Mistral", "mistral", "MistralForCausalLM", llama.MISTRAL),
        Family("Qwen2", "qwen2", "Qwen2ForCausalLM", llama.QWEN2),
        Family("Qwen3", "qwen3", "Qwen3ForCausalLM", llama.QWEN3, llama.QWEN3_NAMES),
        Family("Gemma", "gemma", "GemmaForCausalLM", gemma.GEMMA),
        Family("Gemma 2", "gemma2", "Gemma2ForCausalLM", gemma.GEMMA2, gemma.GEMMA2_NAMES),
        Family("Gemma 3", "gemma3_text", "Gemma3ForCausalLM", gemma.GEMMA3, gemma.GEMMA3_NAMES),
        Family("Phi-3", "phi3", "Phi3ForCausalLM", llama.PHI3, llama.PHI3_NAMES),
        Family("SmolLM3", "smollm3", "SmolLM3ForCausalLM", llama.SMOLLM3),
        Family("OLMo 2", "olmo2", "Olmo2ForCausalLM", llama.OLMO2, llama.OLMO_NAMES),
        Family("OLMo 3", "olmo3", "Olmo3ForCausalLM", llama.OLMO3, llama.OLMO_NAMES),
        Family("Granite", "granite", "GraniteForCausalLM", llama.GRANITE),
        Family("StarCoder2", "starcoder2", "Starcoder2ForCausalLM", llama.STARCODER2, llama.STARCODER2_NAMES),
        Family("GLM", "glm", "GlmForCausalLM", llama.GLM, llama.GLM_NAMES),
        Family("GLM-4", "glm4", "Glm4ForCausalLM", llama.GLM4, llama.GLM4_NAMES),
        Family("Ministral 3", "ministral3", "Ministral3ForCausalLM", llama.MINISTRAL3),
        Family("Mixtral", "mixtral", "MixtralForCausalLM", experts.MIXTRAL, experts.MIXTRAL_NAMES),
        Family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM", experts.QWEN3_MOE, experts.QWEN3_MOE_NAMES),
        Family("OLMoE", "olmoe", "OlmoeForCausalLM", experts.OLMOE, experts.QWEN3_MOE_NAMES),
        Family(
            *("GLM-4.5", "glm4_moe", "Glm4MoeForCausalLM", experts.GLM4_MOE, experts.GLM4_MOE_NAMES),
            predicts=True,
        ),
        Family(
            *("DeepSeek-V2", "deepseek_v2", "DeepseekV2ForCausalLM", experts.DEEPSEEK_V2),
            experts.DEEPSEEK_NAMES,
        ),
        *(
            Family(
                *(label, model_type, "DeepseekV3ForCausalLM", experts.DEEPSEEK_V3, experts.DEEPSEEK_NAMES),
                predicts=True,
            )
            for label, model_type in (("DeepSeek-V3", "deepseek_v3"), ("Kimi K2", "kimi_k2"))
        ),
        Family(
            "Granite MoE",
            "granitemoe",
            "GraniteMoeForCausalLM",
            experts.GRANITE_MOE,
            experts.GRANITE_MOE_NAMES,
        ),
        Family("Qwen2-MoE", "qwen2_moe", "Qwen2MoeForCausalLM", experts.QWEN2_MOE, experts.QWEN2_MOE_NAMES),
        Family("Seed-OSS", "seed_oss", "SeedOssForCausalLM", llama.SEED_OSS),
        Family("CWM", "cwm", "CwmForCausalLM", llama.CWM),
        Family("Arcee", "arcee", "ArceeForCausalLM", llama.ARCEE),
        Family("Helium", "helium", "HeliumForCausalLM", llama.HELIUM),
        Family("ERNIE 4.5", "ernie4_5", "Ernie4_5ForCausalLM", llama.ERNIE),
        Family(
            "HunYuan", "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", llama.HUNYUAN, llama.HUNYUAN_NAMES
        ),
        Family("EXAONE 4", "exaone4", "Exaone4ForCausalLM", llama.EXAONE4, llama.OLMO_NAMES),
        Family(
            *("GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM", parallel.GPT_NEOX, parallel.GPT_NEOX_NAMES),
            "gpt_neox.",
            (r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        ),
        Family(
            "Falcon", "falcon", "FalconForCausalLM", parallel.FALCON, parallel.FALCON_NAMES, "transformer."
        ),
        Family("Phi", "phi", "PhiForCausalLM", parallel.PHI, parallel.PHI_NAMES),
        Family("StableLM", "stablelm", "StableLmForCausalLM", parallel.STABLELM),
        Family("Cohere", "cohere", "CohereForCausalLM", parallel.COHERE, parallel.COHERE_NAMES),
        Family("Cohere 2", "cohere2", "Cohere2ForCausalLM", parallel.COHERE2, parallel.COHERE_NAMES),
        Family("Qwen3.5", "qwen3_5_text", "Qwen3_5ForCausalLM", hybrid.QWEN3_5, hybrid.QWEN3_5_NAMES),
        Family(
            *("Qwen3.5-MoE", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", hybrid.QWEN3_5_MOE),
            hybrid.QWEN3_5_MOE_NAMES,
        ),
        Family("LFM2", "lfm2", "Lfm2ForCausalLM", hybrid.LFM2, hybrid.LFM2_NAMES),
        Family(
            *("Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM", hybrid.QWEN3_NEXT),
            hybrid.QWEN3_NEXT_NAMES,
        ),
        Family("gpt-oss", "gpt_oss", "GptOssForCausalLM", experts.GPT_OSS, experts.GPT_OSS_NAMES),
    )
}
_SPARSE_ATTENTION = (
    "a part of each layer chooses the tokens that others attend to, and a zerojax model has no such part"
)
REFUSED = dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _SPARSE_ATTENTION)
"""Families that are known and cannot be imported -> why."""


class ReadModel(NamedTuple):
    """The model of a config.json.

    Attributes:
        family: its family.
        model: its shape.
        notes: a line for each key that is not imported.
    """

    family: Family
    model: GPTConfig
    notes: list[str]


def read_model(values: dict[str, Any], origin: str) -> ReadModel:
    """Read the family and shape of a config.json's model; ``origin`` names the file in errors."""
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        why = f": {REFUSED[kind]}" if isinstance(kind, str) and kind in REFUSED else ""
        raise ConfigurationError(
            f"{origin}: model_type = {short(kind)} is not supported{why}. {_describe_nearest(values)}. "
            f"docs/huggingface.md lists all {len(FAMILIES)} families"
        )
    keys = ConfigKeys(values, origin)
    for name in keys.take("architectures", list, []):
        if name not in (family.architecture, family.base):
            raise ConfigurationError(
                f"{origin}: architectures = {short(name)} is not supported. Use a causal language model: "
                f"{family.architecture} or {family.base}"
            )
    try:
        model = family.read(keys)
        read_format(keys)  # refuses unsupported formats
    except ConfigurationError as error:
        raise ConfigurationError(f"{origin}: {str(error).removeprefix(f'{origin}: ')}") from error
    keys.finish()
    return ReadModel(family, model, keys.notes)


def _describe_nearest(values: dict[str, Any]) -> str:
    """The family that reads most keys of a config.json, and the keys that it does not read."""
    kind = str(values.get("model_type"))

    def distance(family: Family) -> tuple[int, float]:
        alike = SequenceMatcher(None, kind[:_LONGEST_NAME], family.model_type).ratio()
        return len(values.keys() - key_names(family.table)), -alike

    nearest = min(FAMILIES.values(), key=distance)
    lacking = sorted(values.keys() - key_names(nearest.table))
    shown = ", ".join(printable(name)[:40] for name in lacking[:_NEAREST])
    more = f" and {len(lacking) - _NEAREST} more" if len(lacking) > _NEAREST else ""
    lacks = f"which has no {shown}{more}" if lacking else "which has the same keys but other layers"
    return f"The nearest family that is supported is {nearest.model_type}, {lacks}"


def describe_model(model: GPTConfig) -> tuple[Family, dict[str, Any]]:
    """The family of a model, and a config.json that transformers 4 and 5 both read."""
    if not (found := fitting(model)):
        reasons = sorted((family.why_not(model) for family in FAMILIES.values()), key=len)
        nearest = " | ".join(map("; ".join, reasons[:_NEAREST]))
        raise ConfigurationError(f"no Hugging Face family fits this model. The nearest: {nearest}")
    family = found[0]
    # Some families' default ids lie outside a small vocabulary, and transformers fails on them.
    about = {"architectures": [family.architecture], "model_type": family.model_type, "pad_token_id": None}
    return family, about | write_keys(family.table, model) | {"initializer_range": model.init_std}


def fitting(model: GPTConfig) -> list[Family]:
    """All families that fit a model. ``describe_model`` uses the first; others may have other names."""
    return [family for family in FAMILIES.values() if not family.why_not(model)]
