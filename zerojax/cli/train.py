"""``zerojax train CONFIG [--run-dir DIR] [--section.key value ...]``: train a model or resume a run."""

from dataclasses import dataclass
from pathlib import Path

from zerojax.analysis.profile import parse_steps
from zerojax.cli.cluster import facts_of, joined_cluster
from zerojax.cli.run_options import RunOptions, read_run, show_plan
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import ModelReader, adapter_frozen, adapter_lora, begin_run, load_adapter
from zerojax.models.config import GPTConfig
from zerojax.run.config.keys import Tables
from zerojax.run.config.tables import checked, table_of
from zerojax.run.train_run import TrainRun


@dataclass(frozen=True)
class Options(RunOptions):
    """Train a model, or resume its training.

    The same command given again resumes from the last checkpoint in the run's folder. Every setting of the
    config can be overridden; the defaults below are the config's.

    Attributes:
        adapter: Start a new run's adapters from the folder of a PEFT adapter. Sets [lora] if lora.rank is 0,
            and zero.frozen if the adapter's files train more weights. The run's base is an imported model, or
            from --init-from.
        profile: Steps to trace into RUN/profile, as start:stop, such as 10:12 for three steps.
    """

    adapter: Path | None = None
    profile: str | None = None


def run(arguments: list[str]) -> None:
    """Read the config and options, join the other processes, and train."""
    options, settings, source = read_run(Options, "train", arguments, adapter_settings)
    folder = options.folder
    if settings.posttrain.method != "none":
        raise ConfigurationError(
            f'posttrain.method = "{settings.posttrain.method}" is for zerojax posttrain: run that, or leave '
            "it out"
        )
    settings.model.check_language_model("zerojax train")
    from_files = {"--init-from": options.init_from, "--adapter": options.adapter}
    profile = None if options.profile is None else parse_steps(options.profile)
    if options.dry_run:
        show_plan(options, settings, source)
        return
    facts = facts_of(settings, **{"--resume": options.resume} | from_files)
    with joined_cluster(settings.mesh, settings.cluster, options, facts) as peers:
        if source is not None:
            begin_run(source, settings, folder)
        with TrainRun.open(
            settings, folder, options.resume, options.init_from, peers, profile, ModelReader()
        ) as trainer:
            if trainer.step == 0:
                for note in () if source is None else source.notes:
                    trainer.log.say(note)
                if options.adapter is not None:
                    start_from(options.adapter, trainer)
            trainer.train()


def adapter_settings(options: Options, tables: Tables) -> Tables:
    """Settings with which a run can hold PEFT's files, if ``tables`` do not set them."""
    if options.adapter is None:
        return {}
    if options.settings.get("lora", {}).get("rank") == 0:
        raise ConfigurationError(
            f"--adapter {options.adapter} needs adapters, and --lora.rank 0 has none: leave it out"
        )
    zero, lora = tables.get("zero", {}), tables.get("lora", {})
    model = GPTConfig(**checked({"model": tables.get("model", {})}, "the model")["model"])
    found = Tables()
    if not lora.get("rank"):
        found["lora"] = table_of(adapter_lora(options.adapter, model))
    if zero.get("frozen") is None and (frozen := adapter_frozen(options.adapter, model)) != ("*",):
        found["zero"] = {"frozen": list(frozen)}
    return found


def start_from(adapter: Path, trainer: TrainRun) -> None:
    """Load PEFT's files into the adapters of a new run. Refuse it if its other weights are random."""
    if not trainer.base:
        raise ConfigurationError(
            f"--adapter {adapter}: the other weights of this run are random: import the model that the "
            "adapter belongs to by zerojax import, and train that run, or name one in --init-from"
        )
    trainer.state = load_adapter(trainer.state, adapter, trainer.config.model)
    trainer.log.say(f"beginning with the adapters of {adapter}")
