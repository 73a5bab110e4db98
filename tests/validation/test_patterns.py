"""Shell patterns that choose parameters."""

from typing import Any

import pytest

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.validation.patterns import matches, refuse_idle, why_not
from zerojax.zero_config.options import MATMUL_WEIGHTS


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        (("*kernel",), None),
        (("*Kernel", "!*norm*"), None),
        (("*kernel", "!*attn*"), "excluded by '!*attn*'"),
        (("!*attn*", "*kernel"), None),  # the last that matches decides
        (("*bias",), "no pattern of frozen matches"),
        ((), "no pattern of frozen matches"),
    ],
)
def test_the_last_pattern_decides(patterns: tuple[str, ...], reason: str | None) -> None:
    assert why_not(patterns, "blocks/attn/kernel", "frozen") == reason


def test_defaults_leave_out_what_is_in_no_block() -> None:
    paths = ("blocks/up/kernel", "embed/kernel", "lm_head/kernel", "norm/scale", "router/kernel")
    assert [path for path in paths if why_not(MATMUL_WEIGHTS, path, "fp8") is None] == ["blocks/up/kernel"]
    assert matches("!*KERNEL", "up/kernel")


def test_patterns_that_match_nothing_are_refused_unless_they_are_defaults() -> None:
    refuse_idle("ZeroConfig.fp8", ("*kernel", "!*embed*"), ["up/kernel"], default=MATMUL_WEIGHTS)
    with pytest.raises(
        ConfigurationError,
        match=r"ZeroConfig.fp8: '\*upp\*' matches no parameter. Correct or remove it; paths are",
    ):
        refuse_idle("ZeroConfig.fp8", ("*upp*", "*kernel"), ["up/kernel"], default=MATMUL_WEIGHTS)


def test_one_string_is_not_read_letter_by_letter() -> None:
    one: Any = "*/mlp/*"
    for refused, setting in (
        (lambda: zerojax.ZeroConfig(frozen=one), "ZeroConfig.frozen"),
        (lambda: zerojax.ZeroConfig(matmul_dtype="fp8", fp8=one), "ZeroConfig.fp8"),
        (lambda: zerojax.LoRA(targets=one), "LoRA.targets"),
    ):
        with pytest.raises(ConfigurationError, match=rf"{setting}='\*/mlp/\*' is one string: give a tuple"):
            refused()


@pytest.mark.parametrize("given", ["*embed*", ("*embed*", "int8"), (("*embed*",),)])
def test_precise_takes_pairs(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ZeroConfig.precise=.*: give pairs"):
        zerojax.ZeroConfig(precise=given)
