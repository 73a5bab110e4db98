"""``zerojax from-deepspeed DS_CONFIG``: convert a DeepSpeed config."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from zerojax.cli.options import read_options
from zerojax.errors import ConfigurationError, errors_at, file_errors
from zerojax.interop.deepspeed import translate
from zerojax.validation.untrusted import MAX_SETTINGS_CHARS, parse_json


@dataclass(frozen=True)
class Options:
    """Convert a DeepSpeed config to a zerojax config; settings without a counterpart are listed on stderr.

    Attributes:
        config: The DeepSpeed config, JSON.
        out: The TOML file to write; stdout by default.
        nodes: Nodes of the job, if the batch size depends on them.
        gpus_per_node: Devices of each node, if the batch size depends on them.
        batch_size: Sequences per optimizer step, if the config does not say ("auto" or unset).
        trainer_args: The arguments of the Hugging Face Trainer, JSON; they replace "auto".
    """

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DS_CONFIG")]
    out: Path | None = None
    nodes: int = 0
    gpus_per_node: int = 0
    batch_size: int | None = None
    trainer_args: Path | None = None


def run(arguments: list[str]) -> None:
    """Read the config, translate it, and write the result."""
    options = read_options(Options, "from-deepspeed", arguments)
    if options.nodes < 0 or options.gpus_per_node < 0:
        raise ConfigurationError(
            f"--nodes {options.nodes} and --gpus-per-node {options.gpus_per_node} must not be negative"
        )
    data = read_json(options.config)
    trainer = None if options.trainer_args is None else read_json(options.trainer_args)
    with errors_at(options.config):
        translation = translate(
            data,
            nodes=options.nodes,
            local=options.gpus_per_node,
            batch_size=options.batch_size,
            trainer=trainer,
        )
    text = translation.toml(options.config.name)
    if options.out is None:
        print(text, end="")
    else:
        with file_errors(options.out, what="cannot write: "):
            options.out.write_text(text, encoding="utf-8")
    for line in [line for line in text.splitlines() if line.startswith("#")]:
        print(line.removeprefix("# ").removeprefix("#"), file=sys.stderr)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ConfigurationError: it cannot be read, is larger than a config can be, or repeats a key.
    """
    with file_errors(path, content="not valid JSON"):
        text = path.read_text(encoding="utf-8-sig")
        if len(text) > MAX_SETTINGS_CHARS:
            raise ConfigurationError(
                f"{path}: {len(text):,} characters, more than any DeepSpeed config has: name another file"
            )
        return parse_json(text)
