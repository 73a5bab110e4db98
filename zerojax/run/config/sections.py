"""The sections of a config, and all of them together, ``RunConfig``.

Each class is one table of the TOML file and one group of command-line options (``--train.steps 5``).
``zerojax train --help`` prints the text of ``Attributes``. A value that is wrong on any machine raises a
``ConfigurationError`` here, which names the option, before devices are initialised. Checks that depend on the
devices (does the batch divide?) come later.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.sharding import Mesh

from zerojax.matmul.lora import LoRA
from zerojax.models.config import GPTConfig
from zerojax.sharding.mesh import make_mesh
from zerojax.validation.bounds import MAX_DEVICES, MAX_EMULATED, MIN_TEMPERATURE, check_scalars, require
from zerojax.validation.paths import is_store_url
from zerojax.validation.untrusted import is_unicode
from zerojax.zero_config import ZeroConfig

_MAX_STEPS = 1 << 24  # schedules are computed in fp32, which has no larger odd integers
_MAX_TOKENS = 1 << 31  # per step: counted in int32


def _check(section: Any, table: str, names: str, must: str, fits: Callable[[Any], bool]) -> None:
    """Refuse values of the settings ``names`` that do not fit; ``must`` says which would."""
    for name in names.split():
        value = getattr(section, name)
        require(fits(value), f"{table}.{name} = {value} must {must}")


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
        eval_batches: Batches of batch_size sequences per evaluation, spread evenly over the validation split.
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
        check_scalars(self, "train.{}".format)
        counts = "steps batch_size sequence_length accumulate eval_batches max_skips"
        _check(self, "train", counts, "be at least 1", lambda x: x >= 1)
        _check(self, "train", "eval_every", "be 0 (at the end only) or more", lambda x: x >= 0)
        _check(self, "train", "eval_exact_match eval_samples", "be 0 (none) or more", lambda x: x >= 0)
        _check(self, "train", "spike_deviations", "be 0 (no rule) or more", lambda x: x >= 0)
        why = "one loss has no deviation"
        _check(self, "train", "spike_window", f"be at least 2: {why}", lambda x: x >= 2)
        _check(self, "train", "seed", "lie in 0 .. 2**32 - 1", lambda x: 0 <= x < 2**32)
        _check(self, "train", "steps", f"be at most {_MAX_STEPS:,}", lambda x: x <= _MAX_STEPS)
        require(
            self.batch_size * (self.sequence_length + 1) <= _MAX_TOKENS,
            f"train.batch_size x train.sequence_length must be at most {_MAX_TOKENS:,} tokens per step",
        )
        require(
            self.batch_size % self.accumulate == 0,
            f"train.batch_size {self.batch_size} does not divide into "
            f"train.accumulate = {self.accumulate} micro-batches: set it to a multiple",
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
        weight_decay: Decoupled weight decay, on matrices and embeddings only.
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
        check_scalars(self, "optimizer.{}".format)
        _check(self, "optimizer", "learning_rate eps", "be positive", lambda x: x > 0)
        _check(self, "optimizer", "decay_fraction", "lie in (0, 1]", lambda x: 0 < x <= 1)
        _check(self, "optimizer", "final_fraction", "lie in [0, 1]", lambda x: 0 <= x <= 1)
        names = "warmup_steps weight_decay clip_norm"
        _check(self, "optimizer", names, "not be negative", lambda x: x >= 0)
        _check(self, "optimizer", "beta1 beta2 ema_decay", "lie in [0, 1)", lambda x: 0 <= x < 1)


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
        copy_to: Also keep a copy of the run in an object store: a URL such as s3://bucket/run, gs://bucket/run
            or file:///mnt/run. A start on other hosts continues from there.
        verify: Read every byte of a checkpoint and compare checksums before resuming from it; otherwise only
            names and sizes of its files are compared.
    """

    every: int = 500
    minutes: float = 0.0
    keep: int = 2
    keep_every: int = 0
    keep_best: int = 0
    keep_minutes: float = 0.0
    copy_to: str = ""
    verify: bool = True

    def __post_init__(self) -> None:
        check_scalars(self, "checkpoint.{}".format)
        _check(self, "checkpoint", "every", "be 0 (at the end only) or more", lambda x: x >= 0)
        _check(self, "checkpoint", "keep", "be at least 1", lambda x: x >= 1)
        names = "minutes keep_every keep_best keep_minutes"
        _check(self, "checkpoint", names, "not be negative", lambda x: x >= 0)
        must = "be a URL that begins with s3://, gs:// or file:///, and has no spaces, ? or #"
        _check(self, "checkpoint", "copy_to", must, lambda x: not x or is_store_url(x))


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
        check_scalars(self, "log.{}".format)
        _check(self, "log", "every", "be at least 1", lambda x: x >= 1)
        require(
            len(set(self.trackers)) == len(self.trackers),
            f"log.trackers names one twice: {', '.join(self.trackers)}",
        )
        require(self.project != "", "log.project is empty: name the project or experiment")


