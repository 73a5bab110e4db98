"""The strips of every family put each element where an export puts it."""

import numpy as np
import pytest
from hf_models import FIXTURES, run_config

from zerojax.interop.engines.layout import strip_of
from zerojax.interop.huggingface import ModelFolder
from zerojax.interop.huggingface.mapping import layers_of, place_at, tensors_at
from zerojax.run.build import abstract_model

# Transposed, fused, interleaved, stacked and convolutional tensors, and experts.
FAMILIES = ("phi3", "gpt-neox", "falcon-groups", "mixtral", "gpt-oss", "granitemoe", "qwen3-5", "deepseek-v3")


@pytest.mark.parametrize("name", ["gpt2", "llama3", *(f"families/{name}" for name in FAMILIES)])
def test_strips_are_the_tensors_of_an_export(name):
    source = ModelFolder.open(FIXTURES / name)
    parts = source.family.parts(source.model, source.family.prefix)
    for leaf in abstract_model(run_config(source.model, "zero3")).spec.weights:
        weight = np.arange(leaf.size).reshape(leaf.shape)
        layer = layers_of(leaf)[-1]
        for tensor in tensors_at(place_at(leaf.path, layer, parts.order), leaf.shape, parts):
            exported = np.full(tensor.shape, -1)
            exported[tensor.region()] = tensor.of(weight)
            strip = strip_of(tensor, 0)
            matrix = weight.reshape(-1, leaf.shape[-1])[strip.top : strip.bottom, strip.left : strip.end]
            assert np.array_equal(strip.of(exported.reshape(-1)), matrix), (leaf.name, tensor.name)
            assert (exported >= 0).sum() == matrix.size
