"""Adapters of PEFT are loaded and written as PEFT reads them; frozen weights are exported with them."""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft_by_hand
import pytest
from hf_models import FIXTURES, tensors
from imported_runs import Imported
from safetensors.numpy import load_file, save_file

import zerojax
from zerojax import LoRA, TrainState, ZeroError, checkpoints
from zerojax.cli.train import Options, adapter_settings
from zerojax.interop.huggingface import (
    ModelFolder,
    adapter_base,
    adapter_frozen,
    adapter_lora,
    export_adapter,
    load_adapter,
    load_weights,
)
from zerojax.interop.huggingface.peft_files import target_modules, tensors_of_model
from zerojax.interop.huggingface.save import each_tensor, gather_layer
from zerojax.matmul.lora import A, B
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.run.build import RunSetup
from zerojax.run.checkpoints import read_manifest
from zerojax.run.config import MeshSection, RunConfig, TrainSection, config_to_dict, with_settings
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import start_run
from zerojax.sharding.param_tree import from_tree
from zerojax.train.frozen import decode_frozen

ADAPTERS = FIXTURES / "adapters"
SPARE = 2
"""Columns of A that the adapters of the LLaMA do not need."""


@dataclass(frozen=True)
class Tuned:
    """A committed model with PEFT's adapter for it."""

    name: str
    model: GPTConfig
    rank: int
    before: TrainState
    state: TrainState

    @property
    def files(self) -> Path:
        return ADAPTERS / self.name