Kind = Literal["text", "chat", "completion"]


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture: a table [[data.mixture]] of the TOML file.

    Attributes:
        source: As data.source.
        weight: Its share of the sequences, relative to the weights of the others.
        column: Overrides data.column.
        pattern: Overrides data.pattern.
        kind: Overrides data.kind.
    """

    source: str
    weight: float = 1.0
    column: str | None = None
    pattern: str | None = None
    kind: Kind | None = None

    def __post_init__(self) -> None:
        check_scalars(self, "data.mixture: {}".format)
        require(self.source != "", "data.mixture: a source is empty: name a file, folder, glob or 'stdlib'")
        require(
            0 < self.weight < float("inf"),
            f"data.mixture: the weight of {self.source!r} must be positive; remove the table to drop it",
        )


@dataclass(frozen=True)
class DataSection:
    """The text to learn from.

    Attributes:
        source: A file, folder or glob of plain text, JSON lines, Parquet or Arrow, or a folder saved by
            Hugging Face `datasets`. RUN/data names the tokens of an earlier run, and "stdlib" the source of
            Python's standard library.
        mixture: Several sources with weights, instead of `source`; in a file only.
        pattern: Which files of a folder to read.
        column: Which column of JSON lines, Parquet and Arrow holds the text.
        kind: What a row holds. "text": one text. "chat": a conversation; the loss counts only the assistant's
            messages. "completion": a prompt and its completion; the loss counts only the completion.
        messages_column: Which column holds a conversation: a list of {"role", "content"}.
        prompt_column: Which column holds a prompt.
        completion_column: Which column holds its completion.
        chosen_column: Which column holds the better of two responses, to learn from preferences.
        rejected_column: Which column holds the other one.
        chat_template: The template that turns a conversation into text: the "tokenizer"'s own, "chatml", or
            the path of a Jinja file.
        tokenizer: "byte", or "bpe" (trained on the training split), or the path of a tokenizer.json.
        vocab_size: Vocabulary of a newly trained BPE.
        validation: Fraction of the documents held out for validation.
        packing: "none" joins all documents and cuts them into sequences; "documents" packs whole documents
            into sequences, and no document attends to another.
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
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    chat_template: str = "tokenizer"
    tokenizer: str = "byte"
    vocab_size: int = 4096
    validation: float = 0.05
    packing: Literal["none", "documents"] = "none"
    verify: bool = True

    def __post_init__(self) -> None:
        check_scalars(self, "data.{}".format)
        require(self.source != "", "data.source is empty: name a file, folder, glob or 'stdlib'")
        require(
            not self.mixture or self.source == DataSection.source,
            f"data.source {self.source!r} and data.mixture exclude each other: add the source to the mixture",
        )
        columns = [one.name for one in dataclasses.fields(self) if one.name.endswith("column")]
        for name in (*columns, "chat_template"):
            require(getattr(self, name) != "", f"data.{name} is empty: remove the key, or give it a name")
        require(
            self.prompt_column != self.completion_column,
            f"data.prompt_column and data.completion_column are both {self.prompt_column!r}: name two "
            "different columns",
        )
        require(
            self.chosen_column != self.rejected_column,
            f"data.chosen_column and data.rejected_column are both {self.chosen_column!r}: name two "
            "different columns",
        )
        require(
            not self.masked or self.packing == "documents",
            'data.kind = "chat" or "completion" keeps documents whole: set data.packing = "documents"',
        )
        _check(self, "data", "vocab_size", "exceed the 256 bytes", lambda x: x > 256)
        _check(self, "data", "validation", "lie between 0 and 1", lambda x: 0 < x < 1)

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


