"""A setting is declared once: a field and its meaning."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import tyro

from zerojax.cli.options import option_table, read_options
from zerojax.cli.schema import config_schema
from zerojax.run.config.keys import documentation, keys_of


@dataclass(frozen=True)
class Other:
    """Has a preset.

    Attributes:
        base: what gives the others.
        rate: how much.
    """

    base: Literal["a", "b"] = field(default="a", metadata={"key": "preset"})
    rate: float = 1.0


@dataclass(frozen=True)
class Section:
    """What is set.

    More of it.

    Attributes:
        count: how many, ``n``
            or none.
        dtype: of numbers.
        kinds: some.
        other: of another section.
        left: over.
    """

    count: int | None = None
    dtype: Literal["x", "y"] | type[np.generic] | np.dtype = "x"
    kinds: tuple[tuple[str, int | None], ...] = ()
    other: Mapping[str, Any] = field(
        default_factory=dict, metadata={"overrides": ("other", Other, ("rate",))}
    )
    left: int = field(default=0, metadata={"key": None})


def test_the_keys_of_a_section_come_from_its_fields() -> None:
    count, dtype, kinds, rate = keys_of(Section)
    assert documentation(Section)[0] == "What is set.\n\nMore of it."
    assert (count.name, count.kind, count.optional, count.meaning) == (
        "count",
        int,
        True,
        "How many, `n` or none.",
    )
    assert (dtype.kind, dtype.optional) == (Literal["x", "y"], False)
    assert kinds.kind == tuple[tuple[str, int], ...]
    assert (rate.name, rate.field, rate.kind, rate.optional) == ("rate", "other", float, True)
    assert rate.meaning == "As `other.rate`."
    assert [(key.name, key.optional) for key in keys_of(Other)] == [("preset", True), ("rate", True)]


@dataclass(frozen=True)
class Options:
    """Options of a command."""

    given: Annotated[
        Mapping[str, Any],
        tyro.conf.arg(name="", constructor=option_table(Section, {"kinds": [["a", 1], ["b", 2]]})),
    ] = field(default_factory=dict)


def test_options_are_those_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    def read(*words: str) -> Mapping[str, Any]:
        return read_options(Options, "test", words).given

    assert read("--kinds", "a", "1", "--rate", "2") == {"kinds": (("a", 1),), "rate": 2.0}
    assert read("--count", "None") == {"count": None}
    with pytest.raises(SystemExit):
        read("--help")
    shown = capsys.readouterr().out
    assert "How many, `n` or none. (default: unset)" in shown
    assert "(default: a 1 b 2)" in shown
    assert "--left" not in shown


def test_every_key_of_a_config_has_a_meaning_in_the_schema() -> None:
    for section in config_schema()["properties"].values():
        assert section["description"]
        assert all(key.get("description") for key in section["properties"].values())
