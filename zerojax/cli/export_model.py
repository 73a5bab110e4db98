"""``zerojax export RUN OUT``: write a checkpoint as a Hugging Face model, or its adapters for PEFT."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pallas_kernels.formats import is_block_size
from zerojax.cli.cluster import joined_cluster
from zerojax.cli.options import MeshOptions, RunPath, read_options
from zerojax.cli.trained import TrainedRun, as_stored, open_trained
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import (
    EXPORT_DTYPES,
    Direction,
    ExportFormat,
    Format,
    FP8Blocks,
    WeightFormat,
    adapter_base,
    check_quantizable,
    export_adapter,
    export_model,
    plan_export,
    quantized_state,
)
from zerojax.run.build import check_batch, is_first
from zerojax.run.config import RunConfig, with_settings
from zerojax.run.data.dataset import perplexity
from zerojax.run.evaluation import mean_loss, mean_metrics
from zerojax.run.inputs import make_batches, prepare_data
from zerojax.run.run_dir import RunFolder
from zerojax.train.state import TrainState
from zerojax.validation.spelling import dtype_name

REPORT = "zerojax.json"


@dataclass(frozen=True)
class Options:
    """Write a run's latest checkpoint as a Hugging Face model, for transformers or vLLM.

    --weights quantizes the linear layers, and measures the perplexities of the quantized and the full model.
    The format is compressed-tensors, or with fp8-blocks the one of DeepSeek's and Qwen's fp8 models. Adapters
    are merged into the weights; --adapter writes them alone, for PEFT.

    Attributes:
        run: The run's folder.
        out: The folder to write; must not exist.
        weights: Format to quantize the linear layers to; only transformers reads int2 and fp8.
        block_size: Elements that share a scale; by default the run's zero.block_size. vLLM's fast kernels
            need 128. For fp8-blocks it is the rows and columns of a block, by default 128.
        along: "input" for blocks along a layer's inputs, which vLLM reads; "output" for blocks along its
            outputs, as in training, which only transformers reads.
        dtype: Dtype of the tensors that are not quantized: float32, float16 or bfloat16 (fp32, fp16, bf16).
            The default is the imported model's dtype; it is float32 without one, and for adapters.
        shard_gb: Largest size of a file, in gigabytes.
        adapter: Write only the adapters: adapter_config.json and adapter_model.safetensors.
        ema: Export the averaged weights (optimizer.ema_decay).
        mesh: Devices to use; by default as in the run.
    """

    run: RunPath
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    weights: Format | Literal["fp8-blocks"] | None = None
    block_size: int | None = None
    along: Direction = "input"
    dtype: str | None = None
    shard_gb: float = 5.0
    adapter: bool = False
    ema: bool = False
    mesh: MeshOptions = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an unknown dtype, a file size of zero, and options without effect."""
        if self.dtype is not None:
            dtype_name(self.dtype, "--dtype", tuple(EXPORT_DTYPES))
        if not self.shard_gb > 0:
            raise ConfigurationError(f"--shard-gb {self.shard_gb}: must be above 0")
        if self.weights is None and (self.block_size is not None or self.along != "input"):
            raise ConfigurationError("--block-size and --along say how weights are quantized: add --weights")
        if (
            self.block_size is not None
            and self.weights != "fp8-blocks"
            and not is_block_size(self.block_size)
        ):
            raise ConfigurationError(
                f"--block-size {self.block_size}: must be a power of two from 64 to 2048"
            )
        if self.weights == "fp8-blocks" and self.along != "input":
            raise ConfigurationError("--weights fp8-blocks has square blocks: leave --along out")
        if self.adapter and (self.weights is not None or self.shard_gb != 5.0):
            raise ConfigurationError(
                "--adapter writes one file that is not quantized: drop --weights, --shard-gb"
            )


def run(arguments: list[str]) -> None:
    """Restore the newest checkpoint and write it, quantized if asked to."""
    options = read_options(Options, "export", arguments)
    folder = RunFolder(options.run)
    # The stored weights are written and measured, without the rounding of training's wire formats.
    config = as_stored(with_settings(folder.read_config(), {"mesh": options.mesh}))
    config.model.check_language_model("zerojax export")
    how = None
    if options.weights == "fp8-blocks":
        how = FP8Blocks.of([128 if options.block_size is None else options.block_size] * 2)
    elif options.weights is not None:
        block = config.zero.block_size if options.block_size is None else options.block_size
        how = WeightFormat(options.weights, block, options.along)
    with joined_cluster(config.mesh, config.cluster):
        if how is not None:  # perplexities are measured on batches
            check_batch(config, config.mesh.to_mesh(), trains=False)
        _export(options, folder, config, how)


def _export(options: Options, folder: RunFolder, config: RunConfig, how: ExportFormat | None) -> None:
    trained = open_trained(folder, config, config.mesh, ema=options.ema)
    if options.adapter:
        _export_adapter(options, folder, trained)
        return
    target = plan_export(trained.state, trained.config, folder, options.dtype)
    if how is not None:
        check_quantizable(trained.state, target, how)
    largest = int(options.shard_gb * 10**9)
    export_model(trained.state, trained.config, folder, target, options.out, how, largest)
    if is_first():
        what = f"{target.family.architecture}, {len(target.specs)} tensors"
        print(f"{options.out}: {what}, from step {trained.step} of {folder.path}")
        if note := rounding_note(trained.state):
            print(note)
    if how is None:
        return
    found = _perplexities(
        trained, folder, quantized_state(trained.state, trained.config, target, options.out, how)
    )
    if is_first():
        report = {
            "step": trained.step,
            "weights": how.format,
            "block_size": max(how.block_shape),
            "along": options.along,
        }
        (options.out / REPORT).write_text(json.dumps(report | found, indent=1) + "\n", encoding="utf-8")
        print(
            f"perplexity per token: {found['perplexity']:.4f} with {how.format} weights, "
            f"{found['perplexity_full']:.4f} with the full ones ({found['validation_tokens']:,} tokens)"
        )


def rounding_note(state: TrainState) -> str | None:
    """A note for readers of the files if frozen weights are stored in fewer bits."""
    stored = state.spec.zero.frozen_weights
    if stored is None or not state.spec.frozen:
        return None
    return (
        f"its frozen weights are written with the rounding of {stored}, as they were in training; "
        "--adapter writes adapters alone"
    )


def _export_adapter(options: Options, folder: RunFolder, trained: TrainedRun) -> None:
    if trained.state.spec.lora is None:
        raise ConfigurationError(f"--adapter: {options.run} has trained no adapters: see [lora]")
    model = trained.config.model
    base, family = adapter_base(trained.base, folder, model)
    dtype = options.dtype or "float32"
    targets = export_adapter(trained.state, model, options.out, base=base, family=family, dtype=dtype)
    if is_first():
        print(f"{options.out}: adapters of {', '.join(targets)}, from step {trained.step} of {options.run}")
        if base is None:
            print("adapter_config.json names no base: this run's base was not imported, or was trained since")


def _perplexities(trained: TrainedRun, folder: RunFolder, quantized: TrainState) -> dict[str, float]:
    """Perplexities on the run's validation batches with the quantized and the full weights."""
    batches, validation = make_batches(trained.config, prepare_data(trained.config, folder))
    batches.close()
    full = mean_metrics(trained.state, validation)
    losses = {"": float(mean_loss(quantized, validation)), "_full": float(full["loss"])}
    return {
        **{f"perplexity{which}": perplexity(loss) for which, loss in losses.items()},
        **{f"validation_loss{which}": loss for which, loss in losses.items()},
        "validation_tokens": int(full["tokens"]),
    }
