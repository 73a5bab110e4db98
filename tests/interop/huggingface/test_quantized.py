"""Quantized exports: the bits of compressed-tensors, and the numbers of zerojax's codec."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_codec
from hf_models import FIXTURES, random_state, run_config, tensors

from zerojax.errors import ZeroError
from zerojax.interop.huggingface import (
    Direction,
    Format,
    ModelFolder,
    WeightFormat,
    check_quantizable,
    export_model,
    plan_export,
)
from zerojax.interop.huggingface.exporting import Target
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles, SafetensorWriter, TensorSpec
from zerojax.interop.huggingface.save import linear_tensors
from zerojax.interop.huggingface.weight_files import WeightFiles
from zerojax.run.build import abstract_model
from zerojax.run.run_dir import RunFolder
from zerojax.train.state import TrainState

FORMATS = pytest.mark.parametrize("fmt", ["int8", "int4", "int2", "fp8"])
SHAPE = 192, 128  # (outputs, inputs)


def weights() -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    values[:64, :64] = 0  # blocks without any weight, whichever way they lie
    return values


def unpacked(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """compressed-tensors' codes: element i of a row at its bit i x bits, less half of the range."""
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : columns * bits]
    codes = stream.reshape(len(words), columns, bits).astype(np.int64) @ (1 << np.arange(bits))
    return codes - (1 << (bits - 1))


