"""The folder of a run, by its name or its config."""

from pathlib import Path

import pytest

from zerojax.cli.run_options import folder_of


def test_a_config_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-3.2.toml").touch()
    for config in ("llama-3.2", "llama-3.2.toml", str(tmp_path / "llama-3.2.toml")):
        assert folder_of(config, None).path == Path("runs/llama-3.2")
    assert folder_of("llama-3.2", tmp_path / "mine").path == tmp_path / "mine"
