"""A run's settings: frozen dataclasses, read from TOML."""

from zerojax.run.config.sections import CheckpointSection as CheckpointSection
from zerojax.run.config.sections import ClusterSection as ClusterSection
from zerojax.run.config.sections import CriticSection as CriticSection
from zerojax.run.config.sections import DataSection as DataSection
from zerojax.run.config.sections import LogSection as LogSection
from zerojax.run.config.sections import MeshSection as MeshSection
from zerojax.run.config.sections import MixtureSource as MixtureSource
from zerojax.run.config.sections import OptimizerSection as OptimizerSection
from zerojax.run.config.sections import PosttrainSection as PosttrainSection
from zerojax.run.config.sections import RewardFunction as RewardFunction
from zerojax.run.config.sections import RunConfig as RunConfig
from zerojax.run.config.sections import TrainSection as TrainSection
from zerojax.run.config.tables import ConfigError as ConfigError
from zerojax.run.config.tables import config_from_dict as config_from_dict
from zerojax.run.config.tables import config_to_dict as config_to_dict
from zerojax.run.config.tables import dump_config as dump_config
from zerojax.run.config.tables import find_config as find_config
from zerojax.run.config.tables import known_configs as known_configs
from zerojax.run.config.tables import load_config as load_config
from zerojax.run.config.tables import saved_config as saved_config
from zerojax.run.config.tables import spelled_out as spelled_out
from zerojax.run.config.tables import with_settings as with_settings
