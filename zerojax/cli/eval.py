"""``zerojax eval RUN``: measure the validation loss of a checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from zerojax.cli.cluster import joined_cluster
from zerojax.cli.options import read_options
from zerojax.cli.trained import open_trained
from zerojax.run.build import is_first, make_batches, mean_loss, prepare_data
from zerojax.run.config import MeshSection, RunConfig
from zerojax.run.run_dir import RunFolder


@dataclass(frozen=True)
class Options:
    """Measure the validation loss of a run's latest checkpoint.

    Attributes:
        run: The run's folder.
        ema: Use the averaged weights (optimizer.ema_decay).
        mesh: Devices to use; by default as in the run.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    ema: bool = False
    mesh: MeshSection = field(default_factory=MeshSection)


def run(arguments: list[str]) -> None:
    """Restore the newest checkpoint, evaluate it, and print the loss."""
    mesh = MeshSection()
    if arguments and not arguments[0].startswith("-"):
        mesh = RunFolder(Path(arguments[0])).read_config().mesh
    default = Options(run=tyro.MISSING, mesh=mesh)
    options = read_options(Options, "eval", arguments, default)
    folder = RunFolder(options.run)
    config = folder.read_config()
    with joined_cluster(options.mesh, config.cluster):
        _evaluate(folder, config, options)


def _evaluate(folder: RunFolder, config: RunConfig, options: Options) -> None:
    trained = open_trained(folder, config, options.mesh, ema=options.ema)
    data = prepare_data(trained.config, folder)
    batches, validation = make_batches(trained.config, data)
    batches.close()
    loss = float(mean_loss(trained.state, validation))
    if not is_first():
        return
    print(
        f"step {trained.step}: validation loss {loss:.6f} nats per token, "
        f"{loss / data.bytes_per_token:.6f} per byte"
    )
