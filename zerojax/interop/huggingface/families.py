"""The model families that zerojax imports and exports."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import experts, gemma, gpt2, hybrid, kimi, llama, mamba, nemotron, parallel
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import Table, differences, key_names, read_fields, write_keys
from zerojax.interop.huggingface.llama import LLAMA_NAMES
from zerojax.interop.huggingface.mapping import Names, TensorParts
from zerojax.interop.huggingface.weight_files import QUANTIZATION, read_format
from zerojax.models.config import GPTConfig
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
        predicts: whether files may have layers that predict further tokens: behind the last layer, or in
            "mtp". They are carried.
        composite: whether the model is the text part of a larger one, such as a model with images. All other
            tensors are carried.
        linear: whether its kernels are ``torch.nn.Linear``, which compressed-tensors can quantize.
        other_prefixes: prefixes that the names have in some files instead of ``prefix``.
    """

    label: str
    model_type: str
    architecture: str
    table: Table
    names: Names = LLAMA_NAMES
    prefix: str = "model."
    predicts: bool = False
    composite: bool = False
    linear: bool = True
    other_prefixes: tuple[str, ...] = ()

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

    def exported(self, values: dict[str, Any], *, predicts: bool) -> dict[str, Any]:
        """An imported model's config.json, for the tensors of an export.

        ``predicts`` says whether the tensors include the layers that predict further tokens.
        """
        kept = {name: value for name, value in values.items() if name != QUANTIZATION}
        return kept | ({experts.PREDICTING: 0} if experts.PREDICTING in values and not predicts else {})

    def parts(self, model: GPTConfig, names: Collection[str] | None = None) -> TensorParts:
        """The tensors of each leaf of a model; ``names`` are the names in its files.

        Without ``names`` they are the names of the modules in transformers. Files of the base model leave out
        the prefix, some files of models with images have another one, and some hold all experts of a layer
        together.
        """
        if names is None:
            return self.names.parts(model, self.prefix)
        prefix = next((one for one in self._prefixes if any(name.startswith(one) for name in names)), "")
        together = experts.FUSED in {re.sub(r".*layers\.\d+\.", "", name) for name in names}
        own = experts.joined(self.names.in_files(names), together=together)
        return replace(own, head=self._head(prefix)).parts(model, prefix)

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return self.prefix, *self.other_prefixes

    def _head(self, prefix: str) -> str:
        return f"language_model.{self.names.head}" if prefix == _OLD_TEXT else self.names.head

    @property
    def base(self) -> str:
        """The architecture's name without its head."""
        return re.sub(r"(LMHeadModel|ForCausalLM|ForConditionalGeneration)$", "Model", self.architecture)

    def carries(self, name: str, model: GPTConfig) -> bool:
        """Whether a run of the model keeps the tensor unread, for its exports."""
        if self.composite and not name.startswith((*self._prefixes, *map(self._head, self._prefixes))):
            return True
        behind = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        later = behind is not None and int(behind[1]) >= model.layers
        keys = _KEYS.fullmatch(name)
        sharing = range(model.layers - model.kv_shared_layers, model.layers)
        if keys is not None and int(keys[1]) in sharing:
            return True
        return self.predicts and (later or name.startswith("mtp."))


_OLD_TEXT = "language_model.model."
"""Prefix of the text part in files from before transformers 4.52; the head has another one, too."""
_KEYS = re.compile(r".*layers\.(\d+)\.self_attn\.(k|v)_(proj|norm)\.\w+")
"""Tensors of keys and values. Published files also have them for layers that read an earlier layer's."""
_NEAREST = 3
"""Most families or keys that a refusal names."""
_LONGEST_NAME = 80
"""Characters of a model_type that are compared."""
_OLD_BUFFERS = re.compile(
    r"(\w+\.)?(layers|h)\.\d+\.((attn|attention)\.(masked_)?bias|(attention|self_attn)\.rotary_emb\.inv_freq)"
)
"""The names of tensors in old files that hold no weights: masks, and the angles of rotary positions."""


def is_left_out(name: str) -> bool:
    """Whether no model needs the tensor."""
    return _OLD_BUFFERS.fullmatch(name) is not None


