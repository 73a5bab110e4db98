"""The section of a run of ``zerojax posttrain``."""

from dataclasses import dataclass
from typing import Literal

from zerojax.errors import ConfigurationError
from zerojax.validation.bounds import check_numbers


@dataclass(frozen=True)
class PosttrainSection:
    """Training of a trained model by rewards or preferences, for `zerojax posttrain`; docs/posttrain.md and
    docs/preferences.md.

    Attributes:
        method: "grpo" compares the completions of a prompt with each other, by a reward; "dpo" and "ipo"
            learn from pairs of answers which is better; "reward" learns to score answers from such pairs;
            "none" is for `zerojax train`.
        beta: How strongly "dpo" and "ipo" hold the model to the first weights.
        reward: Scores a completion: "path/to/file.py:function", run in a process of its own.
        reward_seconds: Seconds after which a reward is given up and its completion left out.
        rollout_rows: Completions per rollout, a multiple of train.batch_size; 0 is train.batch_size.
        group_size: Completions per prompt.
        epochs: How often each completion of a rollout is trained on.
        max_new_tokens: Longest completion, in tokens.
        temperature: Divisor of the logits, of sampling and of training.
        clip_low: The ratio of the new to the old probability of a token counts down to 1 - clip_low.
        clip_high: And up to 1 + clip_high.
        scale_advantages: Divide advantages by the standard deviation of their group.
        kl: Weight of the divergence from the first weights in the loss; 0 keeps no reference.
        kl_estimator: Of the divergence (Schulman's k2 or k3).
        eval_prompts: Held-out prompts per evaluation, answered greedily; 0 is none.
        samples: Completions of each rollout that are written to RUN/samples.jsonl.
    """

    method: Literal["none", "grpo", "dpo", "ipo", "reward"] = "none"
    beta: float = 0.1
    reward: str = ""
    reward_seconds: float = 10.0
    rollout_rows: int = 0
    group_size: int = 8
    epochs: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    scale_advantages: bool = True
    kl: float = 0.0
    kl_estimator: Literal["k2", "k3"] = "k3"
    eval_prompts: int = 64
    samples: int = 4

    def __post_init__(self) -> None:
        check_numbers(self, "posttrain.{}".format)
        at_least = {"group_size": 2, "epochs": 1, "max_new_tokens": 1}
        at_least |= dict.fromkeys(("rollout_rows", "eval_prompts", "samples", "kl", "clip_high"), 0)
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigurationError(f"posttrain.{name} must be at least {least}")
        for name in ("temperature", "reward_seconds", "beta"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"posttrain.{name} must be positive")
        if not 0 <= self.clip_low < 1:
            raise ConfigurationError("posttrain.clip_low must lie in [0, 1): a ratio of 0 is the lowest")
