"""The sections of a run's settings.

Each class is one table of the TOML file and one group of command-line options (``--train.steps 5``);
``zerojax train --help`` prints the text of ``Attributes``. Values that are wrong on any machine raise a
``ConfigurationError`` here that names the option, before devices are initialised; what depends on the
devices (does the batch divide?) is checked later.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from pallas_kernels import Format
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import LoRA
from zerojax.models.config import GPTConfig
from zerojax.run.config.posttrain import PosttrainSection
from zerojax.validation.bounds import MOST_DEVICES, MOST_EMULATED, check_numbers
from zerojax.validation.dtypes import dtype_name
from zerojax.validation.patterns import MATMUL_WEIGHTS
from zerojax.zero_config import COMPUTE_FORMAT, ZeroConfig

_MOST_STEPS = 1 << 24  # schedules are computed in fp32, which has no larger odd integers
_MOST_TOKENS = 1 << 31  # per step: counted in int32

WireFormat = Literal["compute", Format]
FrozenFormat = Literal["compute", Format, "nf4"]
Kind = Literal["text", "chat", "completion"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(message)


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
        eval_exact_match: Held-out prompts per evaluation that the model answers greedily, to measure how many
            answers equal the completion; 0 is none.
        max_skips: Stop after this many skipped steps in a row: with a non-finite loss or gradient, or a
            spike.
        spike_deviations: A loss this many standard deviations above the mean of recent ones is a spike; 0
            turns the rule off.
        spike_window: Number of recent losses; until there are so many, no loss is a spike.
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
    max_skips: int = 10
    spike_deviations: float = 0.0
    spike_window: int = 100
    on_spike: Literal["skip", "stop"] = "skip"

    def __post_init__(self) -> None:
        check_numbers(self, "train.{}".format)
        for name in ("steps", "batch_size", "sequence_length", "accumulate", "eval_batches"):
            _require(getattr(self, name) >= 1, f"train.{name} must be at least 1")
        _require(self.eval_every >= 0, "train.eval_every must be 0 (at the end only) or more")
        _require(self.eval_exact_match >= 0, "train.eval_exact_match must be 0 (none) or more")
        _require(self.max_skips >= 1, "train.max_skips must be at least 1")
        _require(
            0 <= self.spike_deviations < float("inf"), "train.spike_deviations must be 0 (no rule) or more"
        )
        _require(self.spike_window >= 2, "train.spike_window must be at least 2: one loss has no deviation")
        _require(0 <= self.seed < 2**32, "train.seed must lie in 0 .. 2**32 - 1")
        _require(self.steps <= _MOST_STEPS, f"train.steps must be at most {_MOST_STEPS:,}")
        _require(
            self.batch_size * (self.sequence_length + 1) <= _MOST_TOKENS,
            f"train.batch_size x train.sequence_length must be at most {_MOST_TOKENS:,} tokens per step",
        )
        _require(
            self.batch_size % self.accumulate == 0,
            f"train.batch_size {self.batch_size} does not divide into "
            f"train.accumulate = {self.accumulate} micro-batches",
        )


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture: a table [[data.mixture]] of the TOML file.

    Attributes:
        source: As data.source.
        weight: Its share of the sequences, relative to the weights of the others.
        column: As data.column, which is the default.
        pattern: As data.pattern, which is the default.
        kind: As data.kind, which is the default.
    """

    source: str
    weight: float = 1.0
    column: str | None = None
    pattern: str | None = None
    kind: Kind | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "data.mixture: {}".format)
        _require(self.source != "", "data.mixture: a source is empty: name a file, folder, glob or 'stdlib'")
        _require(
            0 < self.weight < float("inf"),
            f"data.mixture: the weight of {self.source!r} must be positive; leave the source out to drop it",
        )


