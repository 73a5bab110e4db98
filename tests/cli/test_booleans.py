"""``zerojax.cli.booleans``: every boolean option may be spelled in the same ways."""

import pytest

from zerojax.cli.booleans import negated
from zerojax.cli.options import read_options
from zerojax.cli.train import Options


@pytest.mark.parametrize("option", ["--mesh.emulate", "--checkpoint.verify", "--zero.hpz"])
@pytest.mark.parametrize("before", [True, False])
def test_a_boolean_is_spelled_in_four_ways(option: str, before: bool) -> None:
    section, key = option.removeprefix("--").split(".")

    def value(*words: str) -> object:
        line = [*words, "gpt-tiny"] if before else ["gpt-tiny", *words]
        read = read_options(Options, "train", line, helps=False)
        assert read.config == "gpt-tiny"
        return read.settings[section][key]

    assert value(option) is value(option, "true") is value(f"{option}=True") is True
    assert value(negated(option)) is value(option, "false") is value(f"{option}=false") is False


@pytest.mark.parametrize(
    "words", [["--mesh.emulate", "maybe"], ["--mesh.emulate="], ["--mesh.no-emulate", "false"]]
)
def test_another_word_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(Options, "train", ["gpt-tiny", *words], helps=False)
    assert "Unrecognized options" in capsys.readouterr().err


def test_a_boolean_may_be_unset() -> None:
    read = read_options(Options, "train", ["gpt-tiny", "--zero.hpz", "None"], helps=False)
    assert read.settings["zero"]["hpz"] is None