def _causal(
    label: str, model_type: str, stem: str, table: Table, names: Names = LLAMA_NAMES, **others: Any
) -> Family:
    """A family whose architecture is ``stem`` + "ForCausalLM"."""
    return Family(label, model_type, f"{stem}ForCausalLM", table, names, **others)


_ALL = (
    Family("GPT-2", "gpt2", "GPT2LMHeadModel", gpt2.GPT2, gpt2.GPT2_NAMES, "transformer.", linear=False),
    _causal("OPT", "opt", "OPT", gpt2.OPT, gpt2.OPT_NAMES),
    _causal("LLaMA", "llama", "Llama", llama.LLAMA),
    _causal("Mistral", "mistral", "Mistral", llama.MISTRAL),
    _causal("Qwen2", "qwen2", "Qwen2", llama.QWEN2),
    _causal("Qwen3", "qwen3", "Qwen3", llama.QWEN3, llama.QWEN3_NAMES),
    _causal("Gemma", "gemma", "Gemma", gemma.GEMMA),
    _causal("Gemma 2", "gemma2", "Gemma2", gemma.GEMMA2, gemma.GEMMA2_NAMES),
    _causal("Gemma 3", "gemma3_text", "Gemma3", gemma.GEMMA3, gemma.GEMMA3_NAMES),
    _causal("Gemma 4", "gemma4_text", "Gemma4", gemma.GEMMA4, gemma.GEMMA4_NAMES),
    _causal("Phi-3", "phi3", "Phi3", llama.PHI3, llama.PHI3_NAMES),
    _causal("SmolLM3", "smollm3", "SmolLM3", llama.SMOLLM3),
    _causal("OLMo 2", "olmo2", "Olmo2", llama.OLMO2, llama.OLMO_NAMES),
    _causal("OLMo 3", "olmo3", "Olmo3", llama.OLMO3, llama.OLMO_NAMES),
    _causal("Granite", "granite", "Granite", llama.GRANITE),
    _causal("StarCoder2", "starcoder2", "Starcoder2", llama.STARCODER2, llama.STARCODER2_NAMES),
    _causal("GLM", "glm", "Glm", llama.GLM, llama.GLM_NAMES),
    _causal("GLM-4", "glm4", "Glm4", llama.GLM4, llama.GLM4_NAMES),
    _causal("Ministral 3", "ministral3", "Ministral3", llama.MINISTRAL3),
    _causal("Mixtral", "mixtral", "Mixtral", experts.MIXTRAL, experts.MIXTRAL_NAMES),
    _causal("Qwen3-MoE", "qwen3_moe", "Qwen3Moe", experts.QWEN3_MOE, experts.QWEN3_MOE_NAMES),
    _causal("OLMoE", "olmoe", "Olmoe", experts.OLMOE, experts.QWEN3_MOE_NAMES),
    _causal("GLM-4.5", "glm4_moe", "Glm4Moe", experts.GLM4_MOE, experts.GLM4_MOE_NAMES, predicts=True),
    _causal("DeepSeek-V2", "deepseek_v2", "DeepseekV2", experts.DEEPSEEK_V2, experts.DEEPSEEK_NAMES),
    _causal(
        "DeepSeek-V3", "deepseek_v3", "DeepseekV3", experts.DEEPSEEK_V3, experts.DEEPSEEK_NAMES, predicts=True
    ),
    _causal("Kimi K2", "kimi_k2", "DeepseekV3", experts.DEEPSEEK_V3, experts.DEEPSEEK_NAMES, predicts=True),
    _causal("Granite MoE", "granitemoe", "GraniteMoe", experts.GRANITE_MOE, experts.GRANITE_MOE_NAMES),
    _causal("Qwen2-MoE", "qwen2_moe", "Qwen2Moe", experts.QWEN2_MOE, experts.QWEN2_MOE_NAMES),
    _causal("Seed-OSS", "seed_oss", "SeedOss", llama.SEED_OSS),
    _causal("CWM", "cwm", "Cwm", llama.CWM),
    _causal("Arcee", "arcee", "Arcee", llama.ARCEE),
    _causal("Helium", "helium", "Helium", llama.HELIUM),
    _causal("ERNIE 4.5", "ernie4_5", "Ernie4_5", llama.ERNIE),
    _causal("HunYuan", "hunyuan_v1_dense", "HunYuanDenseV1", llama.HUNYUAN, llama.HUNYUAN_NAMES),
    _causal("EXAONE 4", "exaone4", "Exaone4", llama.EXAONE4, llama.OLMO_NAMES),
    _causal(
        "GPT-NeoX", "gpt_neox", "GPTNeoX", parallel.GPT_NEOX, parallel.GPT_NEOX_NAMES, prefix="gpt_neox."
    ),
    _causal("Falcon", "falcon", "Falcon", parallel.FALCON, parallel.FALCON_NAMES, prefix="transformer."),
    _causal("Phi", "phi", "Phi", parallel.PHI, parallel.PHI_NAMES),
    _causal("StableLM", "stablelm", "StableLm", parallel.STABLELM),
    _causal("Cohere", "cohere", "Cohere", parallel.COHERE, parallel.COHERE_NAMES),
    _causal("Cohere 2", "cohere2", "Cohere2", parallel.COHERE2, parallel.COHERE_NAMES),
    _causal("Qwen3.5", "qwen3_5_text", "Qwen3_5", hybrid.QWEN3_5, hybrid.QWEN3_5_NAMES, predicts=True),
    _causal(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        hybrid.QWEN3_5_MOE,
        hybrid.QWEN3_5_MOE_NAMES,
        predicts=True,
    ),
    _causal("Kimi Linear", "kimi_linear", "KimiLinear", kimi.KIMI_LINEAR, kimi.KIMI_LINEAR_NAMES),
    _causal(
        "Nemotron-H",
        "nemotron_h",
        "NemotronH",
        nemotron.NEMOTRON_H,
        nemotron.NEMOTRON_H_NAMES,
        predicts=True,
        other_prefixes=("backbone.",),
    ),
    _causal("Bamba", "bamba", "Bamba", mamba.BAMBA, mamba.BAMBA_NAMES),
    _causal(
        "Granite 4", "granitemoehybrid", "GraniteMoeHybrid", mamba.GRANITE_HYBRID, mamba.GRANITE_HYBRID_NAMES
    ),
    _causal(
        "GLM-4.7-Flash",
        "glm4_moe_lite",
        "Glm4MoeLite",
        experts.GLM4_MOE_LITE,
        experts.DEEPSEEK_NAMES,
        predicts=True,
    ),
    _causal("MiniMax-M2", "minimax_m2", "MiniMaxM2", experts.MINIMAX_M2, experts.MINIMAX_M2_NAMES),
    _causal("OLMo Hybrid", "olmo_hybrid", "OlmoHybrid", hybrid.OLMO_HYBRID, hybrid.OLMO_HYBRID_NAMES),
    _causal("LFM2-MoE", "lfm2_moe", "Lfm2Moe", hybrid.LFM2_MOE, hybrid.LFM2_MOE_NAMES),
    _causal("LFM2", "lfm2", "Lfm2", hybrid.LFM2, hybrid.LFM2_NAMES),
    _causal(
        "Qwen3-Next", "qwen3_next", "Qwen3Next", hybrid.QWEN3_NEXT, hybrid.QWEN3_NEXT_NAMES, predicts=True
    ),
    _causal("gpt-oss", "gpt_oss", "GptOss", experts.GPT_OSS, experts.GPT_OSS_NAMES),
)
FAMILIES = {family.model_type: family for family in _ALL}
"""By model_type. A model that was not imported is exported as the first family that fits."""