@dataclass(frozen=True)
class DataSection:
    """The text to learn from.

    Attributes:
        source: "stdlib" (the Python standard library's own source code), or a file, folder or glob
            of plain text, JSON lines, Parquet or Arrow, or a folder that Hugging Face `datasets`
            saved, or a folder of tokens that an earlier run prepared (RUN/data).
        mixture: Several sources with weights, instead of `source`; in a file only.
        pattern: Which files of a folder to read.
        column: Which column of JSON lines, Parquet and Arrow holds the text.
        kind: What a row is: a "text"; a conversation ("chat"), of which only the assistant's messages count
            in the loss; or a prompt with its "completion", which alone counts.
        messages_column: Which column holds a conversation: a list of {"role", "content"}.
        prompt_column: Which column holds a prompt.
        completion_column: Which column holds its completion.
        chat_template: What turns a conversation into text: the "tokenizer"'s own chat template, "chatml", or
            the path of a Jinja file.
        tokenizer: "byte", or "bpe" (trained on the training split), or the path of a
            tokenizer.json.
        vocab_size: Vocabulary of a newly trained BPE.
        validation: Fraction of the documents held out for validation.
        packing: "none" cuts the documents, joined, into sequences; "documents" packs whole documents into
            sequences, within which they do not attend to each other.
        verify: Read the token files once at the start and compare their checksums.
    """

    source: str = "stdlib"
    mixture: tuple[MixtureSource, ...] = ()
    pattern: str = "**/*"
    column: str = "text"
    kind: Kind = "text"
    messages_column: str = "messages"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    chat_template: str = "tokenizer"
    tokenizer: str = "byte"
    vocab_size: int = 4096
    validation: float = 0.05
    packing: Literal["none", "documents"] = "none"
    verify: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "data.{}".format)
        _require(self.source != "", "data.source is empty: name a file, folder, glob or 'stdlib'")
        _require(
            not self.mixture or self.source == DataSection.source,
            f"data.source {self.source!r} and data.mixture exclude each other: add the source to the mixture",
        )
        for name in ("column", "messages_column", "prompt_column", "completion_column", "chat_template"):
            _require(getattr(self, name) != "", f"data.{name} is empty: leave it out, or give its name")
        _require(
            self.prompt_column != self.completion_column,
            f"data.prompt_column and data.completion_column are both {self.prompt_column!r}",
        )
        _require(
            not self.masked or self.packing == "documents",
            'data.kind = "chat" or "completion" keeps documents whole: set data.packing = "documents"',
        )
        _require(self.vocab_size > 256, "data.vocab_size must exceed the 256 bytes")
        _require(0.0 < self.validation < 1.0, "data.validation must lie between 0 and 1")

    @property
    def masked(self) -> bool:
        """Whether only some of the tokens count in the loss."""
        return any(one.kind != "text" for one in self.sources)

    @property
    def sources(self) -> tuple[MixtureSource, ...]:
        """The sources of the mixture, or the single one, each with its column, pattern and kind."""
        return tuple(
            dataclasses.replace(
                one,
                column=one.column or self.column,
                pattern=one.pattern or self.pattern,
                kind=one.kind or self.kind,
            )
            for one in self.mixture or (MixtureSource(self.source),)
        )


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer and its learning-rate schedule (optax).

    Attributes:
        name: Update rule; docs/optimizers.md compares them.
        learning_rate: Peak learning rate.
        schedule: Shape after the warm-up: a half cosine; "wsd" holds the peak, then decays linearly
            over the last `decay_fraction` of the run; a straight line; or no decay.
        warmup_steps: Steps of linear warm-up; at most half of the run.
        final_fraction: Learning rate at the end, as a fraction of the peak.
        decay_fraction: Fraction of the run over which "wsd" decays.
        beta1: Decay of the first moment; momentum (sgd, and muon's matrices).
        beta2: Decay of the second moment; of the momentum (lion).
        eps: Added to the root of the second moment (adamw, nadamw, adopt, muon's other leaves).
        weight_decay: Decoupled weight decay, on leaves of two or more dimensions only.
        clip_norm: Largest global gradient norm; 0 does not clip.
        ema_decay: Decay per step of an average of the weights, for `--ema` of other commands; 0 keeps none.
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
        _require(self.learning_rate > 0, "optimizer.learning_rate must be positive")
        _require(self.eps > 0, "optimizer.eps must be positive")
        _require(0 < self.decay_fraction <= 1, "optimizer.decay_fraction must lie in (0, 1]")
        _require(0 <= self.final_fraction <= 1, "optimizer.final_fraction must lie in [0, 1]")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            _require(getattr(self, name) >= 0, f"optimizer.{name} must not be negative")
        for name in ("beta1", "beta2", "ema_decay"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name} must lie in [0, 1)")


@dataclass(frozen=True)
class MeshSection:
    """The (node, local) mesh: `local` is the fast domain, `node` the slow one.

    Attributes:
        nodes: Nodes; 0 takes one per process.
        local: Devices per node; 0 takes all devices of a node.
        emulate: On CPU, split the host into nodes x local devices that emulate the cluster.
    """

    nodes: int = 0
    local: int = 0
    emulate: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "mesh.{}".format)
        _require(self.nodes >= 0, "mesh.nodes must be 0 (from the processes) or more")
        _require(self.local >= 0, "mesh.local must be 0 (all the devices of a node) or more")
        _require(
            not self.emulate or (self.nodes > 0 and self.local > 0),
            "mesh.emulate needs mesh.nodes and mesh.local, the numbers of devices to emulate",
        )
        most = MOST_EMULATED if self.emulate else MOST_DEVICES
        _require(
            max(self.nodes, 1) * max(self.local, 1) <= most,
            f"mesh.nodes {self.nodes} x mesh.local {self.local}: at most {most:,} devices"
            f"{' can be emulated' * self.emulate}",
        )


@dataclass(frozen=True)
class ZeroSection:
    """How the state is sharded and what is sent.

    `preset` sets everything; each other option given overrides the preset. The wire format "compute" sends
    the compute dtype.

    Attributes:
        preset: "zero3" is exact, "zero++" as published, "delta" sends less than either.
        stage: ZeRO stage 0, 1, 2 or 3.
        compute_dtype: Dtype of the forward and backward pass: bfloat16 (bf16) or float32 (fp32).
        remat: What the backward pass recomputes.
        accumulate_order: Micro-batches one by one through the whole model ("depth"), or all through each
            layer before the next ("breadth"), which communicates once per step, beside compute, and keeps
            the activations of all micro-batches.
        weights: Wire format of the weights between nodes.
        weights_delta: Send the change of the weights instead of the weights.
        delta_resync: Steps between full-precision resynchronisations; 0 is never.
        local_weights: Wire format of the weights inside a node.
        hpz: Keep a secondary copy of the weights in each node for the backward pass.
        grads: Wire formats of the gradients inside a node and between nodes.
        grads_hops: Reduce gradients in 1 or 2 hops.
        grad_sync: Reduce gradients between nodes for each micro-batch, or once per step.
        block_size: Elements that share a quantization scale; best a divisor of the model's width.
        rounding: Rounding of gradients before they are sent.
        rotation: Width of the Hadamard rotation before encoding; 0 is none.
        error_feedback: Add the rounding error to the next step's gradient.
        chunks: Pieces that the gradient hops are cut into, so that the two overlap.
        precise: Pairs of a path pattern and a wire format: weights and gradients whose path matches
            are never sent in fewer bits.
        matmul_dtype: "fp8" computes the matmuls of blocks in 8-bit floating point; "compute" does not.
        fp8: Path patterns of the weights to compute with in fp8; "!" leaves one out, the last match decides.
        frozen: Path patterns of the weights that are not trained, read like those of `fp8`; with adapters
            (`[lora]`) all, if nothing is given.
        frozen_weights: Format in which they are stored and gathered within a node: "compute", a wire format,
            or "nf4".
        frozen_spread: Over which devices they are stored once: those of each "node", so that they never cross
            nodes, or of the "world", which takes less memory and sends them in both passes.
    """

    preset: str = "zero3"
    stage: int | None = None
    compute_dtype: str | None = None
    remat: Literal["full", "attention", "none"] | None = None
    accumulate_order: Literal["depth", "breadth"] | None = None
    weights: WireFormat | None = None
    weights_delta: bool | None = None
    delta_resync: int | None = None
    local_weights: WireFormat | None = None
    hpz: bool | None = None
    grads: tuple[WireFormat, WireFormat] | None = None
    grads_hops: int | None = None
    grad_sync: Literal["micro", "step"] | None = None
    block_size: int | None = None
    rounding: Literal["nearest", "stochastic"] | None = None
    rotation: int | None = None
    error_feedback: bool | None = None
    chunks: int | None = None
    precise: tuple[tuple[str, WireFormat], ...] | None = None
    matmul_dtype: Literal["compute", "fp8"] | None = None
    fp8: tuple[str, ...] | None = None
    frozen: tuple[str, ...] | None = None
    frozen_weights: FrozenFormat | None = None
    frozen_spread: Literal["node", "world"] | None = None

    def __post_init__(self) -> None:
        if self.compute_dtype is not None:
            name = dtype_name(self.compute_dtype, "zero.compute_dtype", tuple(COMPUTE_FORMAT))
            object.__setattr__(self, "compute_dtype", name)

    def to_zero(self, **settings: Any) -> ZeroConfig:
        """The library's `ZeroConfig`: the preset, overridden by what is set here and `settings`.

        Raises:
            ConfigurationError: an unknown preset, or options that contradict each other.
        """
        given = {
            f.name: value
            for f in dataclasses.fields(self)
            if f.name != "preset" and (value := getattr(self, f.name)) is not None
        }
        for name in ("weights", "local_weights", "frozen_weights"):
            if given.get(name) == "compute":
                given[name] = None
        if "grads" in given:
            given["grads"] = tuple(None if g == "compute" else g for g in given["grads"])
        return ZeroConfig.preset(self.preset, **given, **settings)


@dataclass(frozen=True)
class LoRASection:
    """Low-rank adapters of frozen weights (Hu et al., 2021).

    Attributes:
        rank: Of the adapters; 0 trains none.
        alpha: An adapter is multiplied by alpha / rank.
        targets: Path patterns of the two-dimensional weights that get one; "!" leaves one out, the last match
            decides.
        dropout: Probability of zeroing an element of an adapter's input.
        rslora: Multiply by alpha / sqrt(rank) instead.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: tuple[str, ...] = MATMUL_WEIGHTS
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "lora.{}".format)
        _require(self.rank >= 0, "lora.rank must be 0 (no adapters) or more")
        self.to_lora()

    def to_lora(self) -> LoRA | None:
        """The library's `LoRA`, or None without adapters.

        Raises:
            ConfigurationError: a value that cannot work.
        """
        return LoRA(**vars(self)) if self.rank else None


@dataclass(frozen=True)
class CheckpointSection:
    """Saving the run.

    Attributes:
        every: Steps between checkpoints; 0 saves at the end only, or by `minutes`.
        minutes: Also save when the last checkpoint is this many minutes old; 0 does not.
        keep: How many of the newest checkpoints to keep, at least 2.
        keep_every: Also keep those at multiples of this many steps; 0 keeps none.
        keep_best: Also keep this many with the lowest validation loss, of those saved at a step that
            measured it.
        keep_minutes: Also keep those of the last so many minutes of training.
        verify: Read every byte of a checkpoint and compare checksums before resuming from it; otherwise
            only names and sizes of its files are compared.
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
        _require(self.every >= 0, "checkpoint.every must be 0 (at the end only) or more")
        _require(self.keep >= 1, "checkpoint.keep must be at least 1")
        for name in ("minutes", "keep_every", "keep_best", "keep_minutes"):
            _require(getattr(self, name) >= 0, f"checkpoint.{name} must not be negative")


@dataclass(frozen=True)
class ClusterSection:
    """Timeouts of the processes of a run; docs/clusters.md says what happens at each.

    Attributes:
        join_timeout: Seconds that a process waits for the others at the start.
        peer_timeout: Seconds of silence after which a process counts as lost, and the others end.
        insecure: Run without a token (ZEROJAX_JOB_TOKEN) even if the network can reach process 0.
        step_factor: End the run when a step takes this many times the median of recent ones; 0 never does.
        step_timeout: Seconds that a step may always take, whatever the median.
        phase_timeout: Seconds for compilation, an evaluation or a checkpoint; 0 is no limit.
    """

    join_timeout: float = 300.0
    peer_timeout: float = 60.0
    insecure: bool = False
    step_factor: float = 10.0
    step_timeout: float = 300.0
    phase_timeout: float = 3600.0

    def __post_init__(self) -> None:
        check_numbers(self, "cluster.{}".format)
        for name in ("join_timeout", "peer_timeout"):
            _require(getattr(self, name) >= 1, f"cluster.{name} must be at least 1 second")
        for name in ("step_factor", "step_timeout", "phase_timeout"):
            _require(getattr(self, name) >= 0, f"cluster.{name} must not be negative")


@dataclass(frozen=True)
class LogSection:
    """Progress lines and trackers; `metrics.jsonl` always has every step.

    Attributes:
        every: Steps between plain progress lines, if there is no terminal.
        trackers: "tensorboard" (events in RUN/tensorboard), "wandb", "mlflow".
        project: Project of Weights & Biases, experiment of MLflow.
        fp8: With every evaluation, log what each weight of fp8 matmuls loses: the fractions that saturate and
            underflow, and the relative error, as "fp8/PATH/error". Needs zero.matmul_dtype = "fp8".
    """

    every: int = 10
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    project: str = "zerojax"
    fp8: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "log.{}".format)
        _require(self.every >= 1, "log.every must be at least 1")
        _require(
            len(set(self.trackers)) == len(self.trackers),
            f"log.trackers names one twice: {', '.join(self.trackers)}",
        )
        _require(self.project != "", "log.project is empty: name the project or experiment")


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
    mesh: MeshSection = field(default_factory=MeshSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)

    def __post_init__(self) -> None:
        _require(
            self.checkpoint.keep_best == 0 or self.train.eval_every > 0,
            "checkpoint.keep_best needs validation losses: set train.eval_every, and checkpoint.every to a "
            "multiple of it",
        )
        _require(
            self.train.eval_exact_match == 0 or self.data.masked,
            'train.eval_exact_match needs prompts and completions: set data.kind to "chat" or "completion"',
        )
        _require(
            self.train.sequence_length <= self.model.max_seq_len,
            f"train.sequence_length {self.train.sequence_length} is longer than "
            f"model.max_seq_len {self.model.max_seq_len}",
        )

    def all_trained(self) -> "RunConfig":
        """The settings of a run of the same model that freezes nothing and has no adapters."""
        zero = dataclasses.replace(self.zero, frozen=None, frozen_weights=None, frozen_spread=None)
        return dataclasses.replace(self, zero=zero, lora=LoRASection())

    def to_zero(self, units: tuple[type, ...] = ()) -> ZeroConfig:
        """The library's `ZeroConfig` of the run; with adapters all else is frozen, unless `zero.frozen` says.

        Raises:
            ConfigurationError: options that contradict each other.
        """
        frozen = {"frozen": ("*",)} if self.lora.rank and self.zero.frozen is None else {}
        return self.zero.to_zero(units=units, accumulate=self.train.accumulate, **frozen)
