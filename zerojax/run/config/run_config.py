"""All settings of a run."""

import dataclasses
from dataclasses import dataclass, field

from zerojax.matmul.lora import LoRA
from zerojax.models.config import GPTConfig
from zerojax.run.config.data import DataSection
from zerojax.run.config.posttrain import CriticSection, PosttrainSection
from zerojax.run.config.sharding import ClusterSection, MeshSection
from zerojax.run.config.training import CheckpointSection, LogSection, OptimizerSection, TrainSection
from zerojax.validation.bounds import require
from zerojax.validation.untrusted import is_unicode
from zerojax.zero_config import ZeroConfig


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, as commands read them from TOML and the command line.

    Each section is a dataclass, and each of its fields is a setting. ``keys_of`` gives a setting's key in the
    file.
    """

    train: TrainSection = field(default_factory=TrainSection)
    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    lora: LoRA | None = None
    posttrain: PosttrainSection = field(default_factory=PosttrainSection)
    critic: CriticSection = field(default_factory=CriticSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)

    def __post_init__(self) -> None:
        for section in dataclasses.fields(self):
            for key, value in vars(getattr(self, section.name) or LoRA()).items():
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
            self.lora is None or bool(self.zero.frozen),
            "lora: adapters are for frozen weights, and zero.frozen names none: leave it out, which "
            'freezes all others, or name some, such as ["*"]',
        )
        require(
            self.train.sequence_length <= self.model.max_seq_len,
            f"train.sequence_length {self.train.sequence_length} is longer than "
            f"model.max_seq_len {self.model.max_seq_len}: lower it to that or less",
        )

        sharing, length = self.zero.sequence_parallel, self.train.sequence_length
        require(
            length % sharing == 0,
            f"train.sequence_length {length} does not divide by zero.sequence_parallel {sharing}: "
            f"{-(-length // sharing) * sharing} would",
        )

    def all_trained(self) -> "RunConfig":
        """The settings of a run of the same model that freezes nothing and has no adapters."""
        zero = self.zero.replace(frozen=(), frozen_weights=None, frozen_spread="node")
        return dataclasses.replace(self, zero=zero, lora=None)

    def to_zero(self, units: tuple[type, ...] = ()) -> ZeroConfig:
        """[zero] with the units of the run's model and its number of micro-batches."""
        return self.zero.replace(units=units, accumulate=self.train.accumulate)
