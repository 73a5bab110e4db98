"""The shape of a decoder."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zerojax.experts.mlp import GATED
from zerojax.experts.router import RouterConfig
from zerojax.models.config_checks import check_model, require
from zerojax.models.options import (
    AttentionOptions,
    BlockOptions,
    HeadOptions,
    MLPOptions,
    PositionOptions,
    RecurrentOptions,
    Rotation,
)
from zerojax.validation.spelling import suggests


@suggests
@dataclass(frozen=True, kw_only=True)
class GPTConfig(HeadOptions, MLPOptions, PositionOptions, RecurrentOptions, AttentionOptions, BlockOptions):
    """A decoder-only transformer, of GPT-2's, OPT's, LLaMA's, Gemma's or DeepSeek's family.

    The settings are the fields of the six groups in ``zerojax.models.options``. All of them are arguments
    here. The defaults are GPT-2 124M (Radford et al., 2019). Layers are numbered from 0.
    """

    def __post_init__(self) -> None:
        check_model(self)
        _ = self.kinds  # checks the layers of each kind by themselves

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys: head_width or its default."""
        return self.d_model // self.heads if self.head_width is None else self.head_width

    @property
    def value_dim(self) -> int:
        """Width of a head's values: latent_value_width or its default."""
        return self.head_dim if self.latent_value_width is None else self.latent_value_width

    @property
    def attention_width(self) -> int:
        """Width of all heads' outputs together; 0 without attention."""
        return self.heads * self.value_dim if self.attention_layers else 0

    @property
    def keys_width(self) -> int:
        """Width of all heads' projected keys together: 0 if they are an earlier layer's."""
        return 0 if self.shares_keys else self.key_value_heads * self.head_dim

    @property
    def values_width(self) -> int:
        """Width of all heads' projected values together: 0 if they are the keys, or an earlier layer's."""
        return 0 if self.keys_as_values or self.shares_keys else self.key_value_heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        """Width of all heads' projected queries, keys and values together; 0 without attention."""
        if not self.attention_layers:
            return 0
        return self.heads * self.head_dim + self.keys_width + self.values_width

    @property
    def rope_width(self) -> int:
        """Elements of a head that are rotated."""
        if self.latent_rope_width is not None:
            return self.latent_rope_width
        fraction = 1.0 if self.rope_scaling == "proportional" else self.rope_fraction
        return int(self.head_dim * fraction)

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads: kv_heads or its default."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_width(self) -> int:
        """Hidden width of the MLP: ffn or its default."""
        if self.ffn is not None:
            return self.ffn
        if self.gated:
            return -(-(8 * self.d_model) // (3 * 256)) * 256
        return 4 * self.d_model

    @property
    def active_ffn_width(self) -> int:
        """Total hidden width of the MLPs that a token passes through in a block; 0 without an MLP."""
        if not self.has_mlp:
            return 0
        return self.experts_per_token * self.ffn_width + self.shared_ffn if self.experts else self.ffn_width

    @property
    def expert_width(self) -> int:
        """Width of an expert's input and output."""
        return self.expert_latent or self.d_model

    @property
    def mlp_inputs_width(self) -> int:
        """Total width of the inputs of a token's MLPs in a block, or of their outputs."""
        if not self.experts:
            return self.d_model if self.has_mlp else 0
        latent = self.d_model + self.expert_latent if self.expert_latent else 0
        shared = self.d_model if self.shared_ffn else 0
        return self.experts_per_token * self.expert_width + shared + latent

    @property
    def router_config(self) -> RouterConfig:
        """How tokens choose their experts."""
        return RouterConfig(
            self.router,
            normalise=self.router_normalise,
            scale=self.router_scale,
            logit_biases=self.biases,
            balance_rate=self.router_balance_rate,
            groups=self.router_groups,
            groups_per_token=self.router_groups_per_token,
            group_best=self.router_group_best,
        )

    @property
    def output_rows(self) -> int:
        """Rows of the output projection: outputs or its default."""
        return self.vocab_size if self.outputs is None else self.outputs

    @property
    def attention_scale(self) -> float | None:
        """The factor of the attention scores; None for 1 / sqrt(head_dim)."""
        return None if self.query_scalar is None else self.query_scalar**-0.5

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.mlp in GATED

    @property
    def value_heads(self) -> int:
        """Heads of values of a recurrent layer: recurrent_heads or its default."""
        return self.heads if self.recurrent_heads is None else self.recurrent_heads

    @property
    def recurrent_keys(self) -> int:
        """Width of the queries, or the keys, of all heads of a recurrent layer together."""
        heads = self.value_heads if self.recurrent_key_heads is None else self.recurrent_key_heads
        return heads * self.recurrent_key_width

    @property
    def recurrent_values(self) -> int:
        """Width of the outputs of all heads of a recurrent layer together."""
        return self.d_model if self.recurrent == "short_conv" else self.value_heads * self.recurrent_width

    @property
    def conv_channels(self) -> int:
        """Width of the convolution of a recurrent layer: of queries, keys and values together."""
        return self.recurrent_values + (0 if self.recurrent == "short_conv" else 2 * self.recurrent_keys)

    @property
    def all_recurrent(self) -> bool:
        """Whether every layer is recurrent, as in ``of_layer`` of a recurrent layer."""
        return len(self.recurrent_layers) == self.layers

    @property
    def shares_keys(self) -> bool:
        """Whether every layer has an earlier layer's keys and values, as in ``of_layer`` of such a layer."""
        return self.kv_shared_layers == self.layers

    @property
    def parts(self) -> tuple[range, ...]:
        """All layers; or those with keys and values of their own, and those without."""
        first = self.layers - self.kv_shared_layers
        return (range(first), range(first, self.layers)) if self.kv_shared_layers else (range(first),)

    @property
    def key_layers(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it reads."""
        own, windowed = self.parts[0], self.windowed
        last = {windowed[number]: number for number in own}
        return tuple(number if number in own else last[windowed[number]] for number in range(self.layers))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        others = {*self.recurrent_layers, *(self.mlp_layers or ())}
        return tuple(number for number in range(self.layers) if number not in others)

    @property
    def has_mlp(self) -> bool:
        """Whether any layer has an MLP or experts."""
        return self.mlp_layers is None or len(self.mlp_layers) > 0

    @property
    def has_mixer(self) -> bool:
        """Whether any layer mixes the tokens of a row, by attention or a recurrent layer."""
        return self.mlp_layers is None or len(self.mlp_layers) < self.layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        some = range(self.layers if self.experts else 0) if self.mlp_layers is None else self.mlp_layers
        return tuple(number for number in some if self.experts and number not in self.dense_layers)

    def of_layer(self, number: int) -> "GPTConfig":
        """The config of a model whose layers are all like this one."""
        every, recurrent = tuple(range(self.layers)), number in self.recurrent_layers
        own: dict[str, Any] = {"recurrent_layers": every if recurrent else (), "recurrent_pre_norms": False}
        if self.recurrent_pre_norms and recurrent:
            own |= {"pre_norms": True, "post_norms": False}
        if self.mlp_layers is not None:
            own["mlp_layers"] = every if number in self.mlp_layers else ()
        if self.experts:
            own |= {"dense_layers": (), "dense_ffn": None}
            own |= {} if number in self.expert_layers else {"experts": 0, "ffn": self.dense_ffn}
        shares = number >= self.layers - self.kv_shared_layers
        own |= {"kv_shared_layers": self.layers if shares else 0, "kv_shared_ffn": None}
        if shares and self.kv_shared_ffn is not None:
            own["ffn"] = self.kv_shared_ffn
        if self.windows_differ:
            own |= self._of_window(self.windowed[number])
        changed = any(getattr(self, name) != value for name, value in own.items())
        return replace(self, **own) if changed else self

    @property
    def windows_differ(self) -> bool:
        """Whether layers with the sliding window have other weights, or other keys, than the others."""
        full = self.full_head_width, self.full_kv_heads, self.keys_as_values or self.kv_shared_layers or None
        return self.sliding_window is not None and full != (None, None, None)

    def _of_window(self, windowed: bool) -> dict[str, Any]:
        """The fields of a config whose layers all have the sliding window, or none of them."""
        own: dict[str, Any] = {"sliding_window_pattern": None, "sliding_window_layers": None}
        own |= {"full_head_width": None, "full_kv_heads": None}
        if windowed:
            return own | {"keys_as_values": False}
        own |= {"sliding_window": None, "rope_local_theta": None}
        own["head_width"] = self.full_head_width or self.head_width
        return own | {"kv_heads": self.full_kv_heads or self.kv_heads}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The number of each layer's kind, from 0.

        Layers of a kind have the same branches: recurrent or not, with experts or not, with keys or not. If
        ``windows_differ``, all or none of them have the sliding window.
        """
        windowed = [number for number, one in enumerate(self.windowed) if one and self.windows_differ]
        shared = range(self.layers - self.kv_shared_layers, self.layers)
        some = self.dense_layers, self.recurrent_layers, self.mlp_layers or (), windowed, shared
        groups = list(map(set, some))
        kinds = [tuple(number in group for group in groups) for number in range(self.layers)]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        return tuple(numbers[kind] for kind in kinds)

    @cached_property
    def kinds(self) -> tuple[tuple["GPTConfig", int], ...]:
        """For each kind of layers, a config whose layers are all of it, and the number of its layers."""
        counts = Counter(self.order)
        return tuple((self.of_layer(self.order.index(kind)), count) for kind, count in counts.items())

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer attends within the sliding window only."""
        if self.sliding_window is None:
            return (False,) * self.layers
        if self.sliding_window_layers is not None:
            return tuple(number in self.sliding_window_layers for number in range(self.layers))
        pattern = self.sliding_window_pattern
        return tuple(pattern is None or number % pattern != 0 for number in range(1, self.layers + 1))

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """How each layer rotates queries and keys; "local" uses rope_local_theta."""
        local = self.rope_local_theta is not None
        return tuple(
            "none" if number in self.no_rope_layers else "local" if windowed and local else "full"
            for number, windowed in enumerate(self.windowed)
        )

    def check_language_model(self, what: str) -> None:
        """Refuse a model of scores.

        Args:
            what: the caller that needs a language model, for the message.

        Raises:
            ConfigurationError: ``outputs`` is set.
        """
        require(
            self.outputs is None,
            f"outputs = {self.outputs} makes a model of scores, but {what} needs a language model. Leave it "
            "out, or use zerojax posttrain",
        )


def latent_outputs(c: GPTConfig) -> int:
    """Width of all heads' values and keys (without the rotary part), which are projected from a latent."""
    return c.heads * (c.head_dim - c.rope_width + c.value_dim)
