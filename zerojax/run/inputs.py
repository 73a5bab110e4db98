"""A run's inputs: its tokens and tokenizer, and the batches made from them."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zerojax.errors import ConfigurationError
from zerojax.multihost.agreement import run_on_each_process, run_on_process_zero
from zerojax.multihost.files import share_folder
from zerojax.run.checkpoints import Manifest
from zerojax.run.config import RunConfig
from zerojax.run.data.batches import Batch, Rows, TrainBatches, make_rows, validation_batches
from zerojax.run.data.chat_template import ChatTemplate
from zerojax.run.data.dataset import Dataset, open_dataset, open_template, open_tokenizer
from zerojax.run.data.prepare import keep_tokenizer, prepare, prepared_tokenizer, tokenizer_to_keep
from zerojax.run.data.source import check_source_exists
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.run.run_dir import RunFolder
from zerojax.train.batch import processes_a_row


def prepare_data(config: RunConfig, folder: RunFolder) -> Dataset:
    """Write a run's token files on process zero, unless they are there; open them on all processes.

    Raises:
        ConfigurationError: the data cannot be read, or their vocabulary is larger than the model's.
    """
    run_on_process_zero(lambda: prepare(config.data, folder.data))
    share_folder(folder.data)
    run_on_each_process(lambda: prepare(config.data, folder.data))  # checks that the tokens fit the settings
    data = open_dataset(config.data, folder.data)
    _check_vocabulary(data.tokenizer, config)
    return data


def kept_tokenizer(
    config: RunConfig, folder: RunFolder, manifest: Manifest | None
) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer of a run that reads its data without preparing them, and the template of conversations.

    The run keeps both in its folder, and uses them again when it resumes.
    """

    def keep() -> None:
        if not _has_tokenizer(folder, manifest):
            keep_tokenizer(config.data, folder.data)

    run_on_process_zero(keep)
    share_folder(folder.data)
    tokenizer = open_tokenizer(config.data, folder.data)
    _check_vocabulary(tokenizer, config)
    return tokenizer, open_template(config.data, folder.data) if config.data.kind == "chat" else None


def check_inputs(config: RunConfig, folder: RunFolder, manifest: Manifest | None) -> None:
    """Check a run's data, tokenizer and template as far as possible without reading text; writes nothing.

    Raises:
        ConfigurationError: one of them is missing or cannot be used, or the tokenizer's vocabulary is larger
            than the model's.
    """
    data = config.data
    if config.posttrain.method == "none":
        tokenizer = prepared_tokenizer(data, folder.data)
    else:
        for one in data.sources:
            check_source_exists(one.source, one.pattern)
        kept = None if _has_tokenizer(folder, manifest) else tokenizer_to_keep(data, folder.data)
        tokenizer = open_tokenizer(data, folder.data) if kept is None else kept[0]
    if tokenizer is not None:
        _check_vocabulary(tokenizer, config)


def _has_tokenizer(folder: RunFolder, manifest: Manifest | None) -> bool:
    """Whether a run resumes, and has kept its tokenizer in its folder."""
    return manifest is not None and bool(manifest.record.position) and folder.data.exists()


def _check_vocabulary(tokenizer: Tokenizer, config: RunConfig) -> None:
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigurationError(
            f"the tokenizer has a vocabulary of {tokenizer.vocab_size}, but model.vocab_size is "
            f"{config.model.vocab_size}: raise model.vocab_size"
        )


def make_batches(config: RunConfig, data: Dataset) -> tuple[TrainBatches, list[Batch]]:
    """This process's part of the training batches and of the validation batches."""
    length, packing, labels = config.train.sequence_length, config.data.packing, config.data.masked
    rows = functools.partial(make_rows, length=length, packing=packing, labels=labels)
    held_out = [rows(part.validation) for part in data.parts]
    return batches_of(config, [rows(part.train) for part in data.parts], held_out, data.weights)


def batches_of(
    config: RunConfig, train: Sequence[Rows], held_out: Sequence[Rows], weights: Sequence[float] = (1.0,)
) -> tuple[TrainBatches, list[Batch]]:
    """Like ``make_batches``, from each source's rows to train on and its held-out rows.

    Validation batches have the size of a micro-batch, so that an evaluation needs no more memory than a step.
    There are more of them, so that ``train.accumulate`` does not change the validation loss.
    """
    size, sharing = config.train.batch_size, processes_a_row(config.zero.sequence_parallel)
    micro = config.train.accumulate
    place = {"process": jax.process_index() // sharing, "processes": jax.process_count() // sharing}
    validation = validation_batches(
        held_out,
        weights=weights,
        batch_size=size // micro,
        batches=config.train.eval_batches * micro,
        **place,
    )
    return TrainBatches(train, weights=weights, batch_size=size, seed=config.train.seed, **place), validation


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    shape = (config.train.batch_size, config.train.sequence_length + 1)
    names = ["tokens"]
    names += ["segments"] if config.data.packing == "documents" else []
    names += ["labels"] if config.data.masked else []
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}
