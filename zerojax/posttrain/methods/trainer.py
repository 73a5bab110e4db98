"""A run of rollouts and rewards: ``PostTrainer.open`` prepares it, ``PostTrainer.loop`` trains."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.errors import RunError
from zerojax.formatting import plain_text
from zerojax.models import parameter_count
from zerojax.multihost.peers import Peers
from zerojax.multihost.preemption import StopRequest
from zerojax.posttrain.loss.policy import log_probs_of, policy_loss
from zerojax.posttrain.processes import any_process, mean_over_processes
from zerojax.posttrain.roles.memory import RoleMemory
from zerojax.posttrain.roles.predictions import predict_rows
from zerojax.posttrain.roles.reference import Reference
from zerojax.posttrain.roles.saved_runs import with_reward_checkpoint
from zerojax.posttrain.rollout.rollout import Rollout, Rows, minibatches, samples_of
from zerojax.posttrain.rollout.task import Task
from zerojax.posttrain.settings import (
    abstract_batch,
    check_first_weights,
    check_settings,
    rollout_rows,
    steps_per_rollout,
)
from zerojax.run.build import RunSetup, Trained, choose_checkpoint, is_first
from zerojax.run.config import RunConfig
from zerojax.run.evaluation import for_several_passes
from zerojax.run.open_run import OpenRun, opening
from zerojax.run.run_dir import Resume, RunFolder
from zerojax.run.weights import CHECKPOINTS, Start, WeightReader, keep_for, start_run
from zerojax.train.step import predict_step


class Roles(NamedTuple):
    """What a method adds to the roles of a run.

    Attributes:
        fields: of the trainer.
        trained: the states that each step trains beside the policy.
        notes: lines about them for the user.
    """

    fields: Mapping[str, Any] = MappingProxyType({})
    trained: Sequence[Trained] = ()
    notes: Sequence[str] = ()


@dataclass(kw_only=True)
class PostTrainer(OpenRun):
    """A run that learns from rewards for its own completions; a context manager.

    Each method, such as GRPO, is a subclass. It implements ``rows``, and may override ``take_step`` and
    ``roles``.

    Attributes:
        task: the prompts, and what scores completions.
        reference: the model that the run began with, or None.
        generator: bytes of a device that a rollout needs beside the states.
        rollouts: rollouts done.
    """

    task: Task
    reference: Reference | None
    generator: int
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

        Arguments and errors as for ``TrainRun.open`` of training; the folder may hold an imported model.
        """
        config = with_reward_checkpoint(config, folder, resume)
        settings = config.posttrain
        check_settings(config, jax.process_count())
        setup = RunSetup.of(config, loss_fn=policy_loss(settings))
        setup.check()
        with opening(config, folder) as new:
            manifest, damaged = choose_checkpoint(config, folder, resume)
            task = Task.open(config, folder, manifest, reader)
            new.on_error.callback(task.scorer.close)
            check_first_weights(manifest, init_from)
            start = start_run(setup, folder, manifest, init_from, reader, reference=settings.kl > 0)
            state = start.state
            reference = Reference.of(config, folder, start.base, state, reader) if settings.kl else None
            roles = cls.roles(config, folder, start, reader)
            critic = next((one.state.spec for one in roles.trained), None)
            memory = RoleMemory.of(config, state.spec, critic=critic)
            trainer = cls(
                config=config,
                services=new.services(start, abstract_batch(config), peers, roles.trained, samples=True),
                state=state,
                step=start.step,
                base=start.base,
                **roles.fields,
                task=task,
                reference=reference,
                generator=memory.generated,
                rollouts=start.record.position.get("rollouts", 0),
            )
            trainer.announce(
                f"{settings.method}, {parameter_count(config.model):,} parameters, {task.describe()}",
                [
                    *new.notes,
                    *damaged,
                    plain_text(memory.table()),
                    *task.notes(),
                    *start.notes,
                    *roles.notes,
                    *(keep_for(folder, Path(settings.reward_model)) if settings.reward_model else ()),
                ],
            )
            return trainer

    @classmethod
    def roles(cls, config: RunConfig, folder: RunFolder, start: Start, reader: WeightReader) -> Roles:
        """The roles that a method adds to policy, reference and reward."""
        del config, folder, start, reader
        return Roles()

    def close_inputs(self) -> None:
        """End the reward's processes, if there are any."""
        self.task.scorer.close()

    def loop(self, signalled: StopRequest) -> None:
        """Evaluate the first weights, if there are held-out prompts; make rollouts and train on them.

        Raises:
            RunError: the reward gives no number for any completion.
        """
        if self.step == 0 and (found := self.evaluation()):
            reward = float(found["validation_reward"])
            self.note_first({"validation_reward": reward}, f"held out {reward:.3f}")
        while self.step < self.config.train.steps:
            rollout = self.rollout(lambda: signalled.received)
            rewards = self.score(rollout, lambda: signalled.received)
            if rewards is None:
                # After a resume the same weights and seed give the same rollout.
                self.save()
                self.stop()
            rows = self.rows(rollout, rewards)
            self.write_samples(rollout, rewards)
            self.update(rows, self.measure(rollout, rewards, rows))
            self.save_if_due(stop=signalled.received)

    def rollout(self, asked: Callable[[], bool] = lambda: False) -> Rollout:
        """Complete this process's prompts of the next rollout.

        An environment is not waited for once ``asked`` says that the process shall stop.
        """
        rows = rollout_rows(self.config) // jax.process_count()
        self.watchdog.phase(f"rollout {self.rollouts + 1}", self.task.longest_rollout(rows))
        # The first step afterwards uses the copy and drops it.
        self.state = for_several_passes(self.state, beside=self.generator)
        return self.task.rollout(self.state, self.rollouts, lambda: asked() and not self.skipping)

    def score(self, rollout: Rollout, asked: Callable[[], bool]) -> np.ndarray | None:
        """The reward of each completion, fp32, NaN for a lost one.

        None if a process was asked to stop, except while steps are skipped: then nothing can be saved.

        Raises:
            RunError: all of them are lost.
        """
        skipping = self.skipping
        self.watch_scores(f"scoring rollout {self.rollouts + 1}", rollout)
        rewards, why = self.task.scorer.score(rollout, lambda: asked() and not skipping)
        if any_process(asked() and not skipping)[0]:
            return None
        if mean_over_processes({"reward": (rewards, np.isfinite(rewards))})["reward"] is None:
            raise RunError(f"the reward of no completion of rollout {self.rollouts + 1} is known: {why}")
        return rewards

    @property
    def skipping(self) -> bool:
        """Whether the last step was skipped, so that nothing can be saved."""
        return any(int(one.skipped_in_row) for one in (self.state, *self.beside().values()))

    def watch_scores(self, what: str, rollout: Rollout) -> None:
        """Begin a phase that may take as long as scoring the rollout."""
        self.watchdog.phase(what, self.task.longest_score(len(rollout.texts)))

    @abstractmethod
    def rows(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """What the method learns from each completion; one without a reward (NaN) is masked out.

        "tokens" and "mask" as in ``Rollout``, "old_log_probs", and the other columns that its losses read.
        """

    def measure(self, rollout: Rollout, rewards: np.ndarray, rows: Rows) -> dict[str, float]:
        """The metrics of a rollout: means over the completions, or tokens, of all processes.

        Args:
            rollout: of this process.
            rewards: of its completions, NaN for lost ones.
            rows: as ``rows`` returns them.
        """
        there = np.isfinite(rewards)
        every = np.ones_like(there)
        found = mean_over_processes(
            {
                "reward": (rewards, there),
                "length": (rollout.lengths, every),
                "ended": (rollout.ended, every),
                "lost_rewards": (~there, every),
                **({} if rollout.turns is None else {"turns": (rollout.turns, every)}),
                **{f"reward_{name}": (x, there) for name, x in self.task.scorer.parts.items()},
                "mismatch": (np.abs(rows["old_log_probs"] - rollout.log_probs), rows["mask"] > 0),
            }
        )
        return {name: value for name, value in found.items() if value is not None}

    def scored(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """The columns that all methods need: tokens, the mask of what counts, and log-probabilities."""
        counted = np.isfinite(rewards).astype(np.float32)
        rows = {"tokens": rollout.tokens, "mask": rollout.mask * counted[:, None]}
        log_probs = log_probs_of(self.config.posttrain)
        own = predict_rows(self.config, rows, partial(predict_step, self.state, fn=log_probs))
        if self.reference is None:
            return rows | {"old_log_probs": own}
        predict = partial(self.reference.log_probs, self.state, fn=log_probs)
        reference = predict_rows(self.config, rows, predict)
        return rows | {"old_log_probs": own, "reference_log_probs": reference}

    def update(self, rows: Rows, measured: dict[str, float]) -> None:
        """Train on the rows, and log each step with what was measured of the rollout."""
        train = self.config.train
        size = train.batch_size // jax.process_count()
        seed = (train.seed, self.rollouts)
        shared = {name: jnp.float32(value) for name, value in measured.items()}
        for batch in minibatches(rows, size, self.config.posttrain.epochs, seed):
            self.watchdog.step(self.step + 1)
            self.advance(batch, shared)
        self.rollouts += 1

    def write_samples(self, rollout: Rollout, rewards: np.ndarray) -> None:
        """Add some completions of a rollout to the file."""
        if self.samples is not None:
            for sample in samples_of(rollout, rewards, self.config.posttrain.samples):
                self.samples.write(self.step + 1, {"rollout": self.rollouts + 1, **sample})

    def evaluation(self) -> dict[str, jax.Array]:
        """The mean reward of greedy completions of held-out prompts; nothing if there are none."""
        longest = self.task.longest_rollout(self.config.posttrain.eval_prompts)
        self.watchdog.phase(f"the evaluation after step {self.step}", longest)
        answers = self.task.answers(self.state)
        if answers is None:
            return {}
        self.watch_scores(f"scoring the evaluation after step {self.step}", answers)
        rewards, _ = self.task.scorer.score(answers)
        mean = mean_over_processes({"reward": (rewards, np.isfinite(rewards))})["reward"]
        return {"validation_reward": jnp.float32(np.nan if mean is None else mean)}

    def save_if_due(self, *, stop: bool) -> None:
        """Save between rollouts if a save is due or a process was asked to stop.

        Raises:
            Stopped: the run ends here, on request.
        """
        every, per_rollout = self.config.checkpoint.every, steps_per_rollout(self.config)
        at_end = self.step == self.config.train.steps
        due = at_end or (every > 0 and self.step // every > (self.step - per_rollout) // every)
        wants_save, stop = any_process(self.clock.wants_save, stop)
        if not (due or wants_save or stop) or not self.save():
            return
        if stop and not at_end:
            self.stop()

    def position(self) -> dict[str, Any]:
        """The rollouts done; valid between two of them."""
        return {"rollouts": self.rollouts}

    def are_weights_good(self) -> bool:
        """Always: a skipped step does not change them."""
        return True

    def finish(self) -> None:
        """Print and record the result."""
        names = ("reward", "validation_reward")
        measured = {name: self.log.last[name] for name in names if name in self.log.last}
        if is_first():
            self.folder.update_summary(
                status="finished", step=self.step, skipped=self.log.skipped, **measured
            )
        words = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in measured.items())
        self.log.say(f"{words or 'the run had finished'}; the run is in {self.folder.path}")
