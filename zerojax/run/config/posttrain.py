"""The settings of ``zerojax posttrain``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zerojax.validation.bounds import MIN_TEMPERATURE, check_numbers, require
from zerojax.zero_config import ZeroConfig

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
        check_numbers(self, "posttrain.rewards: {}".format)


@dataclass(frozen=True)
class PosttrainSection:
    """Post-training with rewards or preferences (`zerojax posttrain`); see docs/posttrain.md.

    Attributes:
        method: "grpo" compares the rewards of a prompt's completions with each other, "ppo" with a critic's
            estimate. "dpo" and "ipo" learn from pairs of a chosen and a rejected answer. "reward" trains a
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
    eval_prompts: int = 64
    samples: int = 4

    def __post_init__(self) -> None:
        check_numbers(self, "posttrain.{}".format)
        at_least = {"temperature": MIN_TEMPERATURE}
        at_least |= dict.fromkeys(("epochs", "max_new_tokens", "max_turns", "reward_workers"), 1)
        counts = ("group_size", "rollout_rows", "eval_prompts", "samples")
        at_least |= dict.fromkeys((*counts, "kl", "clip_high", "value_clip"), 0)
        for name, least in at_least.items():
            require(getattr(self, name) >= least, f"posttrain.{name} must be at least {least}")
        for name in ("reward_seconds", "beta"):
            require(getattr(self, name) > 0, f"posttrain.{name} must be positive")
        require(0 <= self.clip_low < 1, "posttrain.clip_low must lie in [0, 1): a ratio of 0 is the lowest")
        require(
            self.method != "grpo" or self.group_size != 1,
            "posttrain.group_size must be at least 2: grpo compares completions",
        )
        names = [one.name for one in self.rewards]
        require(
            len({*names}) == len(names) and all(name.isidentifier() for name in names),
            f"posttrain.rewards has the names {names}: give each a different name, of letters, digits and _",
        )
        for name in ("discount", "gae_lambda"):
            require(0 <= getattr(self, name) <= 1, f"posttrain.{name} must lie in [0, 1]")

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions that score completions; empty with a reward model or an environment."""
        return self.rewards or ((RewardFunction(self.reward),) if self.reward else ())

    @property
    def completions(self) -> int:
        """Completions per prompt, group_size resolved."""
        return self.group_size or (1 if self.method == "ppo" else 8)


@dataclass(frozen=True)
class CriticSection:
    """The critic of `posttrain.method = "ppo"`.

    The options from `preset` on override [zero] for the critic.

    Attributes:
        init_from: The run or checkpoint whose weights the critic starts from; by default
            `posttrain.reward_model`, or else the policy. A language model gets a new head.
        learning_rate: Peak learning rate; by default `optimizer.learning_rate`.
        zero: What overrides [zero], by key.
    """

    init_from: str = ""
    learning_rate: float | None = None
    zero: Mapping[str, Any] = field(default_factory=dict, metadata={"overrides": ("zero", ZeroConfig, _OWN)})

    def __post_init__(self) -> None:
        check_numbers(self, "critic.{}".format)
        rate = self.learning_rate
        require(rate is None or rate > 0, "critic.learning_rate must be positive")