def _with_images(label: str, model_type: str, architecture: str, *texts: Family) -> dict[str, Family]:
    """The families of a model's text part, by the model_type of text_config; the first is the default."""
    about = {"label": label, "model_type": model_type, "architecture": architecture, "composite": True}
    prefixes = {"prefix": "model.language_model.", "other_prefixes": (_OLD_TEXT,)}
    return {text.model_type: replace(text, **about, **prefixes) for text in texts}


_QWEN3_VL = Family("Qwen3-VL", "qwen3_vl_text", "", llama.QWEN3_VL, llama.QWEN3_NAMES)
_TEXT_OF_3_5, _MIXTURE_OF_3_5 = FAMILIES["qwen3_5_text"], FAMILIES["qwen3_5_moe_text"]
_MISTRALS = FAMILIES["mistral"], FAMILIES["ministral3"]
COMPOSITES = {
    name: _with_images(label, name, f"{architecture}ForConditionalGeneration", *texts)
    for label, name, architecture, *texts in (
        ("Qwen3.5", "qwen3_5", "Qwen3_5", _TEXT_OF_3_5),
        ("Qwen3.5-MoE", "qwen3_5_moe", "Qwen3_5Moe", _MIXTURE_OF_3_5),
        ("Qwen3-VL", "qwen3_vl", "Qwen3VL", _QWEN3_VL),
        ("Gemma 3", "gemma3", "Gemma3", FAMILIES["gemma3_text"]),
        ("Gemma 4", "gemma4", "Gemma4", FAMILIES["gemma4_text"]),
        ("Mistral 3", "mistral3", "Mistral3", *_MISTRALS),
    )
}
"""The families of the text part of models with images, by the model_type of the whole and of the part."""
_UNWRITTEN: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    }
}
"""Keys without a default that published files leave out of text_config, and transformers' defaults."""
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
    """Read the family and shape of a config.json's model; ``origin`` names the file in errors.

    Raises:
        ConfigurationError: the family, or a key or its value, is not supported.
    """
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in COMPOSITES:
        family, values = _text_part(values, origin)
    else:
        family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        why = f": {REFUSED[kind]}" if isinstance(kind, str) and kind in REFUSED else ""
        raise ConfigurationError(
            f"{origin}: model_type = {short(kind)} is not supported{why}. {_describe_nearest(values)}. "
            f"docs/huggingface.md lists all {len(FAMILIES) + len(COMPOSITES)} families"
        )
    keys = ConfigKeys(values, origin)
    known = [_plain(name) for name in (family.architecture, family.base)]
    for name in keys.take("architectures", list, []):
        if _plain(name) not in known:
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


