"""Writes the page of every config key from the sections' own docstrings and defaults, at each build."""

import json
from typing import Any, cast

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from zerojax.run.config import RunConfig, config_to_dict
from zerojax.run.config.keys import documentation, keys_of, section_of

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
    defaults = config_to_dict(RunConfig())
    sections = [
        _section(top.name, cast(type[Any], section_of(top.kind)), defaults[top.name])
        for top in keys_of(RunConfig)
    ]
    return "\n".join([_INTRODUCTION, *sections])


def _section(name: str, section: type[Any], defaults: dict[str, Any]) -> str:
    summary, _ = documentation(section)
    lines = [f"## [{name}]", "", summary, "", "| key | default | meaning |", "|---|---|---|"]
    absent = "the preset's" if name == "zero" else "none"
    for key in keys_of(section):
        shown = f"`{json.dumps(defaults[key.name])}`" if key.name in defaults else absent
        meaning = key.meaning.replace("|", "\\|")
        lines.append(f"| `{key.name}` | {shown} | {meaning} |")
    return "\n".join([*lines, ""])
