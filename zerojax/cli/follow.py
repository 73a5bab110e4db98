"""``zerojax follow RUN --to HOST:PORT``: keep inference engines at a run's newest checkpoint."""

import os
import time
from dataclasses import dataclass, field
from typing import Literal

from zerojax.cli.cluster import JobOptions, joined_cluster
from zerojax.cli.options import MeshOptions, RunPath, read_options
from zerojax.cli.trained import TrainedRun, as_stored, open_trained
from zerojax.comm.gather import gather_from_all
from zerojax.errors import ConfigurationError
from zerojax.interop.engines.publisher import Publisher
from zerojax.interop.huggingface import EXPORT_DTYPES, FP8Blocks
from zerojax.log import warn
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.multihost.peers.handshake import VARIABLE
from zerojax.run.build import is_first
from zerojax.run.checkpoints import step_dirs
from zerojax.run.config import RunConfig, with_settings
from zerojax.run.run_dir import RunFolder
from zerojax.validation.spelling import dtype_name


@dataclass(frozen=True, kw_only=True)
class Options(JobOptions):
    """Send a run's checkpoints to receivers beside inference engines, each as soon as it is saved.

    A receiver is the folder zerojax/interop/engines/receiver, which needs Python and NumPy alone. The first
    checkpoint is sent in full, later ones as their changed elements. The job's token is read from
    ZEROJAX_JOB_TOKEN. The command ends when the run has finished and all receivers have its last checkpoint.

    Attributes:
        run: The run's folder. It may still be training.
        to: HOST:PORT of each receiver.
        dtype: Dtype of the engine's weights: float32, float16 or bfloat16 (fp32, fp16, bf16).
        weights: Format of the linear layers, as in zerojax export.
        block_size: Rows and columns of a block that shares a scale, with --weights.
        flows: TCP connections to each receiver.
        seconds: Time between two looks for a new checkpoint.
        once: Send the newest checkpoint, and end.
        mesh: Devices to use; by default as in the run.
    """

    run: RunPath
    to: tuple[str, ...]
    dtype: str = "bfloat16"
    weights: Literal["fp8-blocks"] | None = None
    block_size: int = 128
    flows: int = 4
    seconds: float = 2.0
    once: bool = False
    mesh: MeshOptions = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an address without a port, an unknown dtype, a block without a format, and no flow."""
        dtype_name(self.dtype, "--dtype", tuple(EXPORT_DTYPES))
        if bad := [address for address in self.to if not address.rpartition(":")[2].isdecimal()]:
            raise ConfigurationError(f"--to {bad[0]}: name a receiver as HOST:PORT")
        if self.weights is None and self.block_size != Options.block_size:
            raise ConfigurationError("--block-size says how weights are quantized: add --weights")
        if self.block_size < 1:
            raise ConfigurationError(f"--block-size {self.block_size}: a block has at least one row")
        if not self.to or self.flows < 1:
            raise ConfigurationError("--to needs at least one HOST:PORT, and --flows is at least 1")


def run(arguments: list[str]) -> None:
    """Publish each new checkpoint until the run has finished."""
    options = read_options(Options, "follow", arguments)
    folder = RunFolder(options.run)
    config = as_stored(with_settings(folder.read_config(), {"mesh": options.mesh}))
    config.model.check_language_model("zerojax follow")
    with joined_cluster(config.mesh, config.cluster, options):
        _follow(options, folder, config)


def _follow(options: Options, folder: RunFolder, config: RunConfig) -> None:
    publisher, sent, reported = None, -1, dict[str, str]()
    while True:
        step, finished = run_on_process_zero(lambda: _newest(folder))
        if step > sent and (trained := open_trained(folder, config, config.mesh)).step > sent:
            sent = trained.step
            publisher = publisher or _publisher(options, folder, trained)
            publisher.publish(trained.state, sent)
        served = publisher is not None and publisher.wait(sent, options.seconds)
        if all(gather_from_all(served)) and (finished or options.once):
            break
        if publisher is None or served:
            time.sleep(options.seconds)
        elif (errors := {at: str(error) for at, error in publisher.errors.items()}) != reported:
            reported = errors
            for address, error in errors.items():
                warn(f"{address} does not serve step {sent} yet: {error}")
    if publisher is not None:
        publisher.close()
    if is_first():
        print(f"{', '.join(options.to)}: at step {sent} of {folder.path}")


def _publisher(options: Options, folder: RunFolder, trained: TrainedRun) -> Publisher:
    return Publisher(
        trained.state,
        trained.config,
        folder,
        options.to,
        token=os.environ.get(VARIABLE, "").strip(),
        dtype=dtype_name(options.dtype, "--dtype", tuple(EXPORT_DTYPES)),
        how=None if options.weights is None else FP8Blocks.of([options.block_size] * 2),
        flows=options.flows,
    )


def _newest(folder: RunFolder) -> tuple[int, bool]:
    """The step of the newest checkpoint, and whether the run has finished."""
    summary = folder.read_summary()
    steps = step_dirs.steps(folder.checkpoints)
    return (steps[-1] if steps else -1), summary.get("status") == "finished"
