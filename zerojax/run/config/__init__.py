"""A run's settings: frozen dataclasses, read from TOML."""

from zerojax.run.config.data import DataSection, MixtureSource
from zerojax.run.config.posttrain import CriticSection, PosttrainSection, RewardFunction
from zerojax.run.config.run_config import RunConfig
from zerojax.run.config.sharding import ClusterSection, MeshSection
from zerojax.run.config.tables import (
    ConfigError,
    config_from_dict,
    config_to_dict,
    saved_config,
    spelled_out,
    with_settings,
)
from zerojax.run.config.toml import dump_config, find_config, known_configs, load_config
from zerojax.run.config.training import CheckpointSection, LogSection, OptimizerSection, TrainSection

__all__ = [
    "CheckpointSection",
    "ClusterSection",
    "ConfigError",
    "CriticSection",
    "DataSection",
    "LogSection",
    "MeshSection",
    "MixtureSource",
    "OptimizerSection",
    "PosttrainSection",
    "RewardFunction",
    "RunConfig",
    "TrainSection",
    "config_from_dict",
    "config_to_dict",
    "dump_config",
    "find_config",
    "known_configs",
    "load_config",
    "saved_config",
    "spelled_out",
    "with_settings",
]
