"""A mirror has the bytes of ``zerojax export`` after each version, whoever sends it and whatever dies."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_models import FIXTURES, begin_run, random_state, tensors

from zerojax.interop.engines.publisher import Publisher
from zerojax.interop.engines.receiver.ends import Receiver
from zerojax.interop.engines.receiver.mirror import Mirror
from zerojax.interop.huggingface import FP8Blocks, export_model, plan_export
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.run.config import MeshSection
from zerojax.run.run_dir import RunFolder
from zerojax.sharding.layout import from_stored, to_stored
from zerojax.sharding.param_tree import from_tree, to_tree

TOKEN = "a secret of this test"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a tiny LLaMA on two devices, and a state with random weights."""
    folder = RunFolder(tmp_path_factory.mktemp("llama") / "run")
    begin_run(FIXTURES / "llama3", folder)
    config = replace(folder.read_config(), mesh=MeshSection(nodes=1, local=2))
    return folder, config, without_padding(random_state(config))


def without_padding(state):
    """The state with zeros in its padding, as training has them."""
    params = from_tree(state.params)
    for leaf in state.spec.leaves:
        x = params[leaf.path]
        whole = np.asarray(to_stored(from_stored(np.asarray(x), leaf), leaf))
        params[leaf.path] = jax.device_put(whole, x.sharding)
    return state.with_params(to_tree(params))


def stepped(state, seed):
    """The state after a step that changes some of its weights, as bf16 has them."""

    def changed(x):
        rng = np.random.default_rng(seed)
        factor = np.where(rng.random(x.shape) < 0.05, 1 + rng.choice([-1, 1], x.shape) / 200, 1)
        return jax.device_put(x * factor.astype(np.float32), x.sharding)

    return state.with_params(jax.tree.map(changed, state.params))


def exported(run, state, out, how=None):
    folder, config, _ = run
    export_model(state, config, folder, plan_export(state, config, folder, "bfloat16"), out, how)
    return out


def listening(folder, address="127.0.0.1:0", callbacks=()):
    mirror = Mirror(folder, callbacks)
    return mirror, Receiver(mirror, address, TOKEN)


def equal(one: Path, other: Path):
    found, expected = tensors(one), tensors(other)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].tobytes() == x.tobytes(), name


def test_mirrors_follow_and_resume(run, tmp_path):
    folder, config, state = run
    mirror, end = listening(tmp_path / "mirror")
    address = end.address
    sender = Publisher(state, config, folder, [address], token=TOKEN, flows=3)
    sender.publish(state, 10)
    assert sender.wait(10, 30), sender.errors
    current = tmp_path / "mirror" / "current"
    equal(current, exported(run, state, tmp_path / "10"))
    for name in ("config.json", "generation_config.json"):
        assert (current / name).read_bytes() == (tmp_path / "10" / name).read_bytes()
    for version in range(11, 15):
        state = stepped(state, version)
        sender.publish(state, version)
        assert sender.wait(version, 30), sender.errors
        equal(current, exported(run, state, tmp_path / str(version)))
    end.close()
    for version in range(15, 18):
        state = stepped(state, version)
        sender.publish(state, version)
    mirror, end = listening(tmp_path / "mirror", end.address)
    assert mirror.version == 14
    assert sender.wait(17, 30), sender.errors
    equal(current, exported(run, state, tmp_path / "17"))
    sender.close()
    end.close()


# Blocks that cross shards and layers' ends, and end with smaller ones.
@pytest.mark.parametrize("size", [(8, 8), (24, 40)])
def test_codes_and_scales_follow(run, size, tmp_path):
    (folder, config, state), how = run, FP8Blocks(size)
    mirror, end = listening(tmp_path / "mirror")
    sender = Publisher(state, config, folder, [end.address], token=TOKEN, how=how)
    sent, out = 0, tmp_path
    for version in range(4):
        sender.publish(state, version)
        assert sender.wait(version, 60), sender.errors
        current, out = tmp_path / "mirror" / "current", exported(run, state, tmp_path / str(version), how)
        for file in ("model.safetensors", "config.json"):
            assert (current / file).read_bytes() == (out / file).read_bytes()
        sent = sum(len(mirror.patches(piece, version - 1)[0].body) for piece in mirror.description()[2])
        state = stepped(state, version)
    assert 0 < sent < (out / "model.safetensors").stat().st_size / 10
    sender.close()
    end.close()


def test_weights_that_are_not_finite_are_nan_on_the_engine(run, tmp_path):
    (folder, config, state), how = run, FP8Blocks((8, 8))
    leaf = next(leaf for leaf in state.spec.weights if leaf.name.endswith("qkv/kernel"))
    params = from_tree(state.params)
    x = np.array(params[leaf.path])
    x.reshape(leaf.layers, -1)[0, :2] = np.inf, np.nan
    params[leaf.path] = jax.device_put(x, params[leaf.path].sharding)
    state = state.with_params(to_tree(params))
    _, end = listening(tmp_path / "mirror")
    sender = Publisher(state, config, folder, [end.address], token=TOKEN, how=how)
    sender.publish(state, 0)
    assert sender.wait(0, 60), sender.errors
    codes = SafetensorFiles(tmp_path / "mirror/current").read("model.layers.0.self_attn.q_proj.weight")
    assert np.argwhere(np.isnan(codes.astype(np.float32))).tolist() == [[0, 0], [1, 0]]
    sender.close()
    end.close()