_OWN = ("preset", "stage", "weights", "weights_delta", "hpz", "grads", "compute_dtype", "remat")
"""The keys of [zero] that the critic may override."""


@dataclass(frozen=True)
class RewardFunction:
    """One of several rewards: a table [[posttrain.rewards]] of the TOML file.

    Attributes:
        function: As posttrain.reward.
        weight: Factor of this function's value in the sum that is a completion's reward.
        name: Name of its metric, reward_NAME.
    """

    function: str
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        check_scalars(self, "posttrain.rewards: {}".format)


@dataclass(frozen=True)
class PosttrainSection:
    """Post-training with rewards or preferences (`zerojax posttrain`); see docs/posttrain.md.

    Attributes:
        method: "grpo" compares the rewards of a prompt's completions with each other, "ppo" with a critic's
            estimate. "dpo" and "ipo" learn from pairs of a chosen and a rejected response. "reward" trains a
            reward model on such pairs. "none" is for `zerojax train`.
        beta: How strongly "dpo" and "ipo" hold the model to the first weights.
        reward: The function that scores a completion: "path/to/file.py:function".
        rewards: Several such functions with names and weights, instead of `reward`; in a file only.
        reward_model: A run of the method "reward" (model.outputs = 1) that scores completions instead.
        environment: An environment that replies to the model's turns and rewards them, instead of `reward`:
            "path/to/file.py:name", where the name is an object or class with the methods `reset` and `step`.
        max_turns: The most turns of a completion in an environment.
        reward_workers: The most processes that score completions, for each process of the run.
        reward_seconds: Seconds that the rewards of a completion, or a call of the environment, may take;
            completions that take longer are dropped.
        reward_variables: Environment variables that rewards get although their names contain TOKEN, KEY,
            SECRET, PASSWORD or the like.
        rollout_rows: Completions per rollout, a multiple of train.batch_size; 0 is train.batch_size.
        group_size: Completions per prompt; 0 is 8 with "grpo" and 1 with "ppo".
        epochs: How many times each completion of a rollout is trained on.
        max_new_tokens: Longest completion, in tokens; in an environment, longest turn.
        temperature: Divisor of the logits, in sampling and in training.
        clip_low: The ratio of a token's new to its old probability is clipped below at 1 - clip_low.
        clip_high: The same ratio is clipped above at 1 + clip_high.
        scale_advantages: Divide advantages by the standard deviation of their group ("grpo").
        normalize_advantages: Shift and scale the advantages of a rollout's tokens to mean 0 and deviation 1
            ("ppo").
        discount: Discount of later rewards, per token ("ppo").
        gae_lambda: Lambda of GAE: 1 trusts the rewards only, 0 the critic ("ppo").
        value_clip: Largest change of a value within a rollout that counts in the critic's loss ("ppo"); 0
            does not clip.
        kl: Weight of the divergence from the first weights, in the loss of "grpo" and in the reward of each
            token of "ppo"; 0 keeps no reference.
        kl_estimator: Estimator of the divergence (Schulman's k2 or k3) of "grpo"; "ppo" uses k1.
        engines: URLs of vLLM engines that generate instead of this run's devices; see docs/posttrain.md.
        engine_seconds: The longest that an engine may take to respond; its prompt then goes to another.
        engine_folder: The folder in which engines find the weights, under the same path on their hosts; by
            default RUN/weights. With receivers it is their mirror.
        engine_receivers: HOST:PORT of the receiver beside each engine, in the engines' order, to which the
            run sends the changed elements; without receivers it writes all weights to engine_folder.
        engine_weights: "fp8-blocks" quantizes the linear layers for the engines, as `zerojax export --weights
            fp8-blocks` does.
        rollouts_ahead: 1 lets engines generate the next rollout while the run trains on the last one, with
            weights that are one rollout old; 0 waits for the newest weights.
        importance_cap: With engines clip_low and clip_high count from the engine's probability of a token.
            The ratio to it begins at importance_cap at most; 0 counts from the run's own probability.
        eval_prompts: Held-out prompts per evaluation, completed greedily; 0 is none.
        samples: Completions of each rollout that are written to RUN/samples.jsonl.
    """

    method: Literal["none", "grpo", "ppo", "dpo", "ipo", "reward"] = "none"
    beta: float = 0.1
    reward: str = ""
    rewards: tuple[RewardFunction, ...] = ()
    reward_model: str = ""
    environment: str = ""
    max_turns: int = 8
    reward_workers: int = 1
    reward_seconds: float = 10.0
    reward_variables: tuple[str, ...] = ()
    rollout_rows: int = 0
    group_size: int = 0
    epochs: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    scale_advantages: bool = True
    normalize_advantages: bool = True
    discount: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float = 0.2
    kl: float = 0.0
    kl_estimator: Literal["k2", "k3"] = "k3"
    engines: tuple[str, ...] = ()
    engine_seconds: float = 600.0
    engine_folder: str = ""
    engine_receivers: tuple[str, ...] = ()
    engine_weights: Literal["full", "fp8-blocks"] = "full"
    rollouts_ahead: int = 0
    importance_cap: float = 2.0
    eval_prompts: int = 64
    samples: int = 4

    def __post_init__(self) -> None:
        check_scalars(self, "posttrain.{}".format)
        _check(
            self, "posttrain", "temperature", f"be at least {MIN_TEMPERATURE}", lambda x: x >= MIN_TEMPERATURE
        )
        names = "epochs max_new_tokens max_turns reward_workers"
        _check(self, "posttrain", names, "be at least 1", lambda x: x >= 1)
        names = "group_size rollout_rows eval_prompts samples kl clip_high value_clip importance_cap"
        _check(self, "posttrain", names, "be at least 0", lambda x: x >= 0)
        _check(self, "posttrain", "reward_seconds engine_seconds beta", "be positive", lambda x: x > 0)
        _check(self, "posttrain", "rollouts_ahead", "be 0 or 1", lambda x: x in (0, 1))
        why = "a ratio of 0 is the lowest"
        _check(self, "posttrain", "clip_low", f"lie in [0, 1): {why}", lambda x: 0 <= x < 1)
        _check(self, "posttrain", "discount gae_lambda", "lie in [0, 1]", lambda x: 0 <= x <= 1)
        require(
            self.method != "grpo" or self.group_size != 1,
            "posttrain.group_size must be at least 2: grpo compares completions",
        )
        names = [one.name for one in self.rewards]
        require(
            len({*names}) == len(names) and all(name.isidentifier() for name in names),
            f"posttrain.rewards has the names {names}: give each a different name, of letters, digits and _",
        )

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions that score completions; empty with a reward model or an environment."""
        return self.rewards or ((RewardFunction(self.reward),) if self.reward else ())

    @property
    def completions(self) -> int:
        """Completions per prompt: group_size or its default."""
        return self.group_size or (1 if self.method == "ppo" else 8)


@dataclass(frozen=True)
class CriticSection:
    """The critic of `posttrain.method = "ppo"`.

    The options from `preset` on override [zero] for the critic.

    Attributes:
        init_from: The run or checkpoint whose weights the critic starts from; by default
            `posttrain.reward_model`, or else the policy. A language model gets a new head.
        learning_rate: Peak learning rate; by default `optimizer.learning_rate`.
        zero: Options that override [zero], by key.
    """

    init_from: str = ""
    learning_rate: float | None = None
    zero: Mapping[str, Any] = field(default_factory=dict, metadata={"overrides": ("zero", ZeroConfig, _OWN)})

    def __post_init__(self) -> None:
        check_scalars(self, "critic.{}".format)
        _check(self, "critic", "learning_rate", "be positive", lambda x: x is None or x > 0)


@dataclass(frozen=True)
class MeshSection:
    """The (node, local) mesh: `local` is the fast domain, `node` the slow one.

    Attributes:
        nodes: Nodes; 0 is one per process.
        local: Devices per node; 0 is all devices of a node.
        emulate: On CPU, split the host into nodes x local devices that emulate the cluster.
    """

    nodes: int = 0
    local: int = 0
    emulate: bool = False

    def __post_init__(self) -> None:
        check_scalars(self, "mesh.{}".format)
        _check(self, "mesh", "nodes", "be 0 (from the processes) or more", lambda x: x >= 0)
        _check(self, "mesh", "local", "be 0 (all the devices of a node) or more", lambda x: x >= 0)
        require(
            not self.emulate or (self.nodes > 0 and self.local > 0),
            "mesh.emulate needs mesh.nodes and mesh.local, the numbers of devices to emulate",
        )
        most = MAX_EMULATED if self.emulate else MAX_DEVICES
        require(
            max(self.nodes, 1) * max(self.local, 1) <= most,
            f"mesh.nodes {self.nodes} x mesh.local {self.local}: at most {most:,} devices"
            f"{' can be emulated' * self.emulate}",
        )

    def to_mesh(self) -> Mesh:
        """The mesh of this job's devices."""
        return make_mesh(self.nodes or None, self.local or None)


