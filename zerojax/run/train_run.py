"""A training run: ``TrainRun.open`` prepares it, ``TrainLoop.take_steps`` trains."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp

from zerojax.analysis.profile import StepProfile
from zerojax.errors import DivergedError
from zerojax.models import describe_parameters
from zerojax.multihost import standby
from zerojax.multihost.peers import Peers
from zerojax.multihost.preemption import StopRequest
from zerojax.run.build import RunSetup, is_first
from zerojax.run.checkpoints import Snapshots
from zerojax.run.config import RunConfig
from zerojax.run.data.batches import Batch, TrainBatches
from zerojax.run.data.dataset import Dataset
from zerojax.run.evaluation import ExactMatch, Response, describe_matches, mean_loss, samples_of
from zerojax.run.inputs import abstract_batch, make_batches, prepare_data
from zerojax.run.metrics.files import read_metrics
from zerojax.run.open_run import OpenRun, opening
from zerojax.run.run_dir import Resume, RunFolder
from zerojax.run.weights import CHECKPOINTS, WeightReader, start_run
from zerojax.sharding.cuda_driver import contexts_work
from zerojax.train.fp8_report import fp8_metrics
from zerojax.train.step import Metrics


@dataclass(kw_only=True)
class BatchRun(OpenRun):
    """A run whose training and validation batches are known in advance; a context manager.

    ``batches`` are at the run's position. Every evaluation has the same ``validation`` batches.
    """

    batches: TrainBatches
    validation: list[Batch]

    def close_inputs(self) -> None:
        """Close the data."""
        self.batches.close()

    def position(self) -> dict[str, Any]:
        """The position of the batches."""
        return self.batches.get_state()

    def last_evaluation(self) -> dict[str, float]:
        """The values of the evaluation at the end.

        Raises:
            DivergedError: the validation loss is not finite.
        """
        last = self.log.last
        if "validation_loss" not in last:  # the run had finished before: no step was taken
            last = self.evaluate()
        if not math.isfinite(last["validation_loss"]):
            skipped = int(last.get("skipped_in_row", 0))
            raise DivergedError("the validation loss at the end is not finite", self.step - skipped - 1)
        return last

    def report(self, values: Mapping[str, Any], words: str) -> None:
        """Record a finished run's values in run.json, draw the loss curve, and print ``words``."""
        if is_first():
            self.folder.update_summary(status="finished", step=self.step, skipped=self.log.skipped, **values)
            draw_loss_curve(read_metrics(self.folder.metrics), self.folder.curve, str(self.folder.path))
        self.log.say(f"{words}; the run is in {self.folder.path}, its curve in {self.folder.curve.name}")


