"""GRPO: compares the completions of a prompt with each other (Shao et al., 2024, "DeepSeekMath")."""

import jax.numpy as jnp
import numpy as np

from zerojax.multihost.preemption import StopRequest
from zerojax.posttrain.loss.advantages import group_advantages
from zerojax.posttrain.methods.trainer import PostTrainer
from zerojax.posttrain.processes import Rows
from zerojax.posttrain.rollout.rollout import Rollout, mixed_groups
from zerojax.train.step import train_step


class GRPOTrainer(PostTrainer):
    """A run of GRPO; a context manager."""

    def loop(self, signalled: StopRequest) -> None:
        """Rollout, score, advantages, update and log, until the last step."""
        self.evaluate_first_weights()
        while self.step < self.config.train.steps:
            rollout = self.rollout(signalled)
            rewards = self.score(rollout, signalled)
            rows = self.with_advantages(rollout, rewards)
            self.write_samples(rollout, rewards)
            measured = self.measure(rollout, rewards, rows)
            mixed = mixed_groups(rewards, self.config.posttrain.completions)
            for batch in self.minibatches(rows):
                self.state, metrics = train_step(self.state, batch)
                self.log_step(metrics | measured | {"mixed_groups": jnp.float32(mixed)})
            self.finish_rollout(signalled)

    def with_advantages(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """The columns of ``policy_loss``, from one reward per row (NaN: none).

        Each token has the advantage of its completion within the group.
        """
        settings, rows = self.config.posttrain, self.with_log_probs(rollout, rewards)
        advantages = group_advantages(
            jnp.asarray(rewards),
            jnp.isfinite(rewards).astype(jnp.float32),
            group_size=settings.completions,
            scale=settings.scale_advantages,
        )
        weights = rows.get("importance", rows["mask"])
        return rows | {"advantages": weights * np.asarray(advantages)[:, None]}
