"""PPO with a critic (Schulman et al., 2017).

Its use for language models is by Ziegler et al., 2019, and Ouyang et al., 2022.
"""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.posttrain.loss.advantages import gae, token_rewards
from zerojax.posttrain.methods.trainer import PostTrainer
from zerojax.posttrain.processes import Rows, mean_over_processes, moments_over_processes
from zerojax.posttrain.roles.critic import Critic
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.posttrain.settings import abstract_batch
from zerojax.train.step import Metrics

_gae = jax.jit(gae, static_argnames=("discount", "decay"))


class PPOTrainer(PostTrainer):
    """A run of PPO; a context manager."""

    critic: Critic  # pyrefly: ignore[bad-override-mutable-attribute]  (PPO always has one)

    def take_step(self, batch: Rows) -> Metrics:
        """Dispatch a training step of the policy and one of the critic, and return their metrics."""
        metrics = super().take_step({name: batch[name] for name in abstract_batch(self.config)})
        values = self.critic.take_step(batch)
        metrics |= {"value_loss": values["loss"], "value_grad_norm": values["grad_norm"]}
        # The run ends if either has diverged.
        skipped = jnp.maximum(metrics["skipped_in_row"], values["skipped_in_row"])
        return metrics | {"skipped_in_row": skipped}

    def with_advantages(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """The columns of ``policy_loss`` and ``value_loss``, and "rewards" after the KL penalty."""
        settings, rows = self.config.posttrain, self.with_log_probs(rollout, rewards)
        rows["old_values"] = self.critic.values(rows)
        rows["rewards"] = token_rewards(rollout.rewards_per_token(rewards), rows, settings.kl)
        advantages, returns = _gae(
            *(jnp.asarray(rows[name]) for name in ("rewards", "old_values", "mask")),
            discount=settings.discount,
            decay=settings.gae_lambda,
        )
        rows["advantages"], rows["returns"] = np.asarray(advantages), np.asarray(returns)
        if settings.normalize_advantages:
            mean, variance = moments_over_processes(rows["advantages"], rows["mask"])
            normalized = (rows["advantages"] - mean) / (variance**0.5 + 1e-8)
            rows["advantages"] = rows["mask"] * normalized.astype(np.float32)
        return rows

    def measure(self, rollout: Rollout, rewards: np.ndarray, rows: Rows) -> Metrics:
        """The metrics of a rollout: also scores, rewards, divergence, and the returns' explained variance."""
        mask, there = rows["mask"], np.isfinite(rewards)
        _, unexplained = moments_over_processes(rows["returns"] - rows["old_values"], mask)
        _, variance = moments_over_processes(rows["returns"], mask)
        means = {"score": (rewards, there), "reward": (rows["rewards"].sum(axis=1), there)}
        if self.reference is not None:
            means["kl"] = (rows["log_probs"] - rows["reference_log_probs"], mask)
        explained = 1 - unexplained / max(variance, 1e-12)
        found = mean_over_processes(means) | {"explained_variance": explained}
        own = {name: jnp.float32(x) for name, x in found.items() if x is not None}
        return super().measure(rollout, rewards, rows) | own
