"""The file of results of convergence.py, to which each run is added when it is done."""

import json
from pathlib import Path
from typing import Any

from zerojax import ZeroError
from zerojax.models import parameter_count
from zerojax.run.build import is_first
from zerojax.run.config import RunConfig, config_from_dict, config_to_dict
from zerojax.run.data.dataset import Dataset
from zerojax.run.run_dir import write_whole


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that runs of one file have in common, as they are in JSON."""
    settings = config_to_dict(config)
    own = {"train": ("seed",), "data": ("source",)}
    unrelated = ("cluster", "checkpoint", "log")
    shared = {
        section: {key: value for key, value in values.items() if key not in own.get(section, ())}
        for section, values in settings.items()
        if section not in unrelated
    }
    return json.loads(json.dumps(shared))


class RunsFile:
    """A JSON file: settings and data, which all runs share, and the runs."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        """Read the file, if there is one.

        Raises:
            ZeroError: its runs had other settings.
        """
        self._path = path
        settings = shared_settings(config)
        self.content: dict[str, Any] = {"settings": settings, "parameters": parameter_count(config.model)}
        self.content["runs"] = []
        if path.exists():
            self.content = json.loads(path.read_text())
            # Keys that are newer than the file have their defaults, as they had in its runs.
            self.content["settings"] = shared_settings(config_from_dict(self.content["settings"], str(path)))
            self._check("settings", settings)

    @property
    def done(self) -> set[tuple[str, int]]:
        """Variant and seed of the runs that are there."""
        return {(run["variant"], run["seed"]) for run in self.content["runs"]}

    def set_data(self, text: dict[str, Any], data: Dataset) -> None:
        """Say what runs learn from.

        Raises:
            ZeroError: the runs that are there learned from something else.
        """
        self.data = data
        part = data.parts[0]
        tokens = {"train": part.train.header.tokens, "validation": part.validation.header.tokens}
        tokens |= {"crc32": part.train.header.crc32, "bytes_per_token": data.bytes_per_token}
        described = {"text": text, "tokens": tokens}
        if "data" in self.content:
            self._check("data", described)
        self.content["data"] = described

    def check_base(self, base: Any, seeds: tuple[int, ...]) -> None:
        """Refuse to pair runs of a seed that begin with different weights.

        Args:
            base: what the runs to come begin with, as values of JSON; None for weights drawn at random.
            seeds: of them.

        Raises:
            ZeroError: some of these seeds have runs that began otherwise.
        """
        if other := {run["seed"] for run in self.content["runs"] if run.get("base") != base} & {*seeds}:
            raise ZeroError(
                f"{self._path} holds runs of seed {min(other)} that began with other weights: "
                "name other --seeds"
            )

    def add(self, record: dict[str, Any]) -> None:
        """Append a run to the file, which is whole at any time."""
        self.content["runs"].append(record)
        if not is_first():
            return
        shared = {key: value for key, value in self.content.items() if key != "runs"}
        runs = ",\n".join(json.dumps(run) for run in self.content["runs"])  # a line each
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, f'{json.dumps(shared, indent=1)[:-2]},\n "runs": [\n{runs}\n]}}\n')
        print(
            f"{record['variant']:32} seed {record['seed']}  loss {record['loss']:.4f}  "
            f"{record['tokens_per_second'] / 1e3:.0f}k tokens/s  {record['seconds']:.0f} s",
            flush=True,
        )

    def _check(self, what: str, now: Any) -> None:
        if self.content[what] != now:
            raise ZeroError(
                f"{self._path} holds runs of other {what} ({difference(self.content[what], now)}): "
                "name another --json"
            )


def difference(before: Any, now: Any, path: str = "") -> str:
    """Where two trees of settings differ, and how."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return f"{path[1:]} was {before!r} and is {now!r}"
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    return ", ".join(difference(before.get(key), now.get(key), f"{path}.{key}") for key in keys)
