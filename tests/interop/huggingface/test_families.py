"""Tiny models by transformers, one of each family and feature: their logits, tensors and config keys.

``scripts/acceptance/hf_fixtures.py`` wrote them; no test needs transformers.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from hf_models import FIXTURES, run_config, tensors

from zerojax import TrainState, gather_model
from zerojax.interop.huggingface.config_keys import HARMLESS
from zerojax.interop.huggingface.families import Family, describe_model, read_model
from zerojax.interop.huggingface.load import check_tensors, load_params, load_state
from zerojax.interop.huggingface.mapping import TensorParts
from zerojax.interop.huggingface.safetensors_files import SafetensorWriter
from zerojax.interop.huggingface.save import cast, each_tensor, tensor_specs
from zerojax.interop.huggingface.weight_files import WeightFiles
from zerojax.models import GPT, GPTConfig
from zerojax.run.build import abstract_model
from zerojax.run.config import MeshSection
from zerojax.train.state import begin_with

FOLDER = FIXTURES / "families"
NAMES = sorted(path.name for path in FOLDER.iterdir())
COMPUTE_THE_SAME = {
    "phi3": "mistral", "seed-oss": "qwen2", "cwm": "smollm3", "helium": "glm",
    "falcon-sequential": "starcoder2", "glm4-moe-lite": "deepseek_v3",
}  # fmt: skip
"""Models that are described as another family's, whose models compute the same."""

UNREAD = (
    *("eod_token_id", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "time_step_limit"),
    *(
        "expand",
        "chunk_size",
        "time_step_max",
        "time_step_floor",
        "n_shared_experts",
        "mtp_layers_block_type",
    ),
    *("mamba_proj_bias", "mamba_ssm_cache_dtype", "use_mamba_kernels", "moe_shared_expert_overlap"),
    *("hidden_dropout", "rescale_prenorm_residual", "residual_in_fp32"),
    "vocab_size_per_layer_input",
    *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
)
"""Keys that do not change the logits, or have only one supported value."""


@dataclass(frozen=True)
class Loaded:
    """A committed model, loaded into shards on two devices."""

    folder: Path
    family: Family
    model: GPTConfig
    parts: TensorParts
    state: TrainState


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    folder = FOLDER / request.param
    found = read_model(json.loads((folder / "config.json").read_text()), "config.json")
    family, model, notes = found
    assert not notes
    config = replace(run_config(model, "zero3"), mesh=MeshSection(nodes=1, local=2))
    state, files = abstract_model(config), WeightFiles(folder, None)
    parts = family.parts(model, files.specs)
    check_tensors(state.spec, files, found, parts)
    state = load_state(begin_with(state, load_params(state.spec, files, parts), 0), files, parts)
    return Loaded(folder, family, model, parts, state)


def test_logits_equal_transformers(loaded: Loaded):
    expected = dict(np.load(loaded.folder / "expected.npz"))
    model = gather_model(loaded.state)
    logits = nnx.jit(GPT.__call__)(model, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=1e-5)


def test_tensors_come_back_bit_for_bit(loaded: Loaded, tmp_path: Path):
    every = tensors(loaded.folder)
    before = {name: x for name, x in every.items() if not loaded.family.carries(name, loaded.model)}
    scalars = {name: "BF16" for name in before if name.endswith("layer_scalar")}
    specs = tensor_specs(loaded.state.spec, loaded.parts, scalars, "BF16")
    writer = SafetensorWriter(tmp_path, specs, 10**9)
    for tensor, values in each_tensor(loaded.state, loaded.parts):
        if tensor.part.required:
            values = cast(tensor.name, values, specs[tensor.name].dtype)
            writer.write(tensor.name, values, *tensor.region())
    writer.close()
    after = tensors(tmp_path)
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert after[name].tobytes() == values.tobytes(), name
        assert after[name].shape == values.shape, name


def logit_keys(values: dict[str, Any]) -> dict[str, Any]:
    """The keys on which the logits depend."""
    return {key: value for key, value in values.items() if key not in HARMLESS}


def test_the_config_is_described_in_the_familys_own_keys(loaded: Loaded):
    if loaded.family.composite:
        pytest.skip("zerojax writes no config.json for a model with images")
    theirs = json.loads((loaded.folder / "config.json").read_text())
    family, ours = describe_model(loaded.model)
    if (other := COMPUTE_THE_SAME.get(loaded.folder.name)) is not None:
        assert family.model_type == other
        assert replace(loaded.model, init_std=0.02) == read_model(ours, "config.json").model
        return
    assert (family, ours["architectures"]) == (loaded.family, theirs["architectures"])
    assert read_model(ours, "config.json").model == replace(loaded.model, init_std=ours["initializer_range"])
    ours, theirs = logit_keys(ours), logit_keys(theirs)
    if theirs.get("num_nextn_predict_layers"):
        assert (ours.pop("num_nextn_predict_layers"), theirs.pop("num_nextn_predict_layers")) == (0, 1)
    for name in ("_sliding_window_pattern", "sliding_window_pattern", "no_rope_layer_interval"):
        theirs.pop(name, None)  # beside a list of the layers it says nothing
    if loaded.family.model_type == "qwen2_moe":  # no layer has a window
        assert [theirs.pop(name) for name in ("sliding_window", "max_window_layers")] == [0, 28]
    if loaded.folder.name == "nemotron-h":  # of experts, which it lacks
        theirs = {name: x for name, x in theirs.items() if name in ours}
    if loaded.folder.name == "granitemoehybrid-dense":  # of experts, which it lacks
        assert ours.pop("intermediate_size") != theirs.pop("intermediate_size")
    for name in UNREAD:
        theirs.pop(name, None)
    theirs.pop("is_decoder", None)
    if loaded.family.model_type == "qwen3_moe" and not loaded.model.dense_layers:
        assert ours.pop("intermediate_size") != theirs.pop("intermediate_size")  # of layers without experts
    rope = theirs.pop("rope_parameters", None)
    if rope is not None and "rope_parameters" in ours:
        written = ours["rope_parameters"]
        if rope.pop("mscale", None) == rope.pop("mscale_all_dim", None) == 1:
            assert written.pop("attention_factor") == 1
        assert written == rope
    elif rope is not None:
        # What zerojax writes is the form of transformers 4, which version 5 reads as well.
        if "sliding_attention" in rope:
            theirs["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        theta, fraction = "rope_theta", "partial_rotary_factor"
        if loaded.family.model_type == "gpt_neox":
            theta, fraction = "rotary_emb_base", "rotary_pct"
        theirs[theta] = rope.pop("rope_theta")
        if "alpha" in rope:  # of heads of 8
            theirs[theta] *= rope["alpha"] ** (8 / 6)
            rope = {"rope_type": "default"}
        if "partial_rotary_factor" in rope:
            theirs[fraction] = rope.pop("partial_rotary_factor")
        theirs["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    assert {key: ours.get(key) for key in theirs} == theirs
