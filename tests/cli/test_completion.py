"""``zerojax completion``: what bash completes."""

import subprocess

import pytest

from zerojax.cli import COMMANDS, main


def completed(script: str, *words: str) -> set[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _zerojax; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_commands_configs_and_options_are_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "zerojax", "") == set(COMMANDS)
    assert completed(script, "zerojax", "tr") == {"train"}
    assert completed(script, "zerojax", "train", "gpt-t") == {"gpt-tiny"}
    assert completed(script, "zerojax", "train", "gpt-tiny", "--train.s") == {
        *("--train.steps", "--train.sequence-length", "--train.seed", "--train.spike-deviations"),
        "--train.spike-window",
    }
    assert completed(script, "zerojax", "train", "gpt-tiny", "--mesh.no-e") == {"--mesh.no-emulate"}
    assert completed(script, "zerojax", "train", "gpt-tiny", "--dry") == {"--dry-run"}
    assert completed(script, "zerojax", "checkpoints", "--re") == {"--rewind"}
    assert not completed(script, "zerojax", "checkpoints", "--ru")
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.endswith(script)


def test_the_shell_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == main(["completion", "fish"]) == 2
    assert "zerojax completion bash, or zsh" in capsys.readouterr().err
