"""GRPO: a completion is compared with the others of its prompt (Shao et al., 2024, "DeepSeekMath")."""

import jax.numpy as jnp
import numpy as np

from zerojax.posttrain.loss.advantages import group_advantages
from zerojax.posttrain.methods.trainer import PostTrainer
from zerojax.posttrain.rollout.rollout import Rollout, Rows, mixed_groups


class GRPOTrainer(PostTrainer):
    """A run of GRPO; a context manager."""

    def rows(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """What ``policy_loss`` reads; see ``PostTrainer.rows``."""
        settings, rows = self.config.posttrain, self.scored(rollout, rewards)
        advantages = group_advantages(
            jnp.asarray(rewards),
            jnp.isfinite(rewards).astype(jnp.float32),
            group_size=settings.completions,
            scale=settings.scale_advantages,
        )
        return rows | {"advantages": rows["mask"] * np.asarray(advantages)[:, None]}

    def measure(self, rollout: Rollout, rewards: np.ndarray, rows: Rows) -> dict[str, float]:
        """The metrics of a rollout; see ``PostTrainer.measure``."""
        mixed = mixed_groups(rewards, self.config.posttrain.completions)
        return super().measure(rollout, rewards, rows) | {"mixed_groups": mixed}
