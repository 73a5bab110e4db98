"""``zerojax posttrain CONFIG [--run-dir DIR] [...]``: train a model with rewards or on preferences."""

from dataclasses import dataclass
from functools import partial

import jax

from zerojax.cli.cluster import facts_of, joined_cluster
from zerojax.cli.run_options import RunOptions, read_run, show_plan
from zerojax.interop.huggingface import ModelReader, begin_run
from zerojax.multihost import standby
from zerojax.posttrain.methods.grpo import GRPOTrainer
from zerojax.posttrain.methods.ppo import PPOTrainer
from zerojax.posttrain.methods.preferences import PreferenceTrainer
from zerojax.posttrain.roles.saved_runs import with_reward_checkpoint
from zerojax.posttrain.settings import PREFERENCES, check_first_weights, check_preferences, check_settings
from zerojax.run.checkpoints import Manifest
from zerojax.run.config import RunConfig

TRAINERS = {"grpo": GRPOTrainer, "ppo": PPOTrainer} | dict.fromkeys(PREFERENCES, PreferenceTrainer)
"""By method. Each of them refuses an unknown method, such as "none"."""


@dataclass(frozen=True)
class Options(RunOptions):
    """Train a model with rewards for its own completions or on preferences between responses, or resume that.

    The same command given again resumes from the last checkpoint in the run's folder. Every setting of the
    config can be overridden; the defaults below are the config's.
    """


def run(arguments: list[str]) -> None:
    """Read the config and options, join the other processes, and train."""
    options, settings, source = read_run(Options, "posttrain", arguments)
    folder = options.folder
    if options.dry_run:
        show_plan(options, settings, source, partial(checked, options))
        return
    facts = facts_of(settings, **{"--resume": options.resume, "--init-from": options.init_from})
    with joined_cluster(settings.mesh, settings.cluster, options, facts) as peers:
        standby.wait()
        if source is not None:
            begin_run(source, settings, folder)
        kind = TRAINERS.get(settings.posttrain.method, GRPOTrainer)
        with kind.open(settings, folder, options.resume, options.init_from, peers, ModelReader()) as trainer:
            trainer.train()


def checked(options: Options, settings: RunConfig, manifest: Manifest | None) -> RunConfig:
    """The settings of a run with its reward model's checkpoint, after the checks of its method."""
    if settings.posttrain.method in PREFERENCES:
        check_preferences(settings)
    else:
        settings = with_reward_checkpoint(settings, options.folder, options.resume)
        check_settings(settings, jax.process_count())
    check_first_weights(manifest, options.init_from)
    return settings
