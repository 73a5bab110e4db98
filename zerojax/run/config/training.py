"""Settings of the training loop, the optimizer, checkpoints and logs.

Each class is one table of the TOML file and one group of command-line options (``--train.steps 5``).
``zerojax train --help`` prints the text of ``Attributes``. A value that is wrong on any machine raises a
``ConfigurationError`` here, which names the option, before devices are initialised. Checks that depend on the
devices (does the batch divide?) come later.
"""

from dataclasses import dataclass
from typing import Literal

from zerojax.validation.bounds import check_numbers, require

_MAX_STEPS = 1 << 24  # schedules are computed in fp32, which has no larger odd integers
_MAX_TOKENS = 1 << 31  # per step: counted in int32


@dataclass(frozen=True)
class TrainSection:
    """The training loop.

    Attributes:
        steps: Optimizer steps in the whole run.
        batch_size: Sequences per optimizer step, over all devices and micro-batches.
        sequence_length: Tokens per sequence.
        accumulate: Micro-batches per optimizer step.
        seed: Seed of the initial weights, the data order, dropout and stochastic rounding.
        eval_every: Steps between evaluations; 0 evaluates at the end only.
        eval_batches: Batches per evaluation, spread evenly over the validation split.
        eval_exact_match: Held-out prompts per evaluation that the model completes greedily; reports the share
            of completions that are right word for word. 0 is none.
        eval_samples: Held-out prompts per evaluation that the model completes greedily, for RUN/samples.jsonl
            and the report. The prompt of a plain text is its first half. 0 is none.
        max_skips: Stop after this many skipped steps in a row. A step is skipped if its loss or gradient is
            not finite, or its loss is a spike.
        spike_deviations: A loss this many standard deviations above the mean of recent ones is a spike; 0
            turns the rule off.
        spike_window: Number of recent losses; until there are that many, no loss is a spike.
        on_spike: Skip the update of a step whose loss is a spike, or stop the run.
    """

    steps: int = 1000
    batch_size: int = 32
    sequence_length: int = 256
    accumulate: int = 1
    seed: int = 0
    eval_every: int = 100
    eval_batches: int = 8
    eval_exact_match: int = 0
    eval_samples: int = 0
    max_skips: int = 10
    spike_deviations: float = 0.0
    spike_window: int = 100
    on_spike: Literal["skip", "stop"] = "skip"

    def __post_init__(self) -> None:
        check_numbers(self, "train.{}".format)
        for name in ("steps", "batch_size", "sequence_length", "accumulate", "eval_batches"):
            require(getattr(self, name) >= 1, f"train.{name} must be at least 1")
        require(self.eval_every >= 0, "train.eval_every must be 0 (at the end only) or more")
        for name in ("eval_exact_match", "eval_samples"):
            require(getattr(self, name) >= 0, f"train.{name} must be 0 (none) or more")
        require(self.max_skips >= 1, "train.max_skips must be at least 1")
        require(
            0 <= self.spike_deviations < float("inf"), "train.spike_deviations must be 0 (no rule) or more"
        )
        require(self.spike_window >= 2, "train.spike_window must be at least 2: one loss has no deviation")
        require(0 <= self.seed < 2**32, "train.seed must lie in 0 .. 2**32 - 1")
        require(self.steps <= _MAX_STEPS, f"train.steps must be at most {_MAX_STEPS:,}")
        require(
            self.batch_size * (self.sequence_length + 1) <= _MAX_TOKENS,
            f"train.batch_size x train.sequence_length must be at most {_MAX_TOKENS:,} tokens per step",
        )
        require(
            self.batch_size % self.accumulate == 0,
            f"train.batch_size {self.batch_size} does not divide into "
            f"train.accumulate = {self.accumulate} micro-batches",
        )


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer and its learning-rate schedule (optax).

    Attributes:
        name: Update rule; docs/optimizers.md compares them.
        learning_rate: Peak learning rate.
        schedule: Shape after the warm-up: half a cosine; "wsd" holds the peak, then decays linearly over the
            last `decay_fraction` of the run; "linear" decays throughout; "constant" does not.
        warmup_steps: Steps of linear warm-up; at most half of the run.
        final_fraction: Learning rate at the end, as a fraction of the peak.
        decay_fraction: Fraction of the run over which "wsd" decays.
        beta1: Decay of the first moment; momentum (sgd, and muon's matrices).
        beta2: Decay of the second moment; decay of the momentum (lion).
        eps: Added to the root of the second moment (adamw, nadamw, adopt, muon's other leaves).
        weight_decay: Decoupled weight decay, on leaves of two or more dimensions only.
        clip_norm: Largest global gradient norm; 0 does not clip.
        ema_decay: Decay per step of an average of the weights, which other commands use with `--ema`; 0 keeps
            none.
    """

    name: Literal["adamw", "nadamw", "adopt", "lion", "muon", "sgd"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Literal["warmup-cosine", "wsd", "linear", "constant"] = "warmup-cosine"
    warmup_steps: int = 100
    final_fraction: float = 0.1
    decay_fraction: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, "optimizer.{}".format)
        require(self.learning_rate > 0, "optimizer.learning_rate must be positive")
        require(self.eps > 0, "optimizer.eps must be positive")
        require(0 < self.decay_fraction <= 1, "optimizer.decay_fraction must lie in (0, 1]")
        require(0 <= self.final_fraction <= 1, "optimizer.final_fraction must lie in [0, 1]")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            require(getattr(self, name) >= 0, f"optimizer.{name} must not be negative")
        for name in ("beta1", "beta2", "ema_decay"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name} must lie in [0, 1)")


@dataclass(frozen=True)
class CheckpointSection:
    """Saving the run.

    Attributes:
        every: Steps between checkpoints; 0 saves at the end only, or by `minutes`.
        minutes: Also save when the last checkpoint is this many minutes old; 0 turns this off.
        keep: How many of the newest checkpoints to keep; at least two are kept.
        keep_every: Also keep checkpoints at multiples of this many steps; 0 keeps none.
        keep_best: Also keep this many with the lowest validation loss, among checkpoints saved at a step that
            measured it.
        keep_minutes: Also keep checkpoints from this many last minutes of training.
        verify: Read every byte of a checkpoint and compare checksums before resuming from it; otherwise only
            names and sizes of its files are compared.
    """

    every: int = 500
    minutes: float = 0.0
    keep: int = 2
    keep_every: int = 0
    keep_best: int = 0
    keep_minutes: float = 0.0
    verify: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "checkpoint.{}".format)
        require(self.every >= 0, "checkpoint.every must be 0 (at the end only) or more")
        require(self.keep >= 1, "checkpoint.keep must be at least 1")
        for name in ("minutes", "keep_every", "keep_best", "keep_minutes"):
            require(getattr(self, name) >= 0, f"checkpoint.{name} must not be negative")


@dataclass(frozen=True)
class LogSection:
    """Progress lines and trackers; `metrics.jsonl` always has every step.

    Attributes:
        every: Steps between progress lines if the output is not a terminal.
        trackers: "tensorboard" (events in RUN/tensorboard), "wandb", "mlflow".
        project: Project of Weights & Biases, experiment of MLflow.
        fp8: With every evaluation, log the accuracy of each weight of fp8 matmuls: the fractions that
            saturate and underflow, and the relative error, as "fp8/PATH/error". Needs zero.matmul_dtype =
            "fp8".
    """

    every: int = 10
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    project: str = "zerojax"
    fp8: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "log.{}".format)
        require(self.every >= 1, "log.every must be at least 1")
        require(
            len(set(self.trackers)) == len(self.trackers),
            f"log.trackers names one twice: {', '.join(self.trackers)}",
        )
        require(self.project != "", "log.project is empty: name the project or experiment")
