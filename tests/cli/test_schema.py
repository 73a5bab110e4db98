"""The JSON schema agrees with what ``load_config`` reads."""

import json
import tomllib

import pytest
from environment import ROOT

from zerojax.cli import main
from zerojax.run.config import RunConfig, config_to_dict

pytest.importorskip("jsonschema", reason="the extra zerojax[dev] is not installed")
import jsonschema


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lines.append)
        assert main(["schema"]) == 0
    schema = json.loads("".join(lines))
    jsonschema.Draft7Validator.check_schema(schema)
    steps = schema["properties"]["train"]["properties"]["steps"]
    assert (steps["type"], steps["default"]) == ("integer", 1000)
    assert steps["description"]
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_configs_are_valid(validator: jsonschema.Draft7Validator, path) -> None:
    assert not list(validator.iter_errors(tomllib.loads(path.read_text())))


def test_the_defaults_are_valid(validator: jsonschema.Draft7Validator) -> None:
    assert not list(validator.iter_errors(config_to_dict(RunConfig())))


@pytest.mark.parametrize(
    "config",
    [
        {"train": {"steps": "many"}},
        {"train": {"step": 1}},
        {"trane": {}},
        {"zero": {"weights": "int7"}},
        {"zero": {"grads": ["int4"]}},
        {"mesh": {"emulate": 1}},
        {"data": {"mixture": [{"source": 1}]}},
    ],
    ids=str,
)
def test_mistakes_are_flagged(validator: jsonschema.Draft7Validator, config) -> None:
    assert list(validator.iter_errors(config))
