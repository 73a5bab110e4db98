"""PPO with a critic (Schulman et al., 2017; of language models Ziegler et al., 2019; Ouyang et al., 2022)."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models import parameter_count
from zerojax.posttrain.loss.advantages import gae, token_rewards
from zerojax.posttrain.methods.trainer import PostTrainer, Roles
from zerojax.posttrain.processes import mean_over_processes, moments_over_processes
from zerojax.posttrain.roles.critic import COLUMNS, NAME, Critic
from zerojax.posttrain.roles.predictions import predict_rows
from zerojax.posttrain.rollout.rollout import Rollout, Rows
from zerojax.posttrain.settings import abstract_batch, abstract_columns
from zerojax.run.build import Trained
from zerojax.run.checkpoints import Record
from zerojax.run.config import RunConfig
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import Start, WeightReader
from zerojax.train.state import TrainState
from zerojax.train.step import Metrics, train_step

_gae = jax.jit(gae, static_argnames=("discount", "decay"))


@dataclass(kw_only=True)
class PPOTrainer(PostTrainer):
    """A run of PPO; a context manager.

    Attributes:
        critic: says what a completion will earn, from each of its tokens on.
    """

    critic: Critic

    @classmethod
    def roles(cls, config: RunConfig, folder: RunFolder, start: Start, reader: WeightReader) -> Roles:
        """The critic; see ``PostTrainer.roles``."""
        if start.source is None:
            critic, notes = Critic.resume(config, folder, start.step, reader)
        else:
            critic, notes = Critic.begin(config, folder, start.source, reader)
        batch = abstract_columns(config, COLUMNS)
        zero = critic.state.spec.zero
        parameters = parameter_count(critic.config.model)
        notes.append(f"critic: {parameters:,} parameters, {critic.config.zero.preset} of stage {zero.stage}")
        return Roles({"critic": critic}, [Trained(critic.config.model, critic.state, batch)], notes)

    def rows(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """What ``policy_loss`` and ``value_loss`` read; see ``PostTrainer.rows``."""
        settings, rows = self.config.posttrain, self.scored(rollout, rewards)
        old_values = predict_rows(self.config, rows, self.critic.reader())
        per_token = token_rewards(rollout.rewards_per_token(rewards), rows, settings.kl)
        advantages, returns = _gae(
            *(jnp.asarray(x) for x in (per_token, old_values, rows["mask"])),
            discount=settings.discount,
            decay=settings.gae_lambda,
        )
        advantages = np.asarray(advantages)
        if settings.normalize_advantages:
            mean, variance = moments_over_processes(advantages, rows["mask"])
            advantages = rows["mask"] * ((advantages - mean) / (variance**0.5 + 1e-8)).astype(np.float32)
        return rows | {
            "rewards": per_token,
            "old_values": old_values,
            "returns": np.asarray(returns),
            "advantages": advantages,
        }

    def measure(self, rollout: Rollout, rewards: np.ndarray, rows: Rows) -> dict[str, float]:
        """The metrics of a rollout; see ``PostTrainer.measure``."""
        found, mask = super().measure(rollout, rewards, rows), rows["mask"]
        _, unexplained = moments_over_processes(rows["returns"] - rows["old_values"], mask)
        _, variance = moments_over_processes(rows["returns"], mask)
        more = {"reward": (rows["rewards"].sum(axis=1), np.isfinite(rewards))}
        if self.reference is not None:
            more["kl"] = (rows["old_log_probs"] - rows["reference_log_probs"], mask)
        found |= {"score": found["reward"], "explained_variance": 1 - unexplained / max(variance, 1e-12)}
        return found | {name: x for name, x in mean_over_processes(more).items() if x is not None}

    def take_step(self, batch: Rows) -> Metrics:
        """Dispatch a step of the policy and one of the critic; see ``TrainLoop.take_step``."""
        own = {name: batch[name] for name in abstract_batch(self.config)}
        self.state, metrics = train_step(self.state, own)
        values = self.critic.take_step(batch)
        # The run ends if either has diverged.
        in_row = jnp.maximum(metrics["skipped_in_row"], values["skipped_in_row"])
        return {
            **metrics,
            "value_loss": values["loss"],
            "value_grad_norm": values["grad_norm"],
            "skipped_in_row": in_row,
        }

    def beside(self) -> dict[str, TrainState]:
        """The critic's state; see ``TrainLoop.beside``."""
        return {NAME: self.critic.state}

    def record(self) -> Record:
        """As ``OpenRun.record``, with the critic's record beside it."""
        return replace(super().record(), beside={NAME: self.critic.record()})
