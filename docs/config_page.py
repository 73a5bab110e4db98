"""Writes the page of every config key from the sections' own docstrings and defaults, at each build."""

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from zerojax.run.config import RunConfig, config_to_dict
from zerojax.run.config.keys import Key, documentation, groups_of, keys_of, section_of

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
    lines, groups = [f"## [{name}]", "", summary, ""], groups_of(section)
    inherited = {key.name for group in groups for key in keys_of(group)}
    own = [key for key in keys_of(section) if key.name not in inherited]
    lines += _table(name, own, defaults) if own else []
    for group in groups:
        title = re.sub("Options$|(?<=[a-z])(?=[A-Z])", " ", group.__name__).strip().lower()
        text = [f"### [{name}]: {title}", "", documentation(group)[0], ""]
        lines += [*text, *_table(name, keys_of(group), defaults)]
    return "\n".join(lines)


def _table(section: str, keys: Sequence[Key], defaults: dict[str, Any]) -> list[str]:
    """The lines of a table of keys."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    absent = "the preset's" if section == "zero" else "none"
    for key in keys:
        shown = f"`{json.dumps(defaults[key.name])}`" if key.name in defaults else absent
        meaning = key.meaning.replace("|", "\\|")
        lines.append(f"| `{key.name}` | {shown} | {meaning} |")
    return [*lines, ""]
