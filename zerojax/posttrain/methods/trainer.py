"""The base of the methods with rollouts: opening a run, and the parts of their loops."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from zerojax.errors import RunError
from zerojax.formatting import plain_text
from zerojax.models import describe_parameters
from zerojax.multihost.peers import Peers
from zerojax.multihost.preemption import StopRequest
from zerojax.posttrain.engines.rollouts import EngineRollouts
from zerojax.posttrain.loss.advantages import truncated_log_probs
from zerojax.posttrain.loss.objectives import log_probs_of, policy_loss
from zerojax.posttrain.processes import Rows, any_process, mean_over_processes, predict_rows
from zerojax.posttrain.roles.critic import NAME, Critic
from zerojax.posttrain.roles.memory import RoleMemory
from zerojax.posttrain.roles.reference import Reference
from zerojax.posttrain.roles.saved_runs import with_reward_checkpoint
from zerojax.posttrain.rollout.generator import OwnGenerator
from zerojax.posttrain.rollout.rollout import Rollout, minibatches, samples_of
from zerojax.posttrain.rollout.task import Task
from zerojax.posttrain.settings import (
    abstract_batch,
    check_first_weights,
    check_settings,
    rollout_rows,
    steps_per_rollout,
)
from zerojax.run.build import RunSetup, is_first
from zerojax.run.checkpoints import Record
from zerojax.run.config import RunConfig
from zerojax.run.evaluation import for_several_passes
from zerojax.run.open_run import OpenRun, opening
from zerojax.run.run_dir import Resume, RunFolder
from zerojax.run.weights import CHECKPOINTS, WeightReader, keep_for, start_run
from zerojax.train.state import TrainState
from zerojax.train.step import Metrics, predict_step


@dataclass(kw_only=True)
class PostTrainer(OpenRun):
    """A run that learns from rewards for its own completions; a context manager.

    Each method, such as GRPO, is a subclass, which computes advantages. It may add metrics and other updates.

    Attributes:
        task: the prompts and the scorer.
        reference: the model that the run started with, or None.
        critic: PPO's critic, which predicts at each token the completion's reward; None for other methods.
        generator: bytes on a device that generation needs in addition to the states.
        engines: the engines that generate, or None.
        ahead: the rollout that engines generate while the run trains on another, or None.
        rollouts: number of finished rollouts.
    """

    task: Task
    reference: Reference | None
    critic: Critic | None
    generator: int
    engines: EngineRollouts | None
    ahead: Future[Rollout] | None = None
    rollouts: int

    @classmethod
    def open(
        cls,
        config: RunConfig,
        folder: RunFolder,
        resume: Resume = "auto",
        init_from: Path | None = None,
        peers: Peers | None = None,
        reader: WeightReader = CHECKPOINTS,
    ) -> Self:
        """Open the task, and take the first weights or the newest checkpoint of each role.

        Arguments and errors are those for ``TrainRun.open``. The folder may hold an imported model.
        """
        config = with_reward_checkpoint(config, folder, resume)
        settings = config.posttrain
        check_settings(config, jax.process_count())
        setup = RunSetup(config, loss_fn=policy_loss(settings))
        setup.check()
        with opening(config, folder, resume) as new:
            task = Task.open(config, folder, new.manifest, reader)
            new.on_error.callback(task.scorer.close)
            check_first_weights(new.manifest, init_from)
            engines, about_engines = None, []
            if settings.engines:
                engines, about_engines = EngineRollouts.open(config, folder, setup.abstract_state)
                new.on_error.callback(engines.close)
            start = start_run(setup, folder, new.manifest, init_from, reader, reference=settings.kl > 0)
            state = start.state
            reference = Reference.of(config, folder, start.base, state, reader) if settings.kl else None
            critic, about_critic = None, []
            if settings.method == "ppo":
                critic, about_critic = Critic.open(config, folder, start, reader)
            memory = RoleMemory.of(config, state.spec, critic=critic.state.spec if critic else None)
            trainer = cls(
                new=new,
                start=start,
                batch=abstract_batch(config),
                peers=peers,
                also_trained=[critic.trained] if critic else [],
                makes_samples=True,
                task=task,
                reference=reference,
                critic=critic,
                generator=memory.generated,
                engines=engines,
                rollouts=start.record.position.get("rollouts", 0),
            )
            trainer.announce(
                f"{settings.method}, {describe_parameters(config.model)}, {task.describe()}",
                [
                    *new.notes,
                    plain_text(memory.table()),
                    *task.notes(),
                    *start.notes,
                    *about_critic,
                    *about_engines,
                    *(keep_for(folder, Path(settings.reward_model)) if settings.reward_model else ()),
                ],
            )
            return trainer

    def close_inputs(self) -> None:
        """End the reward's processes, and the rollout that engines generate, if any."""
        if self.engines is not None:
            self.engines.close()
        self.task.scorer.close()

    def loop(self, signalled: StopRequest) -> None:
        """Rollout, score, advantages, update and log, until the last step."""
        self.evaluate_first_weights()
        while self.step < self.config.train.steps:
            rollout = self.rollout(signalled)
            rewards = self.score(rollout, signalled)
            rows = self.with_advantages(rollout, rewards)
            self.write_samples(rollout, rewards)
            measured = self.measure(rollout, rewards, rows)
            for batch in self.minibatches(rows):
                self.log_step(self.take_step(batch) | measured)
            self.finish_rollout(signalled)

    @abstractmethod
    def with_advantages(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """The columns of the losses, from one reward per row (NaN for a row without a reward)."""

    def evaluate_first_weights(self) -> None:
        """Evaluate the first weights, if there are held-out prompts."""
        if self.step == 0 and (found := self.evaluation()):
            reward = float(found["validation_reward"])
            self.note_first({"validation_reward": reward}, f"held out {reward:.3f}")

    def rollout(self, signalled: StopRequest) -> Rollout:
        """Complete this process's prompts of the next rollout.

        Once the process must stop, it no longer waits for an environment.
        """
        stopping, rows = partial(self.must_stop, signalled), rollout_rows(self.config) // jax.process_count()
        self.watchdog.phase(f"rollout {self.rollouts + 1}", self.task.longest_rollout(rows))
        # The next training step uses these gathered weights and drops them.
        self.state = for_several_passes(self.state, reserved=self.generator)
        if self.engines is not None:
            return self.rollout_by_engines(self.engines, stopping)
        return self.task.rollout(OwnGenerator(self.state), self.rollouts, stopping)

    def rollout_by_engines(self, engines: EngineRollouts, stopping: Callable[[], bool]) -> Rollout:
        """Wait for the engines' rollout, and let them start the next one if the settings ask for that."""

        def start(number: int) -> Future[Rollout]:
            return engines.start(
                self.state, self.step, lambda generator, stops: self.task.rollout(generator, number, stops)
            )

        made = self.ahead or start(self.rollouts)
        rollout, self.ahead = engines.wait(made, self.watchdog, stopping), None
        rollouts = self.config.train.steps // steps_per_rollout(self.config)
        if self.config.posttrain.rollouts_ahead and self.rollouts + 1 < rollouts and not engines.stops:
            self.ahead = start(self.rollouts + 1)
        return rollout

    def score(self, rollout: Rollout, signalled: StopRequest) -> Float32[np.ndarray, " rows"]:
        """The reward of each completion; NaN if it is lost.

        Raises:
            Stopped: a process must stop, and all have saved. The resumed run makes the same rollout.
            RunError: all rewards are lost.
        """
        self.watch_scores(f"scoring rollout {self.rollouts + 1}", rollout)
        stopping = partial(self.must_stop, signalled)
        rewards, why = self.task.scorer.score(rollout, stopping)
        if any_process(stopping())[0]:
            self.save()
            self.stop()
        if mean_over_processes({"reward": (rewards, np.isfinite(rewards))})["reward"] is None:
            raise RunError(f"no completion of rollout {self.rollouts + 1} has a reward: {why}")
        return rewards

    def must_stop(self, signalled: StopRequest) -> bool:
        """Whether this process was asked to stop and can save, which it cannot after a skipped step."""
        states = self.state, *self.beside().values()
        return signalled.received and not any(int(one.skipped_in_row) for one in states)

    def with_log_probs(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """The columns that all methods need, with a row for each completion of this process.

        - "tokens" as in ``Rollout``, and "mask" with zeros for completions without a reward (NaN);
        - "log_probs" of the run, and "old_log_probs", from which the loss measures its ratio;
        - "reference_log_probs" if there is a reference.
        """
        counted = np.isfinite(rewards).astype(np.float32)
        rows = {"tokens": rollout.tokens, "mask": rollout.mask * counted[:, None]}
        log_probs = log_probs_of(self.config.posttrain)
        own = predict_rows(self.config, rows, partial(predict_step, self.state, fn=log_probs))
        found = {"log_probs": own, "old_log_probs": own}
        if self.engines is not None:
            cap = self.config.posttrain.importance_cap
            found["old_log_probs"] = truncated_log_probs(own, rollout.log_probs, cap)
        if self.reference is not None:
            predict = partial(self.reference.log_probs, self.state, fn=log_probs)
            found["reference_log_probs"] = predict_rows(self.config, rows, predict)
        return rows | found

    def measure(self, rollout: Rollout, rewards: np.ndarray, rows: Rows) -> Metrics:
        """The metrics of a rollout: means over the completions, or tokens, of all processes.

        Args:
            rollout: this process's completions.
            rewards: one for each; NaN for lost completions.
            rows: the columns of ``with_log_probs``.
        """
        there, counted = np.isfinite(rewards), rows["mask"] > 0
        every = np.ones_like(there)
        importance = np.exp(rows["log_probs"] - rows["old_log_probs"])
        found = mean_over_processes(
            {
                "reward": (rewards, there),
                "length": (rollout.lengths, every),
                "ended": (rollout.ended, every),
                "lost_rewards": (~there, every),
                **({} if rollout.turns is None else {"turns": (rollout.turns, every)}),
                **{f"reward_{name}": (x, there) for name, x in self.task.scorer.parts.items()},
                "mismatch": (np.abs(rows["log_probs"] - rollout.log_probs), counted),
                **({} if self.engines is None else {"importance": (importance, counted)}),
            }
        )
        if rollout.version is not None:
            found["weights_age"] = self.step - rollout.version
        return {name: jnp.float32(value) for name, value in found.items() if value is not None}

    def minibatches(self, rows: Rows) -> Iterator[Rows]:
        """This process's rows of each batch: all rows once per epoch, in a new order each time."""
        train, rows = self.config.train, {name: x for name, x in rows.items() if name != "log_probs"}
        size = train.batch_size // jax.process_count()
        for batch in minibatches(rows, size, self.config.posttrain.epochs, (train.seed, self.rollouts)):
            self.watchdog.step(self.step + 1)
            yield batch

    def write_samples(self, rollout: Rollout, rewards: np.ndarray) -> None:
        """Append ``posttrain.samples`` completions, with the reward of each, to the file of samples."""
        if self.samples is not None:
            for sample in samples_of(rollout, rewards, self.config.posttrain.samples):
                self.samples.write(self.step + 1, {"rollout": self.rollouts + 1, **sample})

    def watch_scores(self, what: str, rollout: Rollout) -> None:
        """Start a phase of the watchdog that may last as long as scoring the rollout."""
        self.watchdog.phase(what, self.task.longest_score(len(rollout.texts)))

    def evaluation(self) -> Metrics:
        """The mean reward of greedy completions of held-out prompts; empty if there are no such prompts."""
        if not self.task.evaluated:
            return {}
        longest = self.task.longest_rollout(self.config.posttrain.eval_prompts)
        self.watchdog.phase(f"the evaluation after step {self.step}", longest)
        if self.engines is None:
            completed = self.task.evaluate(OwnGenerator(self.state))
        else:
            made = self.engines.start(
                self.state, self.step, lambda generator, _: self.task.evaluate(generator)
            )
            completed = self.engines.wait(made, self.watchdog)
        self.watch_scores(f"scoring the evaluation after step {self.step}", completed)
        rewards, _ = self.task.scorer.score(completed)
        mean = mean_over_processes({"reward": (rewards, np.isfinite(rewards))})["reward"]
        return {"validation_reward": jnp.float32(np.nan if mean is None else mean)}

    def finish_rollout(self, signalled: StopRequest) -> None:
        """Count a rollout, and save if a save is due or a process was asked to stop.

        Raises:
            Stopped: the run ends here, on request.
        """
        self.rollouts += 1
        every, per_rollout = self.config.checkpoint.every, steps_per_rollout(self.config)
        at_end = self.step == self.config.train.steps
        due = at_end or (every > 0 and self.step // every > (self.step - per_rollout) // every)
        wants_save, stop = any_process(self.clock.wants_save, signalled.received)
        if not (due or wants_save or stop) or not self.save():
            return
        if stop and not at_end:
            self.stop()

    def beside(self) -> dict[str, TrainState]:
        """The critic's state by its name, if any; see ``TrainLoop.beside``."""
        return {} if self.critic is None else {NAME: self.critic.state}

    def record(self) -> Record:
        """The record of ``OpenRun.record`` with the critic's record."""
        record = super().record()
        return record if self.critic is None else replace(record, beside={NAME: self.critic.record()})

    def position(self) -> dict[str, Any]:
        """The number of finished rollouts. It is valid between two rollouts."""
        return {"rollouts": self.rollouts}

    def are_weights_good(self) -> bool:
        """True, because a skipped step does not change the weights."""
        return True

    def finish(self) -> None:
        """Print the result and record it."""
        names = ("reward", "validation_reward")
        measured = {name: self.log.last[name] for name in names if name in self.log.last}
        if is_first():
            self.folder.update_summary(
                status="finished", step=self.step, skipped=self.log.skipped, **measured
            )
        words = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in measured.items())
        self.log.say(f"{words or 'the run had finished'}; the run is in {self.folder.path}")
