"""Exports a trained model as a Hugging Face folder: full or quantized weights, config.json, tokenizer."""

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from zerojax.errors import ConfigurationError, disk_errors, file_errors
from zerojax.interop.huggingface.families import Family, describe_model, read_model
from zerojax.interop.huggingface.load import load_params
from zerojax.interop.huggingface.mapping import TensorParts
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles, SafetensorWriter, Specs, TensorSpec
from zerojax.interop.huggingface.save import cast, each_tensor, linear_tensors, tensor_specs
from zerojax.interop.huggingface.source import CARRIED, TENSORS, model_section, read_config_json
from zerojax.interop.huggingface.tokenizer_files import GENERATION, KEPT, write_tokenizer
from zerojax.interop.huggingface.weight_files import ExportFormat, WeightFiles
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.run.build import abstract_model, is_first
from zerojax.run.config import RunConfig
from zerojax.run.data.chat_template import TEMPLATE, ChatTemplate
from zerojax.run.data.dataset import open_template, open_tokenizer
from zerojax.run.data.responses import ResponseEnd
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.run.run_dir import RunFolder, copy_files
from zerojax.train.state import TrainState, begin_with
from zerojax.validation.spelling import dtype_name
from zerojax.validation.untrusted import read_json_object

EXPORT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Dtypes of an export -> their names in safetensors files."""


@dataclass(frozen=True)
class Target:
    """The contents of an export.

    Attributes:
        family: the model's family.
        values: the values of config.json.
        parts: the tensors of each leaf.
        specs: every tensor at full precision, in the model's order.
        imported: the folder of files to write back, or None.
        carried: the tensors that were not read, to write back unchanged.
    """

    family: Family
    values: dict[str, Any]
    parts: TensorParts
    specs: dict[str, TensorSpec]
    imported: Path | None
    carried: SafetensorFiles | None = None


def plan_export(state: TrainState, config: RunConfig, folder: RunFolder, dtype: DTypeLike | None) -> Target:
    """Find the family, names and dtypes for the export of a run's model; the state may be abstract.

    ``dtype`` is the dtype of all tensors: float32, float16 or bfloat16. None keeps an imported model's
    dtypes, and is float32 for other models.

    Raises:
        ConfigurationError: no family fits this model, or the dtype is not one of the three.
    """
    wanted = None if dtype is None else dtype_name(dtype, "dtype", tuple(EXPORT_DTYPES))
    dtypes: dict[str, str] = {}
    imported = folder.huggingface if folder.huggingface.is_dir() else None
    if imported is None:
        family, values = describe_model(config.model)
        carried = None
    else:
        values = read_config_json(imported)
        family, model, _ = read_model(values, str(imported / "config.json"))
        if config.model != model_section(model, config.model):
            raise ConfigurationError(
                f"{imported} and {folder.config} describe different models. Restore the file that was "
                "changed."
            )
        dtypes = read_json_object(imported / TENSORS)
        carried = SafetensorFiles(imported, CARRIED) if (imported / CARRIED).is_file() else None
        values = family.exported(values, predicts=carried is not None)
    named = wanted or "float32"
    if wanted is not None or imported is None:
        dtypes = dict.fromkeys(dtypes, EXPORT_DTYPES[named])
        values = values | {"dtype" if "dtype" in values else "torch_dtype": named}
    parts = family.parts(config.model, None if imported is None else dtypes)
    specs = tensor_specs(state.spec, parts, dtypes, EXPORT_DTYPES[named])
    return Target(family, values, parts, specs, imported, carried)


def check_quantizable(state: TrainState, target: Target, how: ExportFormat) -> None:
    """Refuse a model that this format cannot quantize, before any file is written.

    Raises:
        ConfigurationError: its layers are not ``torch.nn.Linear``, or do not divide into blocks.
    """
    if not target.family.linear:
        raise ConfigurationError(
            f"--weights {how.format} quantizes linear layers, but transformers' "
            f"{target.family.architecture} has Conv1D layers. Leave --weights out"
        )
    if target.family.composite:
        raise ConfigurationError(
            f"--weights {how.format}: transformers would read all parts of {target.family.architecture} as "
            "quantized, also those that were not trained, which are not. Leave --weights out"
        )
    for tensor in linear_tensors(state.spec, target.parts):
        how.check(tensor)


def quantized_specs(state: TrainState, target: Target, how: ExportFormat | None) -> tuple[set[str], Specs]:
    """The names of the tensors that are quantized, and the tensors of the files, in the model's order."""
    names = set() if how is None else {t.name for t in linear_tensors(state.spec, target.parts)}
    specs: Specs = {}
    for name, spec in target.specs.items():
        specs |= how.specs(name, spec) if how is not None and name in names else {name: spec}
    return names, specs


