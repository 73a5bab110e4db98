"""fp8 with a scale for each block, as DeepSeek-V3 and Qwen3's FP8 models were published."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_models import FIXTURES, random_state, run_config, tensors
from jax.tree_util import tree_leaves
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e8m0fnu
from numpy.typing import DTypeLike
from safetensors.numpy import save_file

from zerojax import gather_model
from zerojax.errors import ZeroError
from zerojax.interop.huggingface import (
    ModelFolder,
    check_quantizable,
    export_model,
    import_model,
    plan_export,
)
from zerojax.interop.huggingface.fp8_blocks import FP8Blocks
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles, TensorSpec
from zerojax.interop.huggingface.weight_files import WeightFiles
from zerojax.models import GPT
from zerojax.run.run_dir import RunFolder

Tensors = dict[str, np.ndarray]
LINEAR = re.compile(r".*layers.*(proj|proj_with_mqa)\.weight")


def quantized(
    name: str, weight: np.ndarray, size: tuple[int, int], dtype: DTypeLike = np.float32
) -> tuple[Tensors, np.ndarray]:
    """The tensors that stand for a matrix, and the values that they stand for, in bf16."""
    codes, decoded = np.empty(weight.shape, float8_e4m3fn), np.empty(weight.shape, bfloat16)
    scales = np.empty([-(-n // step) for n, step in zip(weight.shape, size, strict=True)], dtype)
    for row, column in np.ndindex(*scales.shape):
        block = np.s_[row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]]
        values = weight[block].astype(np.float32)
        scales[row, column] = np.abs(values).max() / 448
        scale = scales[row, column].astype(np.float32)
        codes[block] = (values / scale).clip(-448, 448)
        decoded[block] = codes[block].astype(np.float32) * scale
    return {name: codes, f"{name}_scale_inv": scales}, decoded


def matrix(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, float8_e8m0fnu])
def test_a_part_is_that_of_the_whole(dtype: DTypeLike, tmp_path: Path):
    stored, values = quantized("w.weight", matrix(21, 30), (8, 4), dtype)
    norm = np.ones(3, bfloat16)
    save_file(stored | {"norm.weight": norm}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, FP8Blocks((8, 4)))
    shapes = {name: (spec.dtype, spec.shape) for name, spec in files.specs.items()}
    assert shapes == {"w.weight": ("BF16", (21, 30)), "norm.weight": ("BF16", (3,))}
    np.testing.assert_array_equal(files.read("norm.weight"), norm)
    for region in ((), np.s_[5:6, :], np.s_[9:21, 3:29:2], np.s_[20:, 28:]):
        part = files.read("w.weight", *region)
        assert part.dtype == bfloat16
        np.testing.assert_array_equal(part, values[region])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_all_of_a_tensor(shape: tuple[int, ...], tmp_path: Path):
    codes, scale = matrix(5, 6).astype(float8_e4m3fn), np.full(shape, 0.3, np.float32)
    stored = {"a.weight": codes, "a.weight_scale_inv": scale, "a.activation_scale": scale}
    save_file(stored, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, FP8Blocks(None))
    assert list(files.specs) == ["a.weight"]
    wanted = (codes.astype(np.float32) * np.float32(0.3)).astype(bfloat16)
    np.testing.assert_array_equal(files.read("a.weight", np.s_[1:3], np.s_[:]), wanted[1:3])


@pytest.mark.parametrize(
    ("block", "scales", "message"),
    [
        ((8, 8), None, "a.weight is in fp8, but the files lack its scales, a.weight_scale_inv"),
        ((8, 8), np.ones((2, 1), np.float32), r"a.weight .* do not fit: for blocks of \(8, 8\)"),
        ((8, 8), np.ones(2, np.float32), r"a.weight .* do not fit: for blocks of \(8, 8\)"),
        ((8, 8), np.ones((2, 2), np.uint8), r"a.weight .* do not fit: for blocks of \(8, 8\)"),
        (None, np.ones((2, 2), np.float32), "a.weight .* do not fit: one for all"),
    ],
)
def test_what_does_not_fit_is_refused(
    block: tuple[int, int] | None, scales: np.ndarray | None, message: str, tmp_path: Path
):
    stored = {"a.weight": np.zeros((9, 16), float8_e4m3fn)}
    stored |= {} if scales is None else {"a.weight_scale_inv": scales}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ZeroError, match=message):
        WeightFiles(tmp_path, FP8Blocks(block))


def by_powers_of_two(weight: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes and factors of an export."""
    codes = np.empty(weight.shape, float8_e4m3fn)
    scales = np.empty([-(-n // step) for n, step in zip(weight.shape, size, strict=True)], np.float32)
    for row, column in np.ndindex(*scales.shape):
        block = np.s_[row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]]
        values = weight[block].astype(np.float64)
        scales[row, column] = next(x for n in range(-100, 121) if np.abs(values).max() <= 448 * (x := 2.0**n))
        codes[block] = values / scales[row, column]
    return codes, scales


def test_an_export_has_the_smallest_powers_of_two():
    how, values = FP8Blocks((8, 16)), matrix(21, 40)
    values[:8, :16], values[8:16, :16], values[16:, :16] = 0, 1e-38, values[16:, :16] * 1e34
    values[8, 16:20] = 448, -448.1, 1.0625, 1.1875  # the last two are halfway between codes
    values[8, 32:34] = 448, 0.5**10  # halfway between zero and the smallest code
    found = how.encode("w", values, TensorSpec("F32", values.shape))
    codes, scales = by_powers_of_two(values, (8, 16))
    np.testing.assert_array_equal(found["w"].view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(found["w_scale_inv"], scales)
    values[2, 3] = np.inf
    with pytest.raises(ZeroError, match="w holds numbers that are not finite"):
        how.encode("w", values, TensorSpec("F32", values.shape))


@pytest.mark.parametrize("name", ["glm4", "qwen3"])  # several weights in a tensor; a tensor each
def test_an_export_is_quantized_by_blocks(name: str, tmp_path: Path):
    source, folder, how = (
        ModelFolder.open(FIXTURES / "families" / name),
        RunFolder(tmp_path / "no"),
        FP8Blocks((8, 8)),
    )
    config = run_config(source.model)
    state = random_state(config)
    target = plan_export(state, config, folder, None)
    check_quantizable(state, target, how)
    for out, format_ in (("full", None), ("fp8", how)):
        export_model(state, config, folder, target, tmp_path / out, format_)
    found, count = SafetensorFiles(tmp_path / "fp8"), 0
    for key, values in tensors(tmp_path / "full").items():
        if found.specs[key].dtype == "F8_E4M3":
            codes, scales = by_powers_of_two(values, (8, 8))
            np.testing.assert_array_equal(found.read(key).view(np.uint8), codes.view(np.uint8))
            np.testing.assert_array_equal(found.read(f"{key}_scale_inv"), scales)
            count += 1
        else:
            np.testing.assert_array_equal(found.read(key), values)
    assert count == len([key for key in found.specs if LINEAR.fullmatch(key)]) > 0
    settings = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert settings["quantization_config"]["weight_block_size"] == [8, 8]
    if name == "glm4":
        with pytest.raises(ZeroError, match="shares blocks of 7 outputs"):
            check_quantizable(state, target, FP8Blocks((7, 8)))


def write(folder: Path, name: str, values: Tensors, quantization: dict[str, object]) -> Path:
    """A committed model with other tensors."""
    folder.mkdir()
    settings = json.loads((FIXTURES / "families" / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | quantization))
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("name", "count"), [("qwen3", 14), ("deepseek-v3", 72)])
def test_logits_equal_the_decoded_models(name: str, count: int, tmp_path: Path):
    stored, decoded = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for key, values in tensors(FIXTURES / "families" / name).items():
        one = quantized(key, values, (8, 8)) if LINEAR.fullmatch(key) else ({key: values}, values)
        stored |= one[0]
        decoded[key] = one[1]
    assert sum(key.endswith("_scale_inv") for key in stored) == count
    if name == "deepseek-v3":  # of a layer that predicts a further token, which is carried
        stored |= quantized("model.layers.3.eh_proj.weight", matrix(16, 32), (8, 8))[0]
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}
    quantization |= {"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    sources = (
        write(tmp_path / "fp8", name, stored, {"quantization_config": quantization}),
        write(tmp_path / "bf16", name, decoded, {}),
    )
    states = []
    for source in sources:
        opened, run = ModelFolder.open(source), RunFolder(tmp_path / f"run-{source.name}")
        config = run_config(opened.model)
        states.append(import_model(opened, config, run))
        target = plan_export(states[-1], config, run, None)
        predicts = int(source is sources[0])
        assert target.values == json.loads((sources[1] / "config.json").read_text()) | (
            {"num_nextn_predict_layers": predicts} if name == "deepseek-v3" else {}
        )
        if target.carried is not None:  # decoded, as the export's config has no quantization
            assert list(target.carried.specs) == ["model.layers.3.eh_proj.weight"]
            assert target.carried.read("model.layers.3.eh_proj.weight").dtype == bfloat16
        assert {key: spec.shape for key, spec in target.specs.items()} == {
            key: values.shape for key, values in decoded.items()
        }
        assert all(target.specs[key].dtype == "BF16" for key in decoded if LINEAR.fullmatch(key))
    logits = nnx.jit(GPT.__call__)
    ours, theirs = (logits(gather_model(state), jnp.arange(16)[None]) for state in states)
    np.testing.assert_array_equal(ours, theirs)
    for x, y in zip(*(tree_leaves((s.params, s.model_state)) for s in states), strict=True):
        np.testing.assert_array_equal(x, y)
