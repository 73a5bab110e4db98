"""Reads config.json: every key is used, known to be harmless, or refused by name."""

from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.validation.untrusted import printable, short

HARMLESS = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
        # for text generation
        *("do_sample", "temperature", "top_k", "top_p", "min_length", "max_length", "bad_words_ids"),
        *("num_beams", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "output_past"),
        *("forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "task_specific_params"),
        # for other tasks than language models
        *("problem_type", "num_labels", "_num_labels", "id2label", "label2id", "finetuning_task"),
        # for training
        *("initializer_range", "router_aux_loss_coef", "output_router_logits", "gradient_checkpointing"),
        # for libraries
        *("architectures", "model_type", "auto_map", "tokenizer_class", "dtype", "torch_dtype", "use_cache"),
        *("_attn_implementation_autoset", "_name_or_path", "transformers_version", "transformers.js_config"),
        *("torchscript", "use_bfloat16", "_attn_implementation", "attn_implementation"),
        *("output_attentions", "output_hidden_states", "return_dict", "unsloth_fixed", "unsloth_version"),
    }
)
"""Keys that do not change the logits."""
_UNKNOWN = "cannot import a model with unknown keys; delete those that do not change its logits"
REQUIRED = object()
"""The default of a key that must be set."""


class ConfigKeys:
    """The keys of a config.json, marked as they are read. ``harmless`` keys are ignored."""

    def __init__(self, values: dict[str, Any], origin: str, harmless: frozenset[str] = HARMLESS) -> None:
        self._values = values
        self._origin = origin
        self._seen = set(harmless)
        self.notes: list[str] = []

    def take(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """The value of a key, which must be of type ``kind``; null means the default.

        Raises:
            ConfigurationError: it has another type, or is missing and has no default.
        """
        self._seen.add(name)
        value = self._values.get(name)
        if value is None:
            if default is REQUIRED:
                raise ConfigurationError(f"{self._origin}: {name} is missing")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigurationError(f"{self._origin}: {name} = {short(value)} should be {kind.__name__}")
        return value

    def nullable(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """``take`` for a key whose null means None instead of the default."""
        return self.take(name, kind, None if name in self._values else default)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a key with an unsupported value; the first of ``allowed`` is the default."""
        self._seen.add(name)
        value = self._values.get(name)
        if value is not None and value not in allowed:
            known = " or ".join(map(repr, allowed))
            raise ConfigurationError(
                f"{self._origin}: {name} = {short(value)} is not supported, only {known}"
            )

    @property
    def seen(self) -> frozenset[str]:
        """The names of the keys that were read, whether or not they are set."""
        return frozenset(self._seen)

    def only_training(self, *names: str) -> None:
        """Note non-zero keys that affect training but not the logits."""
        for name in names:
            self._seen.add(name)
            if value := self._values.get(name):
                self.notes.append(f"{name} = {short(value)} is not imported (see model.dropout)")

    def ignored(self, name: str) -> None:
        """Note a key that is set, but that transformers ignores."""
        self._seen.add(name)
        if (value := self._values.get(name)) is not None:
            self.notes.append(f"{name} = {short(value)} is not imported: transformers ignores it as well")

    def unused(self, *names: str) -> None:
        """Ignore keys of parts that a causal language model does not have."""
        self._seen.update(names)

    def finish(self, refusal: str = _UNKNOWN) -> None:
        """Refuse the keys that were never read."""
        if unknown := sorted(self._values.keys() - self._seen):
            given = ", ".join(f"{printable(name)[:80]} = {short(self._values[name])}" for name in unknown)
            raise ConfigurationError(f"{self._origin}: {refusal}: {given}")
