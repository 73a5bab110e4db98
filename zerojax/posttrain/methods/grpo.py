"""GRPO: compares the completions of a prompt with each other (Shao et al., 2024, "DeepSeekMath")."""

import jax.numpy as jnp
import numpy as np

from zerojax.posttrain.loss.advantages import group_advantages
from zerojax.posttrain.methods.trainer import PostTrainer
from zerojax.posttrain.processes import Rows, mean_over_processes
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.train.step import Metrics


class GRPOTrainer(PostTrainer):
    """A run of GRPO; a context manager."""

    def with_advantages(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """The columns of ``policy_loss``. Each token has the advantage of its completion within the group."""
        settings, rows = self.config.posttrain, self.with_log_probs(rollout, rewards)
        advantages = group_advantages(
            jnp.asarray(rewards),
            jnp.isfinite(rewards).astype(jnp.float32),
            group_size=settings.completions,
            scale=settings.scale_advantages,
        )
        return rows | {"advantages": rows["mask"] * np.asarray(advantages)[:, None]}

    def measure(self, rollout: Rollout, rewards: np.ndarray, rows: Rows) -> Metrics:
        """The metrics of a rollout, and the share of groups whose completions differ in reward."""
        groups = rewards.reshape(-1, self.config.posttrain.completions)
        differ = np.nanmax(groups, axis=1, initial=-np.inf) > np.nanmin(groups, axis=1, initial=np.inf)
        share = mean_over_processes({"mixed_groups": (differ, np.ones_like(differ))})["mixed_groups"]
        return super().measure(rollout, rewards, rows) | {"mixed_groups": jnp.float32(share)}
