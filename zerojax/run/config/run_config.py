"""All settings of a run."""

import dataclasses
from dataclasses import dataclass, field

from zerojax.models.config import GPTConfig
from zerojax.run.config.data import DataSection
from zerojax.run.config.posttrain import CriticSection, PosttrainSection
from zerojax.run.config.sharding import ClusterSection, LoRASection, MeshSection, ZeroSection
from zerojax.run.config.training import CheckpointSection, LogSection, OptimizerSection, TrainSection
from zerojax.validation.bounds import require
from zerojax.validation.untrusted import is_unicode
from zerojax.zero_config import ZeroConfig


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, as commands read them from TOML and the command line."""

    train: TrainSection = field(default_factory=TrainSection)
    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    zero: ZeroSection = field(default_factory=ZeroSection)
    lora: LoRASection = field(default_factory=LoRASection)
    posttrain: PosttrainSection = field(default_factory=PosttrainSection)
    critic: CriticSection = field(default_factory=CriticSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)

    def __post_init__(self) -> None:
        for section in dataclasses.fields(self):
            for key, value in vars(getattr(self, section.name)).items():
                require(
                    not isinstance(value, str) or is_unicode(value),
                    f"{section.name}.{key} = {value!r} is not valid Unicode: rename it, or name its folder",
                )
        require(
            self.checkpoint.keep_best == 0 or self.train.eval_every > 0,
            "checkpoint.keep_best needs validation losses: set train.eval_every, and checkpoint.every to a "
            "multiple of it",
        )
        require(
            self.train.eval_exact_match == 0 or self.data.masked,
            'train.eval_exact_match needs prompts and completions: set data.kind to "chat" or "completion"',
        )
        require(
            self.train.sequence_length <= self.model.max_seq_len,
            f"train.sequence_length {self.train.sequence_length} is longer than "
            f"model.max_seq_len {self.model.max_seq_len}: lower it to that or less",
        )

    def all_trained(self) -> "RunConfig":
        """The settings of a run of the same model that freezes nothing and has no adapters."""
        zero = dataclasses.replace(self.zero, frozen=None, frozen_weights=None, frozen_spread=None)
        return dataclasses.replace(self, zero=zero, lora=LoRASection())

    def to_zero(self, units: tuple[type, ...] = ()) -> ZeroConfig:
        """The library's `ZeroConfig` of the run; with adapters all else is frozen, unless `zero.frozen` says.

        A model of scores trains its head as well, which is new.

        Raises:
            ConfigurationError: options that contradict each other.
        """
        own_head = () if self.model.outputs is None else ("!head/*",)
        frozen = {"frozen": ("*", *own_head)} if self.lora.rank and self.zero.frozen is None else {}
        return self.zero.to_zero(units=units, accumulate=self.train.accumulate, **frozen)
