"""Experts in MXFP4, as gpt-oss was published, read into the weights of a run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hf_models import FIXTURES, run_config
from ml_dtypes import bfloat16, float4_e2m1fn
from safetensors.numpy import save_file

from zerojax.errors import ZeroError
from zerojax.interop.huggingface import ModelFolder, import_model, plan_export
from zerojax.interop.huggingface.families import describe_model
from zerojax.interop.huggingface.save import tensor_specs
from zerojax.interop.huggingface.weight_files import MXFP4, WeightFiles
from zerojax.run.build import abstract_model
from zerojax.run.run_dir import RunFolder
from zerojax.sharding.param_tree import from_tree
from zerojax.train.gathering import gather_params


def coded(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors that stand for one of a shape, and its values by the dtype of ml_dtypes."""
    experts, inputs, outputs = shape
    codes = rng.integers(0, 16, (experts, outputs, inputs), dtype=np.uint8)
    scales = rng.integers(120, 131, (experts, outputs, inputs // 32), dtype=np.uint8)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(experts, outputs, inputs // 32, 16)
    values = codes.view(float4_e2m1fn).astype(np.float32) * 2.0 ** (scales.repeat(32, 2).astype(int) - 127)
    return {"_blocks": blocks, "_scales": scales}, values.swapaxes(1, 2)


def test_a_part_is_that_of_the_whole(tmp_path: Path):
    tensors, values = coded(np.random.default_rng(0), (2, 96, 6))
    save_file({f"w{kind}": x for kind, x in tensors.items()}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, MXFP4())
    assert {name: spec.shape for name, spec in files.specs.items()} == {"w": (2, 96, 6)}
    np.testing.assert_array_equal(files.read("w"), values)
    for region in (np.s_[1:2, 33:70, 1::2], np.s_[:, :5, :3], np.s_[0:1, 64:96, 0::2]):
        np.testing.assert_array_equal(files.read("w", *region), values[region])


@pytest.mark.parametrize(
    "wrong", [{"_scales": (2, 6, 2)}, {"_blocks": (2, 6, 48)}, {"_blocks": (2, 6, 3, 8)}]
)
def test_what_does_not_fit_is_refused(wrong: dict[str, tuple[int, ...]], tmp_path: Path):
    tensors, _ = coded(np.random.default_rng(0), (2, 96, 6))
    tensors |= {kind: np.zeros(shape, np.uint8) for kind, shape in wrong.items()}
    save_file({f"w{kind}": x for kind, x in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ZeroError, match=r"w_blocks .* are not MXFP4"):
        WeightFiles(tmp_path, MXFP4())


def test_an_import_is_exported_in_full_precision(tmp_path: Path):
    model = replace(ModelFolder.open(FIXTURES / "families" / "gpt-oss").model, d_model=32, ffn=32)
    config = run_config(model)
    family, values = describe_model(model)
    specs = tensor_specs(abstract_model(config).spec, family.parts(model), {}, "BF16")
    rng, tensors = np.random.default_rng(0), {}
    wanted: dict[str, list[np.ndarray]] = {}
    for name, spec in specs.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            parts, decoded = coded(rng, spec.shape)
            wanted.setdefault(name.rpartition(".")[2], []).append(decoded)
            tensors |= {name + kind: x for kind, x in parts.items()}
        else:
            tensors[name] = rng.standard_normal(spec.shape).astype(bfloat16)
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    values |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (source / "config.json").write_text(json.dumps(values))
    folder = RunFolder(tmp_path / "run")
    state = import_model(ModelFolder.open(source), config, folder)
    found = {path[-1]: x for path, x in from_tree(gather_params(state)).items() if path[-2] == "mlp"}
    both = np.stack(wanted["gate_up_proj"])
    np.testing.assert_array_equal(found["gate"], both[..., ::2])
    np.testing.assert_array_equal(found["up"], both[..., 1::2])
    np.testing.assert_array_equal(found["down"], np.stack(wanted["down_proj"]))
    target = plan_export(state, config, folder, None)
    assert "quantization_config" not in target.values
    assert target.specs == specs
