"""Writes the page of every config key from the sections' own docstrings and defaults, at each build."""

import dataclasses
import typing
from typing import Any

import tomli_w
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from zerojax.run.config import RunConfig
from zerojax.run.config.schema import documentation

_INTRODUCTION = """# Every config key

A config is a TOML file with the tables below. Each key except `data.mixture` is also a command-line option,
such as `--train.steps 500`, which overrides the file. A missing key has the default shown. An unknown key is
an error that names the nearest known one.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    files.append(File.generated(config, "config.md", content=page()))
    return files


def page() -> str:
    """The whole page as Markdown."""
    types = typing.get_type_hints(RunConfig)
    sections = [_section(f.name, types[f.name]) for f in dataclasses.fields(RunConfig)]
    return "\n".join([_INTRODUCTION, *sections])


def _section(name: str, kind: type[Any]) -> str:
    summary, meanings = documentation(kind)
    lines = [f"## [{name}]", "", summary, "", "| key | default | meaning |", "|---|---|---|"]
    for key in dataclasses.fields(kind):
        meaning = meanings[key.name].replace("|", "\\|")
        absent = "the preset's" if name == "zero" else "none"
        lines.append(f"| `{key.name}` | {_value(key, absent)} | {meaning} |")
    return "\n".join([*lines, ""])


def _value(key: dataclasses.Field[Any], absent: str) -> str:
    """A default as TOML has it; `absent` where there is none."""
    default = key.default
    if default is dataclasses.MISSING and callable(key.default_factory):
        default = key.default_factory()
    if default is None:
        return absent
    return f"`{tomli_w.dumps({'key': default}).partition('=')[2].strip()}`"