@FORMATS
@pytest.mark.parametrize("along", ["input", "output"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_files_hold_what_the_codec_decodes(fmt: Format, along: Direction, dtype: str, tmp_path: Path):
    how, spec, values = WeightFormat(fmt, 64, along), TensorSpec(dtype, SHAPE), weights()
    writer = SafetensorWriter(tmp_path, how.specs("w", spec), 10**9)
    for name, part in how.encode("w", values, spec).items():
        writer.write(name, part)
    writer.close()
    rows = values if along == "input" else values.T
    payload = reference_codec.encode(rows, fmt, 64)
    expected = reference_codec.decode(payload, fmt, rows.shape[1], 64)
    expected = expected if along == "input" else expected.T
    # As compressed-tensors multiplies them, block by block.
    raw = SafetensorFiles(tmp_path)
    scale = raw.read("w_scale").astype(np.float32)
    scale = scale.repeat(SHAPE[0] // scale.shape[0], 0).repeat(SHAPE[1] // scale.shape[1], 1)
    if fmt == "fp8":
        codes = raw.read("w").astype(np.float32)
        assert raw.specs["w"].dtype == "F8_E4M3"
    else:
        codes = unpacked(raw.read("w_packed"), how.bits, SHAPE[1])
        np.testing.assert_array_equal(raw.read("w_shape"), SHAPE)
    np.testing.assert_array_equal(codes * scale, expected)
    assert raw.specs["w_scale"].dtype == dtype
    # And as zerojax reads them back, whole and in parts.
    files = WeightFiles(tmp_path, how)
    assert files.specs == {"w": TensorSpec("F32", SHAPE)}
    for ranges in (
        (slice(None), slice(None)),
        (slice(7, 130), slice(33, 70)),
        (slice(191, 192), slice(0, 1)),
    ):
        np.testing.assert_array_equal(files.read("w", *ranges), expected[ranges])


@FORMATS
def test_blocks_along_outputs_equal_the_blocks_that_training_sends(fmt: Format):
    # A kernel travels flat, (in, out) row-major: blocks of 64 outputs, for one input after the other.
    how, values = WeightFormat(fmt, 64, "output"), weights()
    flat = reference_codec.encode(values.T.reshape(1, -1), fmt, 64)
    sent = reference_codec.decode(flat, fmt, values.size, 64).reshape(values.T.shape).T
    parts = how.encode("w", values, TensorSpec("F32", SHAPE))
    scale = parts["w_scale"].repeat(64, 0)
    codes = parts["w"].astype(np.float32) if fmt == "fp8" else unpacked(parts["w_packed"], how.bits, SHAPE[1])
    np.testing.assert_array_equal(codes * scale, sent)


def test_numbers_that_are_not_finite_are_refused():
    values = weights()
    values[3, 4] = np.inf
    with pytest.raises(ZeroError, match="w holds numbers that are not finite"):
        WeightFormat("int4", 64).encode("w", values, TensorSpec("F32", SHAPE))


def plan(name: str, **shape: Any) -> tuple[TrainState, Target]:
    config = run_config(replace(ModelFolder.open(FIXTURES / name).model, **shape))
    state = abstract_model(config)
    return state, plan_export(state, config, RunFolder(Path("no-run")), None)


def test_layers_that_the_format_cannot_quantize_are_refused():
    state, target = plan("gpt2")
    with pytest.raises(ZeroError, match="GPT2LMHeadModel has Conv1D layers"):
        check_quantizable(state, target, WeightFormat("int8", 64))
    state, target = plan("llama2", d_model=128, ffn=192)
    check_quantizable(state, target, WeightFormat("int8", 64))
    check_quantizable(state, target, WeightFormat("int8", 64, "output"))
    with pytest.raises(ZeroError, match=r"mlp\.down_proj\.weight has 192 inputs.*blocks of 128"):
        check_quantizable(state, target, WeightFormat("int8", 128))
    with pytest.raises(ZeroError, match=r"k_proj\.weight has 64 outputs.*blocks of 128"):
        check_quantizable(state, target, WeightFormat("int8", 128, "output"))


def test_experts_are_refused():
    source = ModelFolder.open(FIXTURES / "families" / "mixtral")
    state = abstract_model(run_config(source.model))
    parts = source.family.parts(source.model)
    how = WeightFormat("int8", 8)
    refused = [tensor for tensor in linear_tensors(state.spec, parts) if "experts" in tensor.name]
    assert len(refused) == 2 * 3 * 3
    with pytest.raises(
        ZeroError, match=r"experts\.0\.w2\.weight is a matrix of one expert.*Leave --weights out"
    ):
        how.check(refused[0])


@pytest.mark.parametrize("along", ["input", "output"])
@pytest.mark.parametrize("name", ["glm4", "phi3-longrope"])
def test_layers_that_share_a_tensor_are_quantized_into_it(name: str, along: Direction, tmp_path: Path):
    model = ModelFolder.open(FIXTURES / "families" / name).model
    wide: dict[str, Any] = {
        "layers": 1, "d_model": 64, "ffn": 64, "heads": 2, "kv_heads": 1, "head_width": 64
    }  # fmt: skip
    if model.rope_scaling == "longrope":
        wide |= dict.fromkeys(("rope_short_factors", "rope_long_factors"), (1.5,) * 24)
    config, folder = run_config(replace(model, **wide)), RunFolder(tmp_path / "no-run")
    state = random_state(config)
    target, how = plan_export(state, config, folder, None), WeightFormat("int4", 64, along)
    check_quantizable(state, target, how)
    export_model(state, config, folder, target, tmp_path / "full")
    export_model(state, config, folder, target, tmp_path / "out", how)
    raw, full = SafetensorFiles(tmp_path / "out"), tensors(tmp_path / "full")
    files, fused = WeightFiles(tmp_path / "out", how), "model.layers.0.mlp.gate_up_proj.weight"
    np.testing.assert_array_equal(raw.read(f"{fused}_shape"), (128, 64))
    assert files.specs.keys() == full.keys()
    for tensor, values in full.items():
        expected = values
        if ".layers." in tensor and values.ndim == 2:
            rows = values if along == "input" else values.T
            rows = reference_codec.decode(reference_codec.encode(rows, "int4", 64), "int4", rows.shape[1], 64)
            expected = rows if along == "input" else rows.T
        whole = files.read(tensor, *(slice(None) for _ in values.shape))
        np.testing.assert_array_equal(whole, expected, tensor)
    larger = WeightFormat("int4", 128, "output")
    gate = next(one for one in linear_tensors(state.spec, target.parts) if one.name == fused)
    with pytest.raises(ZeroError, match=r"gate_up_proj\.weight has 64 outputs.*blocks of 128"):
        larger.check(gate)
