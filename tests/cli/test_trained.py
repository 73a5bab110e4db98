"""What commands do with the settings of a trained run."""

from dataclasses import replace
from typing import Any

import pytest
from hf_models import FIXTURES, run_config

from zerojax.cli.trained import as_stored
from zerojax.interop.huggingface import ModelFolder
from zerojax.run.build import RunSetup
from zerojax.run.config import RunConfig, with_settings
from zerojax.sharding.layout import ParamLayout
from zerojax.zero_config import ZeroConfig


def layouts(config: RunConfig) -> tuple[ParamLayout, ...]:
    return RunSetup(config, trains=False).abstract_state.spec.frozen


@pytest.mark.parametrize(
    "zero",
    [
        {"preset": "delta", "frozen_weights": "int4"},
        {"frozen_weights": "int4", "block_size": 64, "precise": (("*qkv*", "bf16"),)},
        {"frozen_weights": "fp8", "matmul_dtype": "fp8", "fp8": ("*qkv*",)},
        {"compute_dtype": "float32", "frozen": ("*", "!*norm*")},
    ],
)
def test_frozen_weights_keep_their_format_without_wire_formats(zero: dict[str, Any]):
    config = run_config(ModelFolder.open(FIXTURES / "gpt2").model)
    config = with_settings(replace(config, zero=ZeroConfig()), {"zero": zero, "lora": {"rank": 2}})
    stored = as_stored(config)
    assert stored.zero.base == "zero3"
    assert layouts(stored) == layouts(config)
