"""Other runs that the settings name: a reward model, or a critic's first weights."""

from dataclasses import replace
from pathlib import Path

from zerojax.errors import ConfigurationError, errors_at
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.run import checkpoints
from zerojax.run.config import RunConfig, saved_config
from zerojax.run.data.dataset import open_tokenizer
from zerojax.run.data.tokenizer import Tokenizer, same_tokenizer
from zerojax.run.run_dir import Resume, RunFolder


def saved_settings(path: str, key: str) -> RunConfig:
    """The settings of a saved run, given its folder or one of its checkpoints.

    Raises:
        ConfigurationError: there is none; the message names ``key``.
    """
    with errors_at(key):
        return saved_config(checkpoints.read_manifest(checkpoints.find(Path(path))).record.config)


def with_reward_checkpoint(config: RunConfig, folder: RunFolder, resume: Resume) -> RunConfig:
    """The settings with ``posttrain.reward_model`` fixed to one of that run's checkpoints.

    A run keeps its first reward even if training of the reward model continues.
    """
    named = Path(config.posttrain.reward_model)
    if not config.posttrain.reward_model:
        return config

    def choose() -> str:
        resumes = resume != "never" and folder.config.is_file()
        before = Path(folder.read_config().posttrain.reward_model if resumes else "")
        there = before.resolve()  # the setting may spell the same path differently
        if resumes and there == named.resolve():
            return str(before)
        if not (named / "checkpoints").is_dir():
            return str(named)
        if there.parent != (named / "checkpoints").resolve():
            return str(checkpoints.find(named))
        if not before.is_dir():
            raise ConfigurationError(
                f"posttrain.reward_model: this run started with {before}, which is gone. To continue with "
                f"another checkpoint, name it: {checkpoints.find(named)}, for example"
            )
        return str(before)

    chosen = run_on_process_zero(choose)
    return replace(config, posttrain=replace(config.posttrain, reward_model=chosen))


def check_reward_model(config: RunConfig) -> None:
    """Refuse a ``posttrain.reward_model`` that cannot score the policy's completions."""
    path = config.posttrain.reward_model
    model = saved_settings(path, "posttrain.reward_model").model
    if model.outputs != 1:
        raise ConfigurationError(
            f"posttrain.reward_model {path} is not a reward model, because its model.outputs is not 1. Train "
            'one with posttrain.method = "reward" and model.outputs = 1'
        )
    sharing, longest = config.zero.sequence_parallel, config.train.sequence_length + 1
    # Devices that share rows pad them to a multiple of their number.
    read = -(-min(longest, model.max_seq_len) // sharing) * sharing
    longest = max(read, min(longest, config.model.max_seq_len))
    if model.max_seq_len < longest:
        raise ConfigurationError(
            f"posttrain.reward_model {path} reads at most {model.max_seq_len} tokens, but prompts with "
            f"completions have {longest}: lower train.sequence_length to "
            f"{model.max_seq_len // sharing * sharing - 1} or less"
        )


def check_tokenizer(path: str, key: str, tokenizer: Tokenizer) -> None:
    """Refuse a saved run, named as for ``saved_settings``, whose tokenizer is not the policy's."""
    folder = RunFolder(checkpoints.find(Path(path)).parent.parent)
    theirs = open_tokenizer(saved_settings(path, key).data, folder.data)
    if not same_tokenizer(theirs, tokenizer):
        raise ConfigurationError(
            f"{key} {path} has another tokenizer than this run: name a run with the tokenizer of "
            "data.tokenizer"
        )
