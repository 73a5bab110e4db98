"""DPO, IPO and reward models: steps on pairs of a preferred and a rejected response.

The methods differ in their losses (``zerojax.posttrain.loss.objectives``). DPO and IPO have a reference.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.formatting import plain_text
from zerojax.models import describe_parameters
from zerojax.multihost.peers import Peers
from zerojax.multihost.preemption import StopRequest
from zerojax.posttrain.data.pairs import PairRows, Pairs, chosen_items
from zerojax.posttrain.loss.objectives import answer_log_probs, preference_loss
from zerojax.posttrain.processes import micro_batches
from zerojax.posttrain.roles.memory import RoleMemory
from zerojax.posttrain.roles.reference import Reference
from zerojax.posttrain.settings import (
    REFERENCED,
    abstract_pairs,
    check_first_weights,
    check_preferences,
    longest_response,
)
from zerojax.run.build import RunSetup
from zerojax.run.checkpoints import Manifest, Snapshots
from zerojax.run.config import RunConfig
from zerojax.run.data.batches import Batch, TrainBatches
from zerojax.run.data.responses import ResponseEnd
from zerojax.run.evaluation import ExactMatch, describe_matches, mean_metrics
from zerojax.run.inputs import batches_of, kept_tokenizer
from zerojax.run.open_run import opening
from zerojax.run.run_dir import Resume, RunFolder
from zerojax.run.train_run import BatchRun
from zerojax.run.weights import CHECKPOINTS, WeightReader, start_run
from zerojax.train.batch import local_rows
from zerojax.train.step import Metrics


@dataclass(kw_only=True)
class PreferenceTrainer(BatchRun):
    """A run that learns from preferences; a context manager.

    Attributes:
        reference: the model that the run started with; None if the method needs no reference.
        exact_match: the prompts of every evaluation with their chosen responses, or None.
    """

    reference: Reference | None
    exact_match: ExactMatch | None

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
        """Read the pairs, and take the first weights or the newest checkpoint.

        Arguments and errors are those for ``TrainRun.open``. The folder may hold an imported model.
        """
        settings = config.posttrain
        setup = RunSetup(config, loss_fn=preference_loss(settings))
        setup.check()
        check_preferences(config)
        with opening(config, folder, resume, Snapshots.find(setup.mesh)) as new:
            pairs, exact_match = read_data(config, folder, new.manifest)
            batches, validation = make_batches(config, pairs)
            check_first_weights(new.manifest, init_from)
            referenced = settings.method in REFERENCED
            start = start_run(setup, folder, new.manifest, init_from, reader, reference=referenced)
            if start.record.position:
                batches.set_state(start.record.position)
            state, reference = start.state, None
            if referenced:
                reference = Reference.of(config, folder, start.base, state, reader)
            trainer = cls(
                new=new,
                start=start,
                batch=abstract_pairs(config),
                peers=peers,
                batches=batches,
                validation=validation,
                reference=reference,
                exact_match=exact_match,
            )
            notes = [*new.notes, plain_text(RoleMemory.of(config, state.spec).table())]
            trainer.announce(
                f"{settings.method}, {describe_parameters(config.model)}, "
                f"{len(pairs.train):,} pairs and {len(pairs.held_out):,} held out",
                [*notes, *pairs.notes(), *start.notes],
            )
            return trainer

    def loop(self, signalled: StopRequest) -> None:
        """Evaluate the first weights, then take a step on each batch with the reference's predictions."""
        if self.step == 0:
            values = self.evaluate()
            self.note_first(values, self.describe(values))
        self.take_steps(map(self.with_reference, self.batches), signalled)

    def with_reference(self, batch: Batch) -> Batch:
        """A batch with the reference's log-probabilities of its responses."""
        if self.reference is None:
            return batch
        found = [
            self.reference.log_probs(self.state, part, answer_log_probs)
            for part in micro_batches(self.config, batch)
        ]
        # A single part is on its devices already, so there is nothing to wait for.
        joined = (
            found[0]
            if len(found) == 1
            else jax.tree.map(lambda *parts: np.concatenate([local_rows(part) for part in parts]), *found)
        )
        return batch | {f"reference_{name}": x for name, x in joined.items()}

    @functools.cached_property
    def held_out(self) -> list[Batch]:
        """The batches of every evaluation with the reference's log-probabilities, computed once."""
        return [self.with_reference(batch) for batch in self.validation]

    def evaluation(self) -> Metrics:
        """Measure exact match if the settings ask for it, and dispatch the held-out pairs' evaluation."""
        self.watchdog.phase(f"the evaluation after step {self.step}")
        right = {}
        if self.exact_match is not None:
            right["exact_match"] = jnp.asarray(self.exact_match.measure(self.state))
        means = mean_metrics(self.state, self.held_out)
        return right | {f"validation_{name}": means[name] for name in ("loss", "accuracy")}

    def finish(self) -> None:
        """Draw the loss curve, and print and record the result."""
        last, names = self.last_evaluation(), ("validation_loss", "validation_accuracy", "exact_match")
        self.report({name: last[name] for name in names if name in last}, self.describe(last))

    def describe(self, values: Mapping[str, float]) -> str:
        """A sentence with the values of an evaluation."""
        loss, accuracy = values["validation_loss"], values["validation_accuracy"]
        return (
            f"validation loss {loss:.4f}, {accuracy:.1%} of the held-out pairs ranked right"
            f"{describe_matches(values, self.exact_match)}"
        )


def read_data(
    config: RunConfig, folder: RunFolder, manifest: Manifest | None
) -> tuple[Pairs, ExactMatch | None]:
    """Read a run's pairs, and the prompts of its evaluations if ``train.eval_exact_match`` is set.

    Raises:
        DataError: as for ``Pairs.read``; or the tokenizer or its chat template is missing.
    """
    tokenizer, template = kept_tokenizer(config, folder, manifest)
    pairs = Pairs.read(config.data, tokenizer, template, longest_response(config))
    count = config.train.eval_exact_match
    if not count:
        return pairs, None
    items = [(ResponseEnd.of(tokenizer, template), chosen_items(pairs.held_out, count))]
    return pairs, ExactMatch(items, tokenizer, longest_response(config))


def make_batches(config: RunConfig, pairs: Pairs) -> tuple[TrainBatches, list[Batch]]:
    """This process's training batches and validation batches, as in supervised training.

    Raises:
        DataError: the held-out pairs do not fill a micro-batch.
    """
    train, held_out = (
        PairRows(every, config.train.sequence_length) for every in (pairs.train, pairs.held_out)
    )
    return batches_of(config, [train], [held_out])
