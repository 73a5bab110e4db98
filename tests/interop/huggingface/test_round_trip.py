"""Imported models of transformers give the same logits, and the same bits when exported again."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from hf_models import FIXTURES, copy_of, random_state, run_config, tensors
from imported_runs import Imported

from zerojax import gather_model
from zerojax.interop.huggingface import ModelFolder, export_model, plan_export
from zerojax.interop.huggingface.exporting import _write_generation
from zerojax.interop.huggingface.load import check_tensors, load_params
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.interop.huggingface.save import each_tensor, tensor_specs
from zerojax.interop.huggingface.weight_files import WeightFiles
from zerojax.run.build import abstract_model
from zerojax.run.data.chat_template import CHATML, ChatTemplate
from zerojax.run.data.tokenizer import BPETokenizer
from zerojax.run.run_dir import RunFolder
from zerojax.train.state import begin_with


def export(run: Imported, out: Path, dtype: str | None = None, largest_file: int = 10**9) -> None:
    state, config = run.trained.state, run.trained.config
    target = plan_export(state, config, run.folder, dtype)
    export_model(state, config, run.folder, target, out, None, largest_file)


def test_logits_equal_transformers(imported: Imported):
    expected = dict(np.load(imported.model / "expected.npz"))
    logits = gather_model(imported.trained.state)(expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


def test_a_round_trip_changes_no_bit(imported: Imported, tmp_path: Path):
    export(imported, tmp_path / "out")
    before, after = tensors(imported.model), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for tensor, values in before.items():
        assert (after[tensor].dtype, after[tensor].shape) == (values.dtype, values.shape), tensor
        assert after[tensor].tobytes() == values.tobytes(), tensor
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (imported.model / file).read_bytes(), file


def test_what_ends_a_message_is_named_among_the_ends(tmp_path: Path):
    tokens = {"<s>": 0, "</s>": 1, "<|im_end|>": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=tokens, merges=[]))
    inner.add_special_tokens(list(tokens))
    tokenizer, path = BPETokenizer(inner, "</s>", "<s>"), tmp_path / "generation_config.json"
    chatml = ChatTemplate(CHATML, tokenizer.special_tokens)
    for template, ends in ((None, 1), (chatml, [1, 2])):
        path.unlink(missing_ok=True)
        _write_generation(tokenizer, template, tmp_path)
        assert json.loads(path.read_text()) == {"bos_token_id": 0, "eos_token_id": ends}
    path.write_text('{"eos_token_id": 1, "temperature": 0.5}')
    for template, ends in ((None, 1), (chatml, [1, 2]), (chatml, [1, 2])):
        _write_generation(tokenizer, template, tmp_path)
        assert json.loads(path.read_text()) == {"eos_token_id": ends, "temperature": 0.5}


def test_files_are_split_where_they_grow_too_large(imported: Imported, tmp_path: Path):
    export(imported, tmp_path / "out", "float32", 6000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    after = SafetensorFiles(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in after.specs.values())
    for name, values in tensors(imported.model).items():
        np.testing.assert_array_equal(after.read(name), values.astype(np.float32))
        assert after.read(name).dtype == np.float32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_old_files_without_prefix_and_with_masks_are_read(tmp_path):
    # As the first GPT-2 on Hugging Face: a base model's names, causal masks, a second copy of the embedding.
    found = tensors(FIXTURES / "gpt2")
    bare = {name.removeprefix("transformer."): x for name, x in found.items()}
    bare |= {
        "h.0.attn.bias": np.tril(np.ones((1, 1, 32, 32), np.float32)),
        "lm_head.weight": bare["wte.weight"],
    }
    renamed = dict.fromkeys(found)
    files = WeightFiles(copy_of("gpt2", tmp_path / "old", None, **(renamed | bare)), None)
    source = ModelFolder.open(tmp_path / "old")
    train_spec = abstract_model(run_config(source.model)).spec
    parts = source.family.parts(source.model, files.specs)
    check_tensors(train_spec, files, source, parts)
    dtypes = {name: spec.dtype for name, spec in files.specs.items()}
    assert tensor_specs(train_spec, parts, dtypes, "F32").keys() == bare.keys() - {"h.0.attn.bias"}
    state = begin_with(abstract_model(run_config(source.model)), load_params(train_spec, files, parts), 0)
    for tensor, values in each_tensor(state, parts):
        np.testing.assert_array_equal(values, bare[tensor.name])


class CountingFiles(WeightFiles):
    """Files that record how many bytes of each tensor are read, and the most at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self.bytes_of = dict.fromkeys(self.specs, 0)
        self.largest = 0

    def read(self, name: str, *ranges: slice) -> np.ndarray:
        values = super().read(name, *ranges)
        self.bytes_of[name] += values.nbytes
        self.largest = max(self.largest, values.nbytes)
        return values


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A LLaMA whose rows divide among eight devices: a folder that zerojax exported, and its state."""
    model = dataclasses.replace(
        ModelFolder.open(FIXTURES / "llama3").model, d_model=64, vocab_size=256, ffn=128
    )
    config = run_config(model, "zero3")
    state = random_state(config)
    folder = RunFolder(tmp_path_factory.mktemp("larger") / "run")
    out = folder.path.with_name("model")
    export_model(state, config, folder, plan_export(state, config, folder, None), out)
    return state, out


def test_each_device_reads_its_own_part_and_no_more(larger):
    state, folder = larger
    source, files = ModelFolder.open(folder), CountingFiles(folder)
    parts = source.family.parts(source.model, files.specs)
    params = load_params(state.spec, files, parts)
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        assert mine.sharding == theirs.sharding
        assert all(shard.data.size * 8 == mine.size for shard in mine.addressable_shards)
        np.testing.assert_array_equal(mine, theirs)
    for name, spec in files.specs.items():
        # Vectors are read whole; of matrices, all devices together read each row once.
        times = 8 if len(spec.shape) == 1 else 1
        assert files.bytes_of[name] <= times * spec.nbytes, name
    biggest = max(spec.nbytes for spec in files.specs.values())
    assert files.largest <= biggest / 8


def test_one_tensor_at_a_time_is_whole_in_an_export(larger):
    state, _ = larger
    source = ModelFolder.open(larger[1])
    parts = source.family.parts(source.model)
    held = {id(x) for x in jax.live_arrays()}
    layer = max(leaf.size for leaf in state.spec.leaves) * 4
    count = 0
    for tensor, values in each_tensor(state, parts):
        new = [x for x in jax.live_arrays() if id(x) not in held and x.nbytes > 4]
        # On each device one layer of one leaf, whole; the file's tensor is a view of it.
        assert sum(x.nbytes for x in new) <= layer, tensor.name
        assert values.nbytes <= layer
        count += 1
    assert count == len(SafetensorFiles(larger[1]).specs) + 1  # the tied output projection is left out there
