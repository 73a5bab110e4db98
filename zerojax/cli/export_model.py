"""``zerojax export RUN OUT [--weights FORMAT]``: write a checkpoint as a Hugging Face model."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from zerojax.cli.cluster import joined_cluster
from zerojax.cli.options import read_options
from zerojax.cli.trained import TrainedRun, open_trained
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import (
    EXPORT_DTYPES,
    Direction,
    Format,
    WeightFormat,
    check_quantizable,
    export_model,
    plan_export,
    quantized_state,
)
from zerojax.run.build import is_first, make_batches, mean_loss, prepare_data
from zerojax.run.config import MeshSection, RunConfig, ZeroSection
from zerojax.run.run_dir import RunFolder
from zerojax.train.state import TrainState
from zerojax.validation.dtypes import dtype_name
from zerojax.zero_config import ZeroConfig

REPORT = "zerojax.json"


@dataclass(frozen=True)
class Options:
    """Write a run's latest checkpoint as a Hugging Face model, for transformers or vLLM.

    With --weights, linear layers are quantized by the codec that ZeRO++ sends weights with, in the format of
    compressed-tensors, and the perplexities of the quantized and the full model are measured.

    Attributes:
        run: The run's folder.
        out: The folder to write; must not exist.
        weights: Format to quantize the linear layers to; only transformers reads int2 and block-wise fp8.
        block_size: Elements that share a scale; by default the run's zero.block_size. vLLM's fast kernels
            need 128.
        along: "input" for blocks along a layer's inputs, which vLLM reads; "output" for blocks along its
            outputs, as in training, which only transformers reads.
        dtype: Of the tensors that are not quantized: float32, float16 or bfloat16 (or fp32, fp16, bf16); by
            default as in the imported model, else float32.
        shard_gb: The greatest size of a file, in gigabytes.
        ema: Export the averaged weights (optimizer.ema_decay).
        mesh: Devices to use; by default as in the run.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    weights: Format | None = None
    block_size: int | None = None
    along: Direction = "input"
    dtype: str | None = None
    shard_gb: float = 5.0
    ema: bool = False
    mesh: MeshSection = field(default_factory=MeshSection)

    def __post_init__(self) -> None:
        """Refuse an unknown dtype, a file size of zero, and options without effect.

        Raises:
            ConfigurationError: names the option.
        """
        if self.dtype is not None:
            dtype_name(self.dtype, "--dtype", tuple(EXPORT_DTYPES))
        if not self.shard_gb > 0:
            raise ConfigurationError(f"--shard-gb {self.shard_gb}: must be above 0")
        if self.weights is None and (self.block_size is not None or self.along != "input"):
            raise ConfigurationError("--block-size and --along say how weights are quantized: add --weights")


def run(arguments: list[str]) -> None:
    """Restore the newest checkpoint and write it, quantized if asked to."""
    mesh = MeshSection()
    if arguments and not arguments[0].startswith("-"):
        mesh = RunFolder(Path(arguments[0])).read_config().mesh
    default = Options(run=tyro.MISSING, out=tyro.MISSING, mesh=mesh)
    options = read_options(Options, "export", arguments, default)
    folder = RunFolder(options.run)
    config = folder.read_config()
    how = None
    if options.weights is not None:
        block = options.block_size or config.to_zero().block_size
        ZeroConfig(block_size=block)  # refuses a size that the codec does not support
        how = WeightFormat(options.weights, block, options.along)
    # The master weights are written and measured, whatever the wire formats of training.
    zero = {name: getattr(config.zero, name) for name in ("compute_dtype", "frozen", "frozen_weights")}
    config = replace(config, zero=ZeroSection(**zero))
    with joined_cluster(options.mesh, config.cluster):
        _export(options, folder, config, how)


def _export(options: Options, folder: RunFolder, config: RunConfig, how: WeightFormat | None) -> None:
    trained = open_trained(folder, config, options.mesh, ema=options.ema)
    target = plan_export(trained.state, trained.config, folder, options.dtype)
    if how is not None:
        check_quantizable(trained.state, target, how)
    largest = int(options.shard_gb * 10**9)
    export_model(trained.state, trained.config, folder, target, options.out, how, largest)
    if is_first():
        what = f"{target.family.architecture}, {len(target.specs)} tensors"
        print(f"{options.out}: {what}, from step {trained.step} of {folder.path}")
    if how is None:
        return
    found = _perplexities(trained, folder, quantized_state(trained.state, target, options.out, how))
    if is_first():
        report = {"step": trained.step, "weights": how.format, "block_size": how.block, "along": how.along}
        (options.out / REPORT).write_text(json.dumps(report | found, indent=1) + "\n", encoding="utf-8")
        print(
            f"perplexity per token: {found['perplexity']:.4f} with {how.format} weights, "
            f"{found['perplexity_full']:.4f} with the full ones ({found['validation_tokens']:,} tokens)"
        )


def _perplexities(trained: TrainedRun, folder: RunFolder, quantized: TrainState) -> dict[str, float]:
    """Perplexities of the run's validation batches with the quantized and the full weights."""
    batches, validation = make_batches(trained.config, prepare_data(trained.config, folder))
    batches.close()
    full, lossy = (float(mean_loss(state, validation)) for state in (trained.state, quantized))
    return {
        "perplexity": math.exp(lossy),
        "perplexity_full": math.exp(full),
        "validation_loss": lossy,
        "validation_loss_full": full,
        "validation_tokens": trained.config.train.sequence_length
        * trained.config.train.batch_size
        // trained.config.train.accumulate
        * len(validation),
    }