@dataclass(frozen=True)
class ClusterSection:
    """Timeouts of the processes of a run, and their cache; docs/clusters.md says what happens at each.

    Attributes:
        join_timeout: Seconds to wait for all processes at the start.
        peer_timeout: Seconds of silence after which a process counts as lost, and the others end.
        insecure: Run without a token (ZEROJAX_JOB_TOKEN) even if the network can reach process 0.
        step_factor: End the run when a step takes this many times the median of recent ones; 0 turns this
            off.
        step_timeout: Seconds that any step may take, whatever the median.
        phase_timeout: Seconds that compilation, an evaluation or a checkpoint may take; 0 is no limit.
        compilation_cache: Folder that keeps compiled programs for later starts. "auto" is
            JAX_COMPILATION_CACHE_DIR, else zerojax/compiled in the user's cache folder; "off" keeps none.
    """

    join_timeout: float = 300.0
    peer_timeout: float = 60.0
    insecure: bool = False
    step_factor: float = 10.0
    step_timeout: float = 300.0
    phase_timeout: float = 3600.0
    compilation_cache: str = "auto"

    def __post_init__(self) -> None:
        check_scalars(self, "cluster.{}".format)
        _check(self, "cluster", "join_timeout peer_timeout", "be at least 1 second", lambda x: x >= 1)
        names = "step_factor step_timeout phase_timeout"
        _check(self, "cluster", names, "not be negative", lambda x: x >= 0)
        require(
            self.compilation_cache != "",
            'cluster.compilation_cache is empty: name a folder, or choose "auto" or "off"',
        )


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
            "lora: adapters are for frozen weights, and zero.frozen names none: remove that key "
            'to freeze all other weights, or name some, such as ["*"]',
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
            f"set it to {-(-length // sharing) * sharing}, for example",
        )

    def all_trained(self) -> "RunConfig":
        """The settings of a run of the same model that freezes nothing and has no adapters."""
        zero = self.zero.replace(frozen=(), frozen_weights=None, frozen_spread="node")
        return dataclasses.replace(self, zero=zero, lora=None)

    def to_zero(self, units: tuple[type, ...] = ()) -> ZeroConfig:
        """[zero] with the units of the run's model and its number of micro-batches."""
        return self.zero.replace(units=units, accumulate=self.train.accumulate)