@dataclass(kw_only=True)
class TrainRun(BatchRun):
    """A run of training; a context manager.

    ``exact_match`` has the prompts of every evaluation. ``sampled`` is the last step whose samples are in the
    file. ``profile`` traces the requested steps.
    """

    data: Dataset
    exact_match: ExactMatch | None
    sampled: int
    profile: StepProfile = field(init=False)

    @classmethod
    def open(
        cls,
        config: RunConfig,
        folder: RunFolder,
        resume: Resume = "auto",
        init_from: Path | None = None,
        peers: Peers | None = None,
        profile: range | None = None,
        reader: WeightReader = CHECKPOINTS,
    ) -> Self:
        """Prepare the data, and create the model or restore the newest valid checkpoint.

        Args:
            config: the settings.
            folder: the run's folder, new or existing.
            resume: whether to resume from a checkpoint in the folder.
            init_from: the source of a new run's first weights, such as a run or a checkpoint; a resumed run
                ignores it.
            peers: the other processes of the run, if there are any.
            profile: steps to trace.
            reader: reads ``init_from``, and the frozen weights of a resumed run.

        Raises:
            ConfigurationError: settings or data are invalid, ``resume`` or ``init_from`` cannot be satisfied,
                or another process trains in the folder.
            RunError: the disk is full.
        """
        config.model.check_language_model("zerojax train")
        setup = RunSetup(config)
        setup.prepare_step(abstract_batch(config))
        snapshots = Snapshots.find(setup.mesh)
        standby.wait(
            works=lambda: contexts_work(setup.mesh),
            meanwhile=lambda: None if snapshots is None else snapshots.check(),
        )
        setup.check()
        with opening(config, folder, resume, snapshots) as new:
            data = prepare_data(config, folder)
            batches, validation = make_batches(config, data)
            exact_match = ExactMatch.of(config, data, folder.data)
            start = start_run(setup, folder, new.manifest, init_from, reader)
            if start.record.position:
                batches.set_state(start.record.position)
            trainer = cls(
                new=new,
                start=start,
                batch=abstract_batch(config),
                peers=peers,
                makes_samples=config.train.eval_samples > 0,
                data=data,
                batches=batches,
                validation=validation,
                exact_match=exact_match,
                sampled=start.step,
            )
            trainer.profile = StepProfile(
                folder.profile, profile, trainer.log.say, done=start.step, planned=config.train.steps
            )
            notes = [*new.notes, *data.notes(config.train.sequence_length), *start.notes]
            trainer.announce(f"{describe_parameters(config.model)}, {data.describe()}", notes)
            return trainer

    def loop(self, signalled: StopRequest) -> None:
        """Take a step on each batch."""
        self.take_steps(self.batches, signalled)

    def close_inputs(self) -> None:
        """Close the profile and the data."""
        self.profile.close()
        super().close_inputs()

    def take_step(self, batch: Batch) -> Metrics:
        """Dispatch a step on a batch, and trace it if requested; returns its metrics."""
        return self.profile.step(self.step + 1, functools.partial(super().take_step, batch))

    def evaluation(self) -> Metrics:
        """Compute the requested further metrics, and dispatch the validation loss."""
        self.watchdog.phase(f"the evaluation after step {self.step}")
        values = fp8_metrics(self.state) if self.config.log.fp8 else {}
        if self.exact_match is not None:
            responses = self.exact_match.responses(self.state)
            if self.config.train.eval_exact_match:
                values |= {"exact_match": jnp.asarray(self.exact_match.share_right(responses))}
            self.write_samples(responses)
        return values | {"validation_loss": mean_loss(self.state, self.validation)}

    def write_samples(self, responses: Sequence[Response]) -> None:
        """Add some responses of an evaluation to the file, once for each step."""
        if self.step > self.sampled and (count := self.config.train.eval_samples):
            for sample in samples_of(responses, count):
                if self.samples is not None:
                    self.samples.write(self.step, sample)
            self.sampled = self.step

    def finish(self) -> None:
        """Draw the loss curve, print and record the result."""
        last = self.last_evaluation()
        loss = last["validation_loss"]
        measured = {"validation_loss": loss, "validation_loss_per_byte": loss / self.data.bytes_per_token}
        if "exact_match" in last:
            measured["exact_match"] = last["exact_match"]
        words = self.data.describe_loss(loss, digits=4) + describe_matches(measured, self.exact_match)
        self.report(measured | {"sources": self.data.account(self.batches.rounds(self.step))}, words)


def draw_loss_curve(steps: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and validation loss against steps, as PNG; steps without a finite loss are skipped."""
    # Matplotlib takes longer to import than all of zerojax, and most commands draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    trained = [line for line in steps if line.get("loss") is not None]
    axes.plot([s["step"] for s in trained], [s["loss"] for s in trained], lw=1, label="training")
    # Only runs on preferences have an accuracy.
    unit = "mean over pairs" if any("accuracy" in line for line in steps) else "nats per token"
    evaluated = [line for line in steps if line.get("validation_loss") is not None]
    if evaluated:
        xs = [line["step"] for line in evaluated]
        ys = [line["validation_loss"] for line in evaluated]
        axes.plot(xs, ys, "o-", label="validation")
        axes.annotate(
            f"{ys[-1]:.3f}", (xs[-1], ys[-1]), textcoords="offset points", xytext=(0, 10), ha="right"
        )
    axes.set(xlabel="step", ylabel=f"loss ({unit})", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