def _plain(architecture: object) -> str:
    """An architecture's name as all files spell it: the first files of ERNIE 4.5 have one more "_"."""
    return str(architecture).replace("_", "").lower()


def _text_part(values: dict[str, Any], origin: str) -> tuple[Family, dict[str, Any]]:
    """The family of a model's text part, and its config.json as if it were a model by itself."""
    kind, text = values["model_type"], values.get("text_config")
    if not isinstance(text, dict):
        raise ConfigurationError(f"{origin}: text_config = {short(text)} should be a table")
    families = COMPOSITES[kind]
    if (own := text.get("model_type", next(iter(families)))) not in families:
        raise ConfigurationError(
            f"{origin}: text_config has model_type = {short(own)}, but a {kind} with "
            f"{' or '.join(map(repr, families))} is supported"
        )
    of_both = ("architectures", "tie_word_embeddings", QUANTIZATION)  # the whole model decides these
    above = {name: values[name] for name in of_both if name in values}
    return families[own], _UNWRITTEN.get(kind, {}) | text | {"architectures": []} | above


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
    """The family of a model, and a config.json that transformers 4 and 5 both read.

    Raises:
        ConfigurationError: no family fits; says what differs from the nearest.
    """
    if not (found := fitting(model)):
        reasons = sorted((family.why_not(model) for family in FAMILIES.values()), key=len)
        nearest = " | ".join(map("; ".join, reasons[:_NEAREST]))
        raise ConfigurationError(f"no Hugging Face family fits this model. The nearest: {nearest}")
    family = found[0]
    # Some families' default ids lie outside a small vocabulary, and transformers fails on them.
    about = {"architectures": [family.architecture], "model_type": family.model_type, "pad_token_id": None}
    return family, about | write_keys(family.table, model) | {"initializer_range": model.init_std}


def fitting(model: GPTConfig, *, composites: bool = False) -> list[Family]:
    """All families that fit a model. ``describe_model`` uses the first; others may have other names.

    With ``composites``, also the larger models whose text part fits.
    """
    larger = [family for texts in COMPOSITES.values() for family in texts.values()] if composites else []
    return [family for family in (*FAMILIES.values(), *larger) if not family.why_not(model)]


def family_named(model_type: str) -> Family | None:
    """The family with a model_type, the first one of a model with images; None if there is none."""
    return FAMILIES.get(model_type) or next(iter(COMPOSITES.get(model_type, {}).values()), None)