BOTH = pytest.mark.parametrize(
    "imported", ["gpt2", pytest.param("llama2", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module")
def tuned(imported: Imported) -> Tuned:
    """GPT-2 with adapters that fit, LLaMA with larger ones, and for all weights."""
    name, folder = imported.model.name, imported.folder
    config = folder.read_config()
    lora = adapter_lora(ADAPTERS / name, config.model)
    if name == "llama2":
        rank = 2 * lora.rank + SPARE  # of the queries and the values side by side
        alpha = lora.scale * math.sqrt(rank)
        lora = replace(lora, rank=rank, alpha=alpha, targets=LoRA().targets, pieces=())
    zero = config.zero.replace(frozen=("*",))
    config = replace(config, lora=lora, zero=zero, mesh=MeshSection(nodes=2, local=2))
    before = start_run(
        RunSetup(config, trains=False), folder, read_manifest(folder.checkpoints / "0"), None
    ).state
    return Tuned(name, config.model, lora.rank, before, load_adapter(before, ADAPTERS / name, config.model))


@BOTH
def test_logits_equal_pefts(tuned: Tuned):
    tokens = np.load(FIXTURES / tuned.name / "expected.npz")["tokens"]
    logits = zerojax.gather_model(tuned.state)(tokens)
    np.testing.assert_allclose(logits, np.load(tuned.files / "expected.npz")["logits"], rtol=0, atol=1e-5)


@BOTH
def test_the_model_is_exported_with_its_adapters_merged(tuned: Tuned):
    source = ModelFolder.open(FIXTURES / tuned.name)
    parts = source.family.parts(tuned.model)
    wanted = peft_by_hand.merged(tensors(source.folder), tuned.files)
    for tensor, values in each_tensor(tuned.state, parts):
        if tensor.part.required:
            np.testing.assert_allclose(values, wanted.pop(tensor.name), rtol=0, atol=1e-6)
    assert not wanted


@BOTH
def test_a_written_adapter_adds_the_same_product(tuned: Tuned, tmp_path: Path):
    base, out = tensors(FIXTURES / tuned.name), tmp_path / "out"
    export_adapter(
        tuned.state,
        tuned.model,
        out,
        base="a-model",
        family=ModelFolder.open(FIXTURES / tuned.name).family.model_type,
    )
    ours, theirs = (peft_by_hand.merged(base, folder) for folder in (out, tuned.files))
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=1e-6)
    assert peft_by_hand.targeted(base, out) == peft_by_hand.modules(out).keys()
    about = peft_by_hand.settings(out)
    assert about["base_model_name_or_path"] == "a-model"
    assert about["fan_in_fan_out"] == (tuned.name == "gpt2")
    again = load_adapter(tuned.before, out, tuned.model)  # query, key and value have one A now
    assert (adapter_lora(out, tuned.model).rank, adapter_lora(out, tuned.model).pieces) == (tuned.rank, ())
    gathered = (from_tree(zerojax.gather_adapters(state)) for state in (again, tuned.state))
    for mine, first in zip(*(x.values() for x in gathered), strict=True):
        np.testing.assert_array_equal(mine, first)


@BOTH
@pytest.mark.filterwarnings("ignore")  # PyTorch's own
def test_peft_reads_what_is_written(tuned: Tuned, tmp_path: Path):
    peft, torch, transformers = map(pytest.importorskip, ("peft", "torch", "transformers"))
    source = FIXTURES / tuned.name
    export_adapter(tuned.state, tuned.model, tmp_path / "out", base=str(source))
    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    tokens = np.load(source / "expected.npz")["tokens"]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(zerojax.gather_model(tuned.state)(tokens), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("imported", ["gpt2"], indirect=True)
@pytest.mark.parametrize(("fmt", "matmul"), [("nf4", "compute"), ("fp8", "fp8")])
def test_a_layer_of_a_frozen_weight_is_decoded_as_the_whole(fmt: str, matmul: str, imported: Imported):
    options = {"frozen": ("*qkv/kernel",), "frozen_weights": fmt, "matmul_dtype": matmul}
    state = abstract(imported.trained.config.model, None, mesh=(2, 2), **options)
    state = checkpoints.restore_base(imported.folder.checkpoints / "0", state)
    (leaf,) = state.spec.frozen
    (stored,) = from_tree(state.frozen).values()
    assert (stored.scale is not None) == (fmt == "fp8")
    whole = np.asarray(decode_frozen(stored))
    for layer in range(leaf.layers):
        np.testing.assert_array_equal(gather_layer(state.spec, leaf, stored, layer), whole[layer])


@BOTH
def test_adapters_share_ranks_and_larger_ones_keep_their_other_values(tuned: Tuned):
    before, after = (from_tree(zerojax.gather_adapters(s)) for s in (tuned.before, tuned.state))
    rank = peft_by_hand.settings(tuned.files)["r"]
    path = ("blocks", "block", "attention", "qkv", "kernel")
    a, b = after[*path, A], after[*path, B]
    if tuned.name == "gpt2":
        assert a.shape == (2, 16, rank)
        assert {key[-2:] for key in after} == {("kernel", A), ("kernel", B)}
        assert len(after) == 4
        return
    assert a.shape == (2, 16, 2 * rank + SPARE)
    np.testing.assert_array_equal(a[..., 2 * rank :], before[*path, A][..., 2 * rank :])
    width = 16  # of query; key and value are half as wide
    blocks = np.zeros((2 * rank + SPARE, 2 * width), bool)
    blocks[:rank, :width] = blocks[rank : 2 * rank, width + width // 2 :] = True
    np.testing.assert_array_equal(b != 0, np.broadcast_to(blocks, b.shape))
    up = ("blocks", "block", "mlp", "up", "kernel")  # which the files have no adapter for
    np.testing.assert_array_equal(after[*up, A], before[*up, A])
    assert not after[*up, B].any()


def test_settings_keep_the_scale():
    model = ModelFolder.open(FIXTURES / "llama2").model
    lora = adapter_lora(ADAPTERS / "llama2", model)
    assert (lora.rank, lora.rslora) == (2, True)
    qkv = "blocks/*/attention/qkv/kernel"
    assert lora.pieces == ((qkv, 16, 2, 3.0), (qkv, 8, 0, 3.0), (qkv, 8, 2, 3.0))
    assert lora.scale == pytest.approx(3 / math.sqrt(2))
    assert lora.targets == ("blocks/*/attention/qkv/kernel", "blocks/*/mlp/down/kernel")
    lora = adapter_lora(ADAPTERS / "gpt2", ModelFolder.open(FIXTURES / "gpt2").model)
    assert (lora.rank, lora.alpha, lora.dropout, lora.rslora) == (3, 5.0, 0.1, False)


def test_targets_are_the_shortest_ends_of_names():
    every = {f"h.{i}.{part}" for i in range(12) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")}
    assert target_modules({one for one in every if one.endswith("c_attn")}, every) == ["c_attn"]
    assert target_modules({one for one in every if "attn.c_proj" in one}, every) == ["attn.c_proj"]
    assert target_modules({"h.1.mlp.c_proj"}, every) == ["h.1.mlp.c_proj"]  # not h.11


def changed(folder: Path, keys: dict[str, object], arrays: dict[str, np.ndarray | None]) -> Path:
    """The adapter for GPT-2 with other keys and tensors; None removes a tensor."""
    shutil.copytree(ADAPTERS / "gpt2", folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    wanted = {name: x for name, x in (load_file(weights) | arrays).items() if x is not None}
    save_file(wanted, weights)
    return folder


NAME = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
WTE = "base_model.model.transformer.wte.weight"


@pytest.mark.parametrize(
    ("keys", "arrays", "words"),
    [
        (
            {"use_dora": True},
            {},
            r"merge_and_unload\), and import that, as zerojax lacks .*: use_dora = True",
        ),
        ({"modules_to_save": ["lm_head"]}, {}, "the files lack 'lm_head', which modules_to_save names"),
        ({"modules_to_save": [3]}, {}, "modules_to_save = .* should be names"),
        ({"rank_pattern": {"c_attn": 4}}, {}, r"has shape \(3, 16\), but .* need \(4, 16\)"),
        ({"rank_pattern": {"c_attn": "4"}}, {}, "rank_pattern has '4' for 'c_attn'"),
        ({"rank_pattern": {"c_attn": 0}}, {}, "LoRA.rank=0"),
        ({"rank_pattern": {"(": 4}}, {}, r"rank_pattern: '\(' is not a pattern"),
        ({"alpha_pattern": {"(.+)+x": 4}}, {}, r"alpha_pattern: .* repeats too much"),
        ({"bias": "some"}, {}, "bias = 'some' is not supported, only 'none' or 'all' or 'lora_only'"),
        ({}, {WTE: np.zeros((80, 16), np.float32)}, "neither in bias nor in modules_to_save"),
        (
            {"modules_to_save": ["wte"]},
            {WTE: np.zeros((80, 16), np.float32)},
            "embedding and the output .* differ",
        ),
        (
            {"modules_to_save": ["c_attn"]},
            {NAME.replace("lora_A.", ""): np.zeros((16, 48), np.float32)},
            "an adapter of 'block/attention/qkv/kernel', which holds it",
        ),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = 'pissa'"),
        ({"peft_type": "IA3"}, {}, "peft_type = 'IA3'"),
        ({"task_type": "SEQ_CLS"}, {}, "task_type = 'SEQ_CLS'"),
        ({"r": None}, {}, "r is missing"),
        ({"lora_dropout": 1.5}, {}, r"adapter_config\.json: LoRA.dropout=1.5"),
        ({"r": 4}, {}, r"has shape \(3, 16\), but .* need \(4, 16\)"),
        ({}, {NAME: None}, "the files lack .*c_attn.lora_A"),
        ({}, {NAME: np.zeros((3, 16), np.int8)}, "of dtype I8"),
        (
            {},
            {NAME.replace("h.0", "h.9"): np.zeros((3, 16), np.float32)},
            "has no such module. Use an adapter for this model",
        ),
        (
            {},
            {NAME.replace("attn.c_attn", "ln_1"): np.zeros((3, 16), np.float32)},
            "which is not a matrix. Remove it",
        ),
    ],
)
def test_what_zerojax_does_not_have_is_refused_by_name(keys, arrays, words, tmp_path):
    folder = changed(tmp_path / "adapter", keys, arrays)
    with pytest.raises(ZeroError, match=words):
        adapter_lora(folder, ModelFolder.open(FIXTURES / "gpt2").model)


def test_an_adapter_of_another_family_and_a_missing_folder_are_refused(tmp_path):
    model = ModelFolder.open(FIXTURES / "llama2").model
    with pytest.raises(ZeroError, match=r"but a LlamaForCausalLM of .* has no such module"):
        adapter_lora(ADAPTERS / "gpt2", model)
    with pytest.raises(ZeroError, match=r"adapter_config.json: No such file.*of a PEFT adapter has one"):
        adapter_lora(tmp_path, model)
    shutil.copy(ADAPTERS / "gpt2" / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ZeroError, match="run code when they are read"):
        adapter_lora(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "the state has no adapters: create the state with lora=huggingface.adapter_lora"),
        ({"rank": 2}, "of 'block/attention/qkv/kernel' has rank 2, but .* needs rank 3"),
        ({"pieces": (("*qkv/kernel", 40, 3, 5.0), ("*qkv/kernel", 8, 0, 5.0))}, "fewer columns"),
        ({"targets": ("*qkv/kernel",)}, "an adapter for 'block/mlp/down/kernel' of block 0"),
    ],
)
def test_a_state_that_cannot_hold_them_is_refused(change, words):
    model = ModelFolder.open(FIXTURES / "gpt2").model
    lora = None if change is None else replace(adapter_lora(ADAPTERS / "gpt2", model), **change)
    with pytest.raises(ZeroError, match=words):
        load_adapter(abstract(model, lora), ADAPTERS / "gpt2", model)


def abstract(model: GPTConfig, lora: LoRA | None, mesh: tuple[int, int] = (1, 1), **zero: Any) -> TrainState:
    options: dict[str, Any] = {"frozen": ("*",) if lora else (), **zero}
    return TrainState.abstract(
        lambda rngs: GPT(model, rngs=rngs),
        optax.identity(),
        lm_loss,
        mesh=zerojax.make_mesh(*mesh),
        zero=zerojax.ZeroConfig(**options),
        lora=lora,
    )


def test_weights_that_an_adapter_cannot_hold_are_not_exported(tmp_path):
    model = ModelFolder.open(FIXTURES / "gpt2").model
    with pytest.raises(ZeroError, match="no adapters to export"):
        export_adapter(abstract(model, None), model, tmp_path / "out")
    phi, folder = ModelFolder.open(FIXTURES / "families" / "phi3"), tmp_path / "out"
    with pytest.raises(
        ZeroError, match=r"MistralForCausalLM and Phi3.* different modules.* such as 'mistral'"
    ):
        export_adapter(abstract(phi.model, LoRA()), phi.model, folder)
    with pytest.raises(ZeroError, match=r"family='gpt2' does not fit this model. Use one of mistral.* phi3"):
        export_adapter(abstract(phi.model, LoRA()), phi.model, folder, family="gpt2")
    gate = abstract(phi.model, LoRA(targets=("*up/kernel",)), frozen=("*", "!*gate/kernel"))
    with pytest.raises(ZeroError, match=r"0.mlp.gate_up_proj' holds a trained weight and a weight with an"):
        export_adapter(gate, phi.model, folder, family="phi3")


ALL = (
    "llama3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "mistral", "opt", "phi3", "gpt-neox")),
)
"""Models with adapters of everything that zerojax imports; see ADAPTERS of hf_fixtures.py."""


@dataclass(frozen=True)
class Loaded:
    """A committed model, loaded from its files, with PEFT's adapter for it."""

    name: str
    source: ModelFolder
    state: TrainState

    @property
    def files(self) -> Path:
        return ADAPTERS / self.name

    def export(self, out: Path) -> Path:
        export_adapter(self.state, self.source.model, out, base=str(self.source.folder))
        return out


def created(source: ModelFolder, files: Path, **options: Any) -> TrainState:
    """A state that can hold an adapter, with the weights of the model's files."""
    state = TrainState.create(
        lambda rngs: GPT(source.model, rngs=rngs),
        optax.sgd(0.1),
        lm_loss,
        mesh=zerojax.make_mesh(1, 2, devices=jax.devices()[:2]),
        zero=zerojax.ZeroConfig(
            compute_dtype="float32", frozen=adapter_frozen(files, source.model), **options
        ),
        lora=adapter_lora(files, source.model),
    )
    return load_weights(state, source.folder)


@pytest.fixture(scope="module", params=ALL)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    name = request.param
    folder = FIXTURES / name if (FIXTURES / name).exists() else FIXTURES / "families" / name
    source = ModelFolder.open(folder)
    state = load_adapter(created(source, ADAPTERS / name), ADAPTERS / name, source.model)
    return Loaded(name, source, state)


def merged_by_hand(source: ModelFolder, files: Path) -> dict[str, np.ndarray]:
    base = {name: x.astype(np.float32) for name, x in tensors(source.folder).items()}
    return peft_by_hand.merged(base, files)


def assert_merged(state: TrainState, source: ModelFolder, files: Path) -> None:
    """The model of a state is that of the files with PEFT's adapter."""
    wanted, parts = merged_by_hand(source, files), source.family.parts(source.model)
    for tensor, values in each_tensor(state, parts):
        if tensor.name in wanted:  # the second copy of a tied matrix is not
            own = wanted[tensor.name][tensor.region()]
            np.testing.assert_allclose(values, own, rtol=0, atol=3e-6, err_msg=tensor.name)


@pytest.mark.slow
def test_logits_equal_pefts_with_all_supported_options(loaded: Loaded):
    tokens = np.load(loaded.source.folder / "expected.npz")["tokens"]
    logits = zerojax.gather_model(loaded.state)(tokens)
    np.testing.assert_allclose(logits, np.load(loaded.files / "expected.npz")["logits"], rtol=0, atol=2e-5)


def test_an_adapter_comes_back_as_it_was(loaded: Loaded, tmp_path: Path):
    assert_merged(loaded.state, loaded.source, loaded.files)
    out = loaded.export(tmp_path / "out")
    assert_merged(loaded.state, loaded.source, out)
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (out, loaded.files))
    about, before = peft_by_hand.settings(out), peft_by_hand.settings(loaded.files)
    if loaded.name == "mistral":  # embeddings and heads with adapters come back as a whole
        assert about["modules_to_save"] == ["embed_tokens", "gate_proj", "lm_head", "model.norm"]
        return
    if loaded.name == "llama3":  # one layer's rank and alpha are now all layers'
        assert (about["rank_pattern"], about["alpha_pattern"]) == (
            {"v_proj": 2},
            {"down_proj": 6, "k_proj": 5},
        )
        assert before["rank_pattern"]["v_proj"] == 2
        assert ours.keys() == theirs.keys()
        return
    same = ("r", "lora_alpha", "bias", "rank_pattern", "alpha_pattern", "modules_to_save")
    assert {key: about[key] for key in same} == {key: before[key] for key in same}
    assert {*about["target_modules"]} == {*before["target_modules"]}
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "granitemoe"])
def test_adapters_of_experts_come_back_as_they_were(name: str, tmp_path: Path):
    source, files = ModelFolder.open(FIXTURES / "families" / name), ADAPTERS / name
    loaded = Loaded(name, source, load_adapter(created(source, files), files, source.model))
    test_logits_equal_pefts_with_all_supported_options(loaded)
    out = loaded.export(tmp_path / "out")
    about, before = map(peft_by_hand.settings, (out, files))
    same = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_parameters")
    assert {key: about[key] for key in same} == {key: before[key] for key in same}
    assert {*about["target_modules"]} == {*before["target_modules"]}
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (out, files))
    assert ours.keys() == theirs.keys()
    for key, x in theirs.items():
        np.testing.assert_array_equal(ours[key], x, err_msg=key)
    # With an A each, gate and up are side by side in one parameter, and come apart again.
    changed = jax.tree.map(lambda x: x + jnp.cos(jnp.arange(x.size)).reshape(x.shape), loaded.state.params)
    other = loaded.state.with_params(changed)
    export_adapter(other, source.model, tmp_path / "other", base=str(source.folder))
    again = load_adapter(loaded.state, tmp_path / "other", source.model)
    gathered = (from_tree(zerojax.gather_adapters(x)) for x in (again, other))
    for mine, first in zip(*(x.values() for x in gathered), strict=True):
        np.testing.assert_array_equal(mine, first)
    assert adapter_lora(tmp_path / "other", source.model) == other.spec.lora


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["bamba", "gemma4", "gemma4-e2b", "gemma4-moe", "kimi-linear", "nemotron-3", "olmo-hybrid", "qwen3-5"],
)
def test_adapters_of_layers_of_several_kinds_come_back_as_they_were(name: str, tmp_path: Path):
    """Their norms of small values make more of the rounding than attention does."""
    source, files = ModelFolder.open(FIXTURES / "families" / name), ADAPTERS / name
    state = load_adapter(created(source, files), files, source.model)
    logits = zerojax.gather_model(state)(np.load(source.folder / "expected.npz")["tokens"])
    np.testing.assert_allclose(logits, np.load(files / "expected.npz")["logits"], rtol=0, atol=1e-4)
    export_adapter(state, source.model, tmp_path / "out", base=str(source.folder))
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "out", files))
    assert ours.keys() == theirs.keys()
    for key, x in theirs.items():
        np.testing.assert_array_equal(ours[key], x, err_msg=key)


