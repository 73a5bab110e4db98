"""`zerojax from-deepspeed ds_config.json`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from zerojax.cli.options import read_options
from zerojax.errors import ZeroError
from zerojax.interop.deepspeed import translate
from zerojax.validation.untrusted import LONGEST_SETTINGS, parse_json


@dataclass(frozen=True)
class Options:
    """Turn a DeepSpeed config into a zerojax config; what has no counterpart is listed on stderr.

    Attributes:
        config: The DeepSpeed config, JSON.
        out: The TOML file to write; by default it goes to stdout.
        nodes: Nodes that it ran on, where the batch size depends on it.
        gpus_per_node: Devices of a node, likewise.
        batch_size: Sequences per optimizer step, where the config leaves them to the script ("auto", or
            nothing).
    """

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DS_CONFIG")]
    out: Path | None = None
    nodes: int = 0
    gpus_per_node: int = 0
    batch_size: int | None = None


def run(arguments: list[str]) -> None:
    """Read, translate, write."""
    options = read_options(Options, "from-deepspeed", arguments)
    if options.nodes < 0 or options.gpus_per_node < 0:
        raise ZeroError("--nodes and --gpus-per-node must not be negative")
    try:
        translation = translate(
            read_json(options.config),
            nodes=options.nodes,
            local=options.gpus_per_node,
            batch_size=options.batch_size,
        )
    except ZeroError as error:
        raise ZeroError(f"{options.config}: {error}") from error
    text = translation.toml(options.config.name)
    if options.out is None:
        print(text, end="")
    else:
        try:
            options.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ZeroError(f"{options.out}: cannot write: {error.strerror}") from error
    for line in [line for line in text.splitlines() if line.startswith("#")]:
        print(line.removeprefix("# ").removeprefix("#"), file=sys.stderr)


def read_json(path: Path) -> Any:
    """A JSON file, of which no key may be given twice.

    Raises:
        ZeroError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > LONGEST_SETTINGS:
            raise ZeroError(f"{len(text):,} characters: no DeepSpeed config has so many")
        return parse_json(text)
    except OSError as error:
        raise ZeroError(f"cannot be read: {error.strerror}") from error
    except ZeroError:
        raise
    except ValueError as error:
        raise ZeroError(f"not valid JSON: {error}") from error
