"""A run's settings: frozen dataclasses, read from TOML."""

from zerojax.run.config.posttrain import PosttrainSection
from zerojax.run.config.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    LogSection,
    LoRASection,
    MeshSection,
    MixtureSource,
    OptimizerSection,
    RunConfig,
    TrainSection,
    ZeroSection,
)
from zerojax.run.config.toml import (
    ConfigError,
    config_from_dict,
    config_to_dict,
    dump_config,
    find_config,
    load_config,
)

__all__ = [
    "CheckpointSection",
    "ClusterSection",
    "ConfigError",
    "DataSection",
    "LoRASection",
    "LogSection",
    "MeshSection",
    "MixtureSource",
    "OptimizerSection",
    "PosttrainSection",
    "RunConfig",
    "TrainSection",
    "ZeroSection",
    "config_from_dict",
    "config_to_dict",
    "dump_config",
    "find_config",
    "load_config",
]
