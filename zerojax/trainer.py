"""A training run, from settings to a trained model; `Trainer.train` is the loop."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import jax

import zerojax
from zerojax.checkpoint import Checkpoints
from zerojax.config import RunConfig, config_from_dict, config_to_dict
from zerojax.data import Batch, Dataset, TrainBatches
from zerojax.metrics import RunLog, draw_loss_curve, read_metrics
from zerojax.models import parameter_count
from zerojax.parts import (
    abstract_state,
    check_settings,
    environment,
    evaluate,
    initial_state,
    is_first,
    make_batches,
    make_log,
    prepare_data,
)
from zerojax.plan import describe
from zerojax.run_folder import Resume, RunFolder, check_same_run, choose_start


@dataclass
class Trainer:
    """A run, with everything at hand that its loop needs.

    Attributes:
        config: the settings.
        folder: where it writes.
        data: tokens to learn from and to check with.
        batches: the training batches, at the position where the run stands.
        validation: the batches of every evaluation.
        checkpoints: those of the run.
        log: metrics, files, progress line.
        state: the model and its optimizer.
        step: optimizer steps done.
    """

    config: RunConfig
    folder: RunFolder
    data: Dataset
    batches: TrainBatches
    validation: list[Batch]
    checkpoints: Checkpoints
    log: RunLog
    state: zerojax.TrainState
    step: int

    @classmethod
    def open(cls, config: RunConfig, folder: RunFolder, resume: Resume = "auto") -> Self:
        """Prepare the data, make the model or restore the last checkpoint.

        Raises:
            ZeroError: settings or data that cannot work, or `resume` cannot be had.
        """
        check_settings(config)
        data = prepare_data(config, folder)
        batches, validation = make_batches(config, data)
        checkpoints = Checkpoints(folder.checkpoints, keep=config.checkpoint.keep)
        step, skipped, changes = 0, 0, []
        if choose_start(checkpoints.latest, resume, folder):
            step = checkpoints.latest or 0
            record = checkpoints.record(step)
            changes = check_same_run(config_from_dict(record["config"]), config, folder)
            batches.set_state(record["position"])
            skipped = record["skipped"]
            state = checkpoints.restore(step, abstract_state(config))
        else:
            state = initial_state(config)
        if is_first():
            folder.write_config(config)
        log = make_log(config, folder, state, step, skipped)
        trainer = cls(config, folder, data, batches, validation, checkpoints, log, state, step)
        trainer.announce(changes)
        return trainer

    def __enter__(self) -> Self:
        """Start the progress line."""
        self.log.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish what is being written, whether or not the run did; note why it did not."""
        self.log.__exit__(kind, error, trace)
        self.batches.close()
        self.checkpoints.close()
        if error is not None and is_first():
            self.folder.update_summary(
                status="failed", step=self.step, reason=f"{type(error).__name__}: {error}"
            )

    def train(self) -> None:
        """Train from where the run stands to its last step.

        Raises:
            RunError: the loss or gradient was not finite too many times in a row.
        """
        while self.step < self.config.train.steps:
            batch = next(self.batches)
            self.state, metrics = zerojax.train_step(self.state, batch)
            self.step += 1
            self.log.step(self.step, metrics, self.evaluation_if_due())
            self.save_if_due()
        self.finish()

    def evaluation_if_due(self) -> Callable[[], dict[str, jax.Array]] | None:
        """What measures the validation loss, at the steps that ask for it and at the last."""
        if not self.is_due(self.config.train.eval_every):
            return None
        return lambda: {"validation_loss": evaluate(self.state, self.validation)}

    def save_if_due(self) -> None:
        """Save a checkpoint, at the steps that ask for it and at the last."""
        if not self.is_due(self.config.checkpoint.every):
            return
        self.log.drain()
        record = {
            "config": config_to_dict(self.config),
            "position": self.batches.get_state(),
            "skipped": self.log.skipped,
        }
        self.checkpoints.save(self.step, self.state, record)
        self.log.restart_clock()

    def is_due(self, every: int) -> bool:
        """Whether something done each `every` steps (0: never), and at the last, is due now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def announce(self, changes: list[str]) -> None:
        """Say what is going to run, and note it in run.json."""
        config, train = self.config, self.data.train.header
        mesh = self.state.program.mesh
        self.log.say(
            f"{self.folder.path}: {parameter_count(config.model):,} parameters, {train.tokens:,} tokens of "
            f"{train.documents} documents, {config.zero.preset} on {mesh.shape['node']} x "
            f"{mesh.shape['local']} {jax.devices()[0].device_kind} devices"
        )
        self.log.say(describe(self.state))
        if self.step:
            self.log.say(f"going on from step {self.step}" + "".join(f"; {change}" for change in changes))
        if is_first():
            self.folder.update_summary(
                status="running", reason=None, steps=config.train.steps, **environment()
            )

    def finish(self) -> None:
        """Wait for the last step and checkpoint, draw the curve, say how it went."""
        self.log.drain()
        self.checkpoints.wait()
        loss = self.log.last.get("validation_loss")
        if loss is None:  # the run was complete already
            loss = float(evaluate(self.state, self.validation))
        header = self.data.validation.header
        per_byte = loss * header.tokens / header.text_bytes
        if is_first():
            draw_loss_curve(read_metrics(self.folder.metrics), self.folder.curve, str(self.folder.path))
            self.folder.update_summary(
                status="finished",
                step=self.step,
                skipped=self.log.skipped,
                validation_loss=loss,
                validation_loss_per_byte=per_byte,
            )
        self.log.say(
            f"validation loss {loss:.4f} nats per token, {per_byte:.4f} per byte; the run is in "
            f"{self.folder.path}, its curve in {self.folder.curve.name}"
        )
