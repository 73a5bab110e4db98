"""``zerojax eval RUN``: measure the validation loss of a checkpoint, and exact match."""

from dataclasses import dataclass, field, replace

from zerojax.cli.cluster import joined_cluster
from zerojax.cli.options import MeshOptions, RunPath, read_options
from zerojax.cli.trained import on_its_mesh, open_trained
from zerojax.errors import ConfigurationError
from zerojax.run.build import check_batch, is_first
from zerojax.run.config import RunConfig, with_settings
from zerojax.run.evaluation import ExactMatch, describe_matches, mean_loss
from zerojax.run.inputs import make_batches, prepare_data
from zerojax.run.run_dir import RunFolder


@dataclass(frozen=True)
class Options:
    """Measure the validation loss of a run's latest checkpoint, and its exact match if it has one.

    Attributes:
        run: The run's folder.
        ema: Use the averaged weights (optimizer.ema_decay).
        exact_match: Held-out prompts to complete; by default as in the run (train.eval_exact_match).
        mesh: Devices to use; by default as in the run.
    """

    run: RunPath
    ema: bool = False
    exact_match: int | None = None
    mesh: MeshOptions = field(default_factory=dict)


def run(arguments: list[str]) -> None:
    """Restore the newest checkpoint, evaluate it, and print the loss."""
    options = read_options(Options, "eval", arguments)
    folder = RunFolder(options.run)
    config = with_settings(folder.read_config(), {"mesh": options.mesh})
    config.model.check_language_model("zerojax eval")
    if config.posttrain.method != "none":
        raise ConfigurationError(
            "zerojax eval measures the loss on text or conversations; a run of zerojax posttrain measures "
            "its own held-out prompts or pairs every train.eval_every steps: see zerojax report "
            f"{options.run}"
        )
    if options.exact_match is not None:
        config = replace(config, train=replace(config.train, eval_exact_match=options.exact_match))
    with joined_cluster(config.mesh, config.cluster):
        config = on_its_mesh(config)
        check_batch(config, config.mesh.to_mesh(), trains=False)
        _evaluate(folder, config, options)


def _evaluate(folder: RunFolder, config: RunConfig, options: Options) -> None:
    trained = open_trained(folder, config, config.mesh, ema=options.ema)
    data = prepare_data(trained.config, folder)
    batches, validation = make_batches(trained.config, data)
    batches.close()
    matched = trained.config.train.eval_exact_match > 0
    items = ExactMatch.of(trained.config, data, folder.data) if matched else None
    loss = float(mean_loss(trained.state, validation))
    measured = {} if items is None else {"exact_match": items.measure(trained.state)}
    if is_first():
        print(f"step {trained.step}: {data.describe_loss(loss, digits=6)}{describe_matches(measured, items)}")
