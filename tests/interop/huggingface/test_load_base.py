"""Frozen weights read straight from a model's files: those of an import, and never whole in memory."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hf_models import FIXTURES, copy_of
from imported_runs import Imported
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

import zerojax
from zerojax import LoRA, TrainState, ZeroError, checkpoints, huggingface
from zerojax.interop.huggingface import ModelFolder
from zerojax.interop.huggingface.mapping import tensors_of
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.models import GPT, GPTConfig, lm_loss, units_of
from zerojax.sharding.param_tree import from_tree
from zerojax.train.initial import frozen_values


def created(model: GPTConfig, mesh: tuple[int, int], how: str = "abstract", **options: Any) -> TrainState:
    """A state with frozen weights, by ``TrainState.abstract`` or ``TrainState.create``."""
    lora, base = options.pop("lora", None), {}
    if "base" in options:
        base = {"base": options.pop("base")}
    options.setdefault("frozen", ("*",) if lora else ("*kernel", "*embed*"))
    zero = zerojax.ZeroConfig(**options).replace(units=units_of(model))
    return getattr(TrainState, how)(
        lambda rngs: GPT(model, rngs=rngs),
        optax.sgd(0.1),
        lm_loss,
        mesh=zerojax.make_mesh(*mesh),
        zero=zero,
        lora=lora,
        **base,
    )


def same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.leaves(one)


@pytest.mark.parametrize(
    ("imported", "options"),
    [
        ("gpt2", {"frozen_weights": "int8", "block_size": 64, "precise": ()}),
        pytest.param("opt", {"frozen_weights": "bf16"}, marks=pytest.mark.slow),
        pytest.param("llama2", {"frozen_weights": "nf4", "precise": ()}, marks=pytest.mark.slow),
        pytest.param("llama3", {"frozen_weights": "fp8", "matmul_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
    indirect=["imported"],
)
def test_the_bits_equal_an_imports(imported: Imported, options: dict[str, Any]):
    state = created(imported.trained.config.model, (2, 2), **options)
    wanted = checkpoints.restore_base(imported.folder.checkpoints / "0", state)
    found = huggingface.load_base(state, imported.model)
    same(found.frozen, wanted.frozen)
    same(found.base, wanted.base)
    for mine, like in zip(jax.tree.leaves(found.frozen), jax.tree.leaves(state.frozen), strict=True):
        assert (mine.sharding, mine.dtype) == (like.sharding, like.dtype)


@pytest.mark.slow
def test_fused_tensors_load_into_blocks_of_a_list():
    folder = FIXTURES / "families" / "phi3"
    model = replace(ModelFolder.open(folder).model, scan=False)
    options = {"frozen_weights": "int4", "block_size": 64}
    state = created(model, (1, 2), **options)
    every = huggingface.load_weights(created(model, (1, 1), "create", frozen=()), folder)
    whole = from_tree(zerojax.gather_params(every))
    wanted = jax.jit(lambda weights: frozen_values(state.spec, weights))(whole)
    found = huggingface.load_base(state, folder)
    same(found.frozen, wanted["frozen"])
    same(found.base, wanted["base"])


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["llama2"], indirect=True)
def test_other_trained_weights_are_loaded_with_the_adapters(imported: Imported):
    model = imported.trained.config.model
    options = {
        "frozen": ("*mlp*",),
        "frozen_weights": "int8",
        "block_size": 64,
        "weights_delta": True,
        "hpz": True,
    }
    state = created(model, (2, 2), "create", **options)
    found = huggingface.load_weights(state, imported.model)
    wanted = checkpoints.restore_weights(imported.folder.checkpoints / "0", state)
    for field in ("params", "frozen", "encoded", "base", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, field), getattr(wanted, field))


def test_a_custom_loop_trains_new_adapters_on_the_files_weights():
    folder = FIXTURES / "llama2"
    model, options = ModelFolder.open(folder).model, {"lora": LoRA(rank=2), "compute_dtype": "float32"}
    base = huggingface.load_base(created(model, (1, 2), **options), folder)
    state = created(model, (1, 2), "create", base=base, **options)
    expected = dict(np.load(folder / "expected.npz"))
    logits = zerojax.gather_model(state)(expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed LLaMA with six wider layers, in bfloat16: 4.9 MB in fp32."""
    source = ModelFolder.open(FIXTURES / "llama2")
    keys = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
    keys |= {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": source.model.vocab_size}
    folder = copy_of("llama2", tmp_path_factory.mktemp("larger") / "model", keys)
    model = ModelFolder.open(folder).model
    parts = source.family.parts(model)
    spec = created(model, (1, 1), lora=LoRA()).spec
    random = np.random.default_rng(0)
    every = {t.name: t.shape for leaf in spec.weights for t in tensors_of(leaf, parts)}
    save_file(
        {name: random.standard_normal(shape, np.float32).astype(bfloat16) for name, shape in every.items()},
        folder / "model.safetensors",
    )
    return folder


def test_no_more_than_a_few_tensors_are_in_memory(larger: Path, monkeypatch: pytest.MonkeyPatch):
    state = created(ModelFolder.open(larger).model, (1, 2), lora=LoRA(), frozen_weights="nf4", precise=())
    first = huggingface.load_base(state, larger)  # compiles
    held = {id(x) for x in jax.live_arrays()}
    largest = max(spec.nbytes for spec in SafetensorFiles(larger).specs.values()) * 2  # in fp32
    total = sum(spec.nbytes for spec in SafetensorFiles(larger).specs.values()) * 2
    assert total > 15 * largest
    read, widest = SafetensorFiles.read, []

    def counted(self: SafetensorFiles, name: str, *ranges: slice) -> np.ndarray:
        new = [x for x in jax.live_arrays() if id(x) not in held and x.dtype == np.float32]
        widest.append(sum(x.nbytes for x in new))
        return read(self, name, *ranges)

    monkeypatch.setattr(SafetensorFiles, "read", counted)
    tracemalloc.start()
    try:
        again = huggingface.load_base(state, larger)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * largest  # numpy's: parts of one tensor, as read, in fp32 and in place; and the headers
    assert max(widest) <= largest  # JAX's: each weight is encoded before the next is read
    same(again.frozen, first.frozen)


def test_another_model_is_refused(larger: Path, tmp_path: Path):
    state = created(ModelFolder.open(FIXTURES / "llama2").model, (1, 1), lora=LoRA())
    for folder, words in [
        (FIXTURES / "gpt2", r"the model in .*gpt2 has no 'blocks/block/.*, which the state has"),
        (FIXTURES / "llama3", "has no 'head/embedding'"),
        (larger, r"has shape .*, but the config needs"),
        (tmp_path, "No such file"),
    ]:
        with pytest.raises(ZeroError, match=words):
            huggingface.load_base(state, folder)
