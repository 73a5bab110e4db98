"""Other runs that the settings name: a reward model, or the first weights of a critic."""

from dataclasses import replace
from pathlib import Path

from zerojax.errors import ConfigurationError
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.run import checkpoints
from zerojax.run.config import RunConfig, config_from_dict
from zerojax.run.data import Tokenizer, open_tokenizer, same_tokenizer
from zerojax.run.run_dir import Resume, RunFolder


def saved_settings(path: str, key: str) -> RunConfig:
    """The settings of the run whose newest checkpoint, or a certain one, is at a path.

    Args:
        path: of a run, or of one of its checkpoints.
        key: that names it, for errors.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        return config_from_dict(checkpoints.read_manifest(checkpoints.find(Path(path))).record.config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{key}: {error}") from error


def with_reward_checkpoint(config: RunConfig, folder: RunFolder, resume: Resume) -> RunConfig:
    """The settings with a checkpoint in place of the run that ``posttrain.reward_model`` names.

    A run keeps the reward that it began with, also if its reward model is trained on.

    Raises:
        ConfigurationError: there is no such checkpoint, or no longer.
    """
    named = Path(config.posttrain.reward_model)
    if not config.posttrain.reward_model:
        return config

    def choose() -> str:
        if not (named / "checkpoints").is_dir():
            return str(named)
        begun = resume != "never" and folder.config.is_file()
        before = Path(folder.read_config().posttrain.reward_model if begun else "")
        if before.parent != named / "checkpoints":
            return str(checkpoints.find(named))
        if not before.is_dir():
            raise ConfigurationError(
                f"posttrain.reward_model: {before}, with which this run began, is gone. To go on with "
                f"another, name it: {checkpoints.find(named)}, for example"
            )
        return str(before)

    chosen = run_on_process_zero(choose)
    return replace(config, posttrain=replace(config.posttrain, reward_model=chosen))


def check_reward_model(config: RunConfig) -> None:
    """Refuse a ``posttrain.reward_model`` that is none for the policy.

    Raises:
        ConfigurationError: it is a language model, or its context is too short.
    """
    path = config.posttrain.reward_model
    model = saved_settings(path, "posttrain.reward_model").model
    if model.outputs != 1:
        raise ConfigurationError(
            f'posttrain.reward_model {path} is not a reward model: train one by posttrain.method = "reward", '
            "with model.outputs = 1"
        )
    longest = min(config.train.sequence_length + 1, config.model.max_seq_len)
    if model.max_seq_len < longest:
        raise ConfigurationError(
            f"posttrain.reward_model {path} reads at most {model.max_seq_len} tokens, and prompts and "
            f"completions have {longest}: lower train.sequence_length to {model.max_seq_len - 1}"
        )


def check_tokenizer(path: str, key: str, tokenizer: Tokenizer) -> None:
    """Refuse a run, named as for ``saved_settings``, whose tokens mean something else than the policy's.

    Raises:
        ConfigurationError: its tokenizer is another, or gone.
    """
    folder = RunFolder(checkpoints.find(Path(path)).parent.parent)
    theirs = open_tokenizer(saved_settings(path, key).data, folder.data)
    if not same_tokenizer(theirs, tokenizer):
        raise ConfigurationError(
            f"{key} {path} has another tokenizer than this run (data.tokenizer): both must have the same"
        )
