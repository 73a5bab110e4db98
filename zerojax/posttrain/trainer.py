"""A run of rollouts and rewards: ``PostTrainer.open`` prepares it, ``PostTrainer.train`` is the loop."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from zerojax.errors import ConfigurationError, RunError
from zerojax.formatting import plain_text
from zerojax.models import parameter_count
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.multihost.peers import Peers
from zerojax.multihost.preemption import StopRequest
from zerojax.posttrain.memory import RoleMemory
from zerojax.posttrain.policy import log_probs_of, policy_loss
from zerojax.posttrain.processes import any_process, mean_over_processes, of_this_process
from zerojax.posttrain.prompts import Prompt, Prompts
from zerojax.posttrain.reference import Reference
from zerojax.posttrain.rewards import RewardProcess
from zerojax.posttrain.rollout import Rollout, Rows, measure, minibatches, samples_of, score
from zerojax.posttrain.settings import (
    abstract_batch,
    check_settings,
    longest_prompt,
    rollout_rows,
    steps_per_rollout,
)
from zerojax.run.build import RunSetup, choose_checkpoint, is_first
from zerojax.run.config import RunConfig
from zerojax.run.data import Tokenizer, open_template, open_tokenizer
from zerojax.run.data.answers import AnswerEnd
from zerojax.run.metrics import MetricsFile
from zerojax.run.open_run import OpenRun, run_services
from zerojax.run.run_dir import Resume, RunFolder
from zerojax.run.run_lock import RunLock
from zerojax.run.trainer import disk_errors_explained, divergence_explained
from zerojax.run.weights import CHECKPOINTS, WeightReader, start_run
from zerojax.train.step import Metrics, local_rows


@dataclass
class PostTrainer(OpenRun):
    """A run that learns from rewards for its own completions; a context manager.

    A method of learning, such as GRPO, is a subclass: it has ``rows``, and perhaps ``take_step`` and more
    roles.

    Attributes:
        prompts: of rollouts and evaluations.
        rewards: the process that scores completions.
        tokenizer: of the model.
        end: of a completion.
        samples: the file of completions, on process zero.
        reference: the model that the run began with, or None.
        rollouts: rollouts done.
    """

    prompts: Prompts
    rewards: RewardProcess
    tokenizer: Tokenizer
    end: AnswerEnd
    samples: MetricsFile | None
    reference: Reference | None
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
        """Read the prompts, start the reward's process, and take the first weights or the newest checkpoint.

        Args:
            config: the settings.
            folder: of the run, new or existing; it may hold an imported model.
            resume: whether to resume from a checkpoint in the folder.
            init_from: what gives a new run its first weights, such as a run or a checkpoint.
            peers: the other processes of the run, if there are any.
            reader: reads ``init_from``, and the base or reference of a resumed run.

        Raises:
            ConfigurationError: invalid settings, prompts or reward; ``resume`` or ``init_from`` cannot be
                satisfied; or another process trains in the folder.
            RunError: the disk is full.
        """
        settings = config.posttrain
        check_settings(config, jax.process_count())
        setup = RunSetup.of(config, loss_fn=policy_loss(settings))
        setup.check()
        lock = RunLock(folder)
        with ExitStack() as on_error, disk_errors_explained(folder):
            on_error.callback(lock.close)
            unlocked = run_on_process_zero(lock.take)
            run_on_process_zero(folder.create)
            tokenizer = open_tokenizer(config.data, folder.data)
            template = open_template(config.data, folder.data) if config.data.kind == "chat" else None
            prompts = Prompts.read(config.data, tokenizer, template, longest_prompt(config))
            rewards = RewardProcess(settings.reward, settings.reward_seconds)
            on_error.callback(rewards.close)
            manifest, notes = choose_checkpoint(config, folder, resume)
            if unlocked is not None:
                notes.append(unlocked)
            if manifest is None and init_from is None:
                raise ConfigurationError(
                    "zerojax posttrain begins with a trained model: name its run in --init-from, or import "
                    "one into the run's folder (zerojax import)"
                )
            start = start_run(setup, folder, manifest, init_from, reader, reference=settings.kl > 0)
            state, base, batch = start.state, start.base, abstract_batch(config)
            reference = Reference.of(config, folder, base, state, reader) if settings.kl else None
            run = run_services(
                config, folder, lock, manifest, state=state, base=base, batch=batch, peers=peers
            )
            trainer = cls(
                **run,
                prompts=prompts,
                rewards=rewards,
                tokenizer=tokenizer,
                end=AnswerEnd.of(tokenizer, template),
                samples=MetricsFile(folder.samples, start=run["step"]) if is_first() else None,
                reference=reference,
                rollouts=start.position.get("rollouts", 0),
            )
            notes.append(plain_text(RoleMemory.of(config, state.spec).table()))
            if prompts.left_out:
                notes.append(f"{prompts.left_out:,} prompts are too long, and are left out")
            trainer.announce(
                f"{settings.method}, {parameter_count(config.model):,} parameters, "
                f"{len(prompts.train):,} prompts and {len(prompts.held_out):,} held out",
                [*notes, *start.notes],
            )
            on_error.pop_all()
            return trainer

    def close_inputs(self) -> None:
        """End the reward's process."""
        self.rewards.close()

    def close_files(self) -> None:
        """Close the file of completions."""
        if self.samples is not None:
            self.samples.close()

    def train(self) -> None:
        """Train from the current step to the last.

        Raises:
            DivergedError: the loss or gradient was not finite too many times in a row.
            RunError: the disk is full, or the reward gives no number for any completion.
            Stopped: a process of the run was asked to stop by a signal; the run has saved.
        """
        with (
            StopRequest() as signalled,
            disk_errors_explained(self.folder),
            divergence_explained(self.folder, self.checkpoints),
        ):
            if self.step == 0:
                self.evaluate_first()
            while self.step < self.config.train.steps:
                rollout = self.rollout()
                rewards = self.score(rollout)
                rows = self.rows(rollout, rewards)
                self.write_samples(rollout, rewards)
                self.update(rows, self.measure(rollout, rewards, rows))
                self.save_if_due(stop=signalled.received)
            self.finish()

    def rollout(self) -> Rollout:
        """Complete this process's prompts of the next rollout."""
        settings = self.config.posttrain
        self.watchdog.phase(f"rollout {self.rollouts + 1}")
        groups = rollout_rows(self.config) // settings.group_size
        prompts = of_this_process(self.prompts.of_rollout(self.rollouts, groups, self.config.train.seed))
        return self.complete(
            [prompt for prompt in prompts for _ in range(settings.group_size)],
            temperature=settings.temperature,
            seed=int(np.random.SeedSequence((self.config.train.seed, self.rollouts)).generate_state(1)[0]),
        )

    def complete(self, prompts: list[Prompt], *, temperature: float, seed: int = 0) -> Rollout:
        """Generate a completion of each prompt."""
        completions = zerojax.generate(
            self.state,
            [prompt.tokens for prompt in prompts],
            self.config.posttrain.max_new_tokens,
            temperature=temperature,
            stop=self.end.token,
            seed=seed,
        )
        return Rollout.of(prompts, completions, self.tokenizer, self.end, self.config.train.sequence_length)

    def score(self, rollout: Rollout) -> np.ndarray:
        """The reward of each completion, fp32, NaN for a lost one.

        Raises:
            RunError: all of them are lost.
        """
        rewards, why = score(rollout, self.rewards)
        if mean_over_processes({"reward": (rewards, np.isfinite(rewards))})["reward"] is None:
            raise RunError(f"the reward of no completion of rollout {self.rollouts + 1} is known: {why}")
        return rewards

    def rows(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """What the method learns from each completion; a lost one (NaN) counts nowhere.

        "tokens" and "mask" as of ``Rollout``, "old_log_probs", and what else the method's losses read.
        """
        raise NotImplementedError

    def measure(self, rollout: Rollout, rewards: np.ndarray, rows: Rows) -> dict[str, float]:
        """The metrics of a rollout, the same in all processes."""
        return measure(rollout, rewards, rows)

    def take_step(self, batch: Rows) -> Metrics:
        """Dispatch a step on some of the rows; returns its metrics."""
        raise NotImplementedError

    def scored(self, rollout: Rollout, rewards: np.ndarray) -> Rows:
        """The columns that all methods need: tokens, the mask of what counts, and log-probabilities."""
        counted = np.isfinite(rewards).astype(np.float32)
        rows = {"tokens": rollout.tokens, "mask": rollout.mask * counted[:, None]}
        found = {"old_log_probs": self.predict(rows, self.own_log_probs)}
        if self.reference is not None:
            found["reference_log_probs"] = self.predict(rows, self.reference_log_probs)
        return rows | found

    def own_log_probs(self, rows: Rows) -> jax.Array:
        """The trainer's log-probabilities of all tokens of completions."""
        return zerojax.predict_step(self.state, rows, log_probs_of(self.config.posttrain))

    def reference_log_probs(self, rows: Rows) -> jax.Array:
        """Those of the reference."""
        assert self.reference is not None
        return self.reference.log_probs(self.state, rows, log_probs_of(self.config.posttrain))

    def predict(self, rows: Rows, predict: Callable[[Rows], jax.Array]) -> np.ndarray:
        """What a prediction says of this process's rows."""
        # The reading comes after all parts are dispatched, so that the devices need not wait for it.
        return np.concatenate([local_rows(part) for part in [predict(part) for part in self.parts(rows)]])

    def parts(self, rows: Rows) -> list[Rows]:
        """The rows in parts of the size of a micro-batch, so that they need no more memory than a step."""
        train = self.config.train
        size = train.batch_size // train.accumulate // jax.process_count()
        return [
            {name: x[first : first + size] for name, x in rows.items()}
            for first in range(0, len(rows["tokens"]), size)
        ]

    def update(self, rows: Rows, measured: dict[str, float]) -> None:
        """Train on the rows, and log each step with what was measured of the rollout."""
        train = self.config.train
        size = train.batch_size // jax.process_count()
        seed = (train.seed, self.rollouts)
        shared = {name: jnp.float32(value) for name, value in measured.items()}
        for batch in minibatches(rows, size, self.config.posttrain.epochs, seed):
            self.watchdog.step(self.step + 1)
            metrics = self.take_step(batch)
            self.step += 1
            due = self.is_due(train.eval_every)
            self.log.step(self.step, metrics | shared, self.evaluation if due else None)
            self.checkpoints.check()
        self.rollouts += 1

    def write_samples(self, rollout: Rollout, rewards: np.ndarray) -> None:
        """Add some completions of a rollout to the file."""
        if self.samples is not None:
            for sample in samples_of(rollout, rewards, self.config.posttrain.samples):
                self.samples.write(self.step + 1, {"rollout": self.rollouts + 1, **sample})

    def evaluation(self) -> dict[str, jax.Array]:
        """The mean reward of greedy completions of held-out prompts; nothing if there are none."""
        prompts = self.prompts.of_evaluation(self.config.posttrain.eval_prompts)
        prompts = of_this_process(prompts[: len(prompts) // jax.process_count() * jax.process_count()])
        if not prompts:
            return {}
        self.watchdog.phase(f"the evaluation after step {self.step}")
        rewards, _ = score(self.complete(prompts, temperature=0.0), self.rewards)
        mean = mean_over_processes({"reward": (rewards, np.isfinite(rewards))})["reward"]
        return {"validation_reward": jnp.float32(np.nan if mean is None else mean)}

    def evaluate_first(self) -> None:
        """Say what the first weights reach, and record it in run.json."""
        for name, value in self.evaluation().items():
            self.log.say(f"before the first step: held out {float(value):.3f}")
            if is_first():
                self.folder.update_summary(**{f"first_{name}": float(value)})
        self.log.restart_clock()

    def save_if_due(self, *, stop: bool) -> None:
        """Save between rollouts, if it is due or a process shall stop.

        Raises:
            Stopped: the run ends here, on request.
        """
        every, per_rollout = self.config.checkpoint.every, steps_per_rollout(self.config)
        at_end = self.step == self.config.train.steps
        due = at_end or (every > 0 and self.step // every > (self.step - per_rollout) // every)
        wants_save, stop = any_process(self.clock.wants_save, stop)
        if not (due or wants_save or stop) or not self.save(at_end=at_end):
            return
        if stop and not at_end:
            self.stop()

    def save(self, *, at_end: bool) -> bool:
        """Begin to save a checkpoint; False if it must wait because the last step was skipped."""
        self.log.drain()
        self.watchdog.phase(f"the checkpoint at step {self.step}")
        position = {"rollouts": self.rollouts}
        return self.save_checkpoint(position, ("loss", "reward"), despite_skips=at_end)

    def finish(self) -> None:
        """Wait for the last step and checkpoint, print and record the result."""
        self.log.drain()
        self.watchdog.phase("the end of the run")
        self.checkpoints.wait()
        names = ("reward", "validation_reward")
        measured = {name: self.log.last[name] for name in names if name in self.log.last}
        if is_first():
            self.folder.update_summary(
                status="finished", step=self.step, skipped=self.log.skipped, **measured
            )
        words = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in measured.items())
        self.log.say(f"{words or 'the run had finished'}; the run is in {self.folder.path}")