def test_what_cannot_hold_adapters_of_experts_is_refused(tmp_path: Path):
    source, files = ModelFolder.open(FIXTURES / "families" / "mixtral"), ADAPTERS / "mixtral"
    state = abstract(source.model, LoRA(rank=2, targets=("*out/kernel", "*/gate", "*/up")))
    with pytest.raises(ZeroError, match=r"an adapter for 'block/mlp/down' of block 0"):
        load_adapter(state, files, source.model)
    shutil.copytree(files, tmp_path / "files")
    about = peft_by_hand.settings(files) | {"target_parameters": ["mlp.router.weight"]}
    (tmp_path / "files" / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(ZeroError, match=r"target_parameters = .*router.weight.* is not supported"):
        adapter_lora(tmp_path / "files", source.model)


@pytest.mark.slow
def test_a_fused_module_is_trained_on(tmp_path: Path):
    source = ModelFolder.open(FIXTURES / "families" / "phi3")
    before = created(source, ADAPTERS / "phi3")
    state = load_adapter(before, ADAPTERS / "phi3", source.model)
    batch = {"tokens": np.random.default_rng(0).integers(0, 80, (4, 9)).astype(np.int32)}
    state, _ = zerojax.train_step(state, batch)
    out = tmp_path / "out"
    targets = export_adapter(state, source.model, out, family="phi3")
    assert targets == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    assert_merged(state, source, out)
    about = peft_by_hand.settings(out)  # gate and up have an A each now
    assert (about["rank_pattern"], about["alpha_pattern"]) == ({"gate_up_proj": 8}, {"gate_up_proj": 12})
    assert adapter_lora(out, source.model) == state.spec.lora  # and rank 4 each again
    trained = zerojax.gather_adapters(state)
    again = load_adapter(load_adapter(state, ADAPTERS / "phi3", source.model), out, source.model)
    jax.tree.map(np.testing.assert_array_equal, zerojax.gather_adapters(again), trained)


@pytest.mark.parametrize("name", ["opt", "mistral"])
def test_a_state_that_freezes_what_the_files_train_is_refused(name: str):
    folder = FIXTURES / name if (FIXTURES / name).exists() else FIXTURES / "families" / name
    model = ModelFolder.open(folder).model
    state = abstract(model, adapter_lora(ADAPTERS / name, model))
    with pytest.raises(ZeroError, match=r"has values for .*, but the state freezes it. .*adapter_frozen\("):
        load_adapter(state, ADAPTERS / name, model)


def test_names_of_another_family_of_the_same_shape_are_read(tmp_path: Path):
    """An adapter of LLaMA's modules for a model whose own family fuses them."""
    model = ModelFolder.open(FIXTURES / "families" / "phi3").model
    lora = adapter_lora(ADAPTERS / "phi3", model)
    assert lora.targets == tuple(
        f"blocks/*/{x}/kernel" for x in ("attention/out", "attention/qkv", "mlp/down", "mlp/gate", "mlp/up")
    )
    with pytest.raises(ZeroError, match=r"but a MistralForCausalLM of .* has no such module"):
        adapter_lora(ADAPTERS / "gpt2", model)
    assert adapter_lora(ADAPTERS / "mistral", model).targets == ("blocks/*/attention/out/kernel",)


def test_the_family_of_a_run_is_the_family_of_its_first_model(tmp_path: Path):
    phi = FIXTURES / "families" / "phi3"
    run, model = RunFolder(tmp_path / "run"), ModelFolder.open(phi).model
    assert adapter_base(None, run, model) == (None, "mistral")
    run.huggingface.mkdir(parents=True)
    shutil.copy(phi / "config.json", run.huggingface)
    assert adapter_base(None, run, model) == (None, "phi3")
    assert adapter_base(phi, run, model) == (str(phi), "phi3")


def test_the_settings_of_a_run_can_hold_an_adapter():
    def settings(name: str, rank: int = 0) -> RunConfig:
        model, train = ModelFolder.open(FIXTURES / name).model, TrainSection(sequence_length=16)
        before = with_settings(RunConfig(model=model, train=train), {"lora": {"rank": rank}})
        options = Options(adapter=ADAPTERS / name)
        return with_settings(before, adapter_settings(options, config_to_dict(before)))

    opt = settings("opt")
    assert opt.lora is not None
    assert (opt.lora.rank, len(opt.lora.pieces)) == (2, 3)
    assert "!norm/bias" in opt.zero.frozen
    llama = settings("llama2", 9)
    assert llama.lora is not None
    assert (llama.lora.rank, llama.lora.pieces, llama.zero.frozen) == (9, (), ("*",))


@pytest.mark.parametrize("folder", sorted((FIXTURES / "families").iterdir()), ids=lambda folder: folder.name)
def test_every_family_has_modules_for_all_weights(folder: Path):
    source = ModelFolder.open(folder)
    parts = tensors_of_model(source.family, source.model)
    carries = source.family.carries
    kept = {name for name in tensors(folder) if not carries(name, source.model)}
    state = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    kept = {name for name in kept if not name.endswith(state)}
    # transformers has other names for these in memory.
    kept = {name.replace("language_model.model.", "model.language_model.") for name in kept}
    kept = {name.replace("language_model.lm_head.", "lm_head.") for name in kept}
    kept = {name.replace("backbone.", "model.") for name in kept}
    if folder.name == "kimi-linear":
        for ours, theirs in source.family.names.other_names:
            kept = {name.replace(f".{theirs}.", f".{ours}.") for name in kept}
    if folder.name == "olmo-hybrid":
        kept = {name for name in kept if "layer_norm" not in name}
    assert kept <= parts.keys()
    fused = {name.split(".")[-2] for name, own in parts.items() if len(own) > 1}
    fuses = {
        **{name: {"gate_up_proj"} for name in ("phi3", "glm", "glm4")},
        **{name: {"query_key_value"} for name in ("gpt_neox", "falcon")},
        **{name: {"experts"} for name in ("gpt_oss", "gemma4_text")},
        "granitemoe": {"input_linear", "output_linear"},
        **{name: {"q_proj"} for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5")},
        **{name: {"in_proj"} for name in ("lfm2", "lfm2_moe", "bamba", "nemotron_h")},
        "granitemoehybrid": {"in_proj", "input_linear", "output_linear"},
        "qwen3_next": {"q_proj", "in_proj_qkvz", "in_proj_ba"},
    }
    assert fused <= fuses.get(source.family.model_type, set())