def export_model(
    state: TrainState,
    config: RunConfig,
    folder: RunFolder,
    target: Target,
    out: Path,
    how: ExportFormat | None = None,
    largest_file: int = 5 * 10**9,
) -> None:
    """Write a model's folder. All processes must call it; the first one writes.

    Args:
        state: the trained model.
        config: the run's config.
        folder: the run's folder.
        target: from ``plan_export``.
        out: the folder to create; it appears when it is complete.
        how: the quantization of the linear layers; None for none.
        largest_file: most bytes of tensors in one file.

    Raises:
        ConfigurationError: ``out`` exists, or a weight is out of the dtype's range.
        RunError: the disk is full.
    """
    quantized, specs = quantized_specs(state, target, how)
    carried = {} if target.carried is None else target.carried.specs
    with new_folder(out) as draft:
        writer = SafetensorWriter(draft, specs | carried, largest_file) if is_first() else None
        for tensor, values in each_tensor(state, target.parts):
            name, rows = tensor.name, tensor.rows
            if writer is None or name not in target.specs:
                continue
            spec = target.specs[name]
            if how is None or name not in quantized:
                writer.write(name, cast(name, values, spec.dtype), *tensor.region())
                continue
            for part, array in how.encode(name, values, spec).items():
                if part.endswith("_shape"):
                    if not rows.start:  # once for the tensor, not for each part
                        writer.write(part, array)
                    continue
                is_scale = part.removeprefix(name).startswith("_scale")
                first = rows.start // (how.block_shape[0] if is_scale else 1)
                writer.write(part, array, slice(first, first + len(array)))
        if writer is not None:
            for name in carried:
                assert target.carried is not None
                writer.write(name, target.carried.read(name))
            writer.close()
            write_settings(target, how, config, folder, draft)


def quantized_state(
    state: TrainState, config: RunConfig, target: Target, out: Path, how: ExportFormat
) -> TrainState:
    """A state with an export's decoded weights, read from its files in ``out`` into shards.

    Returns:
        ``state`` with these weights. If it has frozen weights, a state of the same model without frozen ones.
    """
    files = WeightFiles(out, how)
    if not state.spec.frozen:
        return state.with_params(load_params(state.spec, files, target.parts))
    plain = abstract_model(config.all_trained())
    return begin_with(plain, load_params(plain.spec, files, target.parts), config.train.seed)


@contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """A draft folder that becomes ``out`` when the block ends. All processes enter; the first one writes.

    Raises:
        ConfigurationError: ``out`` exists, or cannot be written.
    """
    draft = out.parent / f"{out.name}.unfinished"

    def create() -> None:
        if os.path.lexists(out):  # a link to nothing, too
            raise ConfigurationError(f"{out} exists: choose another folder, or delete it yourself")
        shutil.rmtree(draft, ignore_errors=True)  # from an interrupted export
        with file_errors(draft, what="cannot write: "):
            draft.mkdir(parents=True)

    run_on_process_zero(create)
    with disk_errors(draft):
        yield draft
        if is_first():
            draft.rename(out)
    run_on_process_zero(lambda: None)  # a barrier: no process reads before all is written


def write_settings(
    target: Target, how: ExportFormat | None, config: RunConfig, folder: RunFolder, out: Path
) -> None:
    """Write config.json and the tokenizer's files; arguments as for ``export_model``."""
    values = target.values
    if how is not None:
        values = values | {"quantization_config": how.config([target.family.names.head])}
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    tokenizer, template = open_tokenizer(config.data, folder.data), None
    if target.imported is not None and config.data.tokenizer == str(folder.tokenizer.absolute()):
        copy_files(target.imported, out, KEPT)
    else:
        write_tokenizer(tokenizer, out)
    if any(one.kind == "chat" for one in config.data.sources):
        template = open_template(config.data, folder.data)
        (out / TEMPLATE).write_text(template.source, encoding="utf-8")
    _write_generation(tokenizer, template, out)


def _write_generation(tokenizer: Tokenizer, template: ChatTemplate | None, out: Path) -> None:
    """Write the ids that begin and end a text, and the id that ends a chat message.

    The model's own generation_config.json takes precedence.
    """
    own = (out / GENERATION).is_file()
    plain = {"bos_token_id": tokenizer.begin_of_text, "eos_token_id": tokenizer.end_of_text}
    values = read_config_json(out, GENERATION) if own else plain
    given = values.get("eos_token_id")
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if template is not None and (end := ResponseEnd.of(tokenizer, template).token) not in ends:
        values = values | {"eos_token_id": [*ends, end]}
    elif own:
        return
    (out / GENERATION).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
