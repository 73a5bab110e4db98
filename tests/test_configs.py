"""The settings that come with zerojax."""

from dataclasses import replace

import pytest
from environment import ROOT

from zerojax.analysis.gpus import GPUS
from zerojax.analysis.plan import Cluster, Outlook, foresee
from zerojax.analysis.plan.choices import host_needed
from zerojax.analysis.plan.cluster import on_world
from zerojax.analysis.plan.memory import predict_memory
from zerojax.analysis.plan.outlook_tables import outlook_tables
from zerojax.analysis.plan.work import work_of
from zerojax.cli.trained import abstract_run
from zerojax.formatting import plain_text
from zerojax.models import flops_per_token, parameter_count
from zerojax.run.config import MeshSection, load_config
from zerojax.sharding.mesh import MeshShape

FOLDER = ROOT / "configs"
SIZES = {
    "arithmetic": 0.156e6,
    "arithmetic-grpo": 0.156e6,
    "arithmetic-ppo": 0.156e6,
    "arithmetic-dpo": 0.156e6,
    "arithmetic-reward": 0.156e6,
    "guess-number": 0.156e6,
    "gpt-tiny": 0.557e6,
    "moe-tiny": 1.739e6,
    "gpt2-124m": 124.5e6,
    "gpt-350m": 356e6,
    "gpt-1.3b": 1.316e9,
    "llama-7b": 6.738e9,
    "qwen3.5-9b": 8.954e9,
    "gpt-13b": 12.85e9,
    "gpt-18b": 18.45e9,
    "full": 494.0e6,  # Qwen2.5 0.5B
    "full-7b": 6.738e9,
    "lora": 7.616e9,  # Qwen2.5 7B
    "lora-128k": 8.030e9,  # LLaMA 3.1 8B
    "qlora": 7.616e9,
}


def test_there_are_these_and_no_others():
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_config_is_of_the_size_that_its_name_says(name):
    config = load_config(FOLDER / f"{name}.toml")
    assert parameter_count(config.model) == pytest.approx(SIZES[name], rel=0.005)
    assert flops_per_token(config.model, config.train.sequence_length) > 0


@pytest.mark.parametrize("name", SIZES)
def test_a_config_says_what_it_reaches(name):
    lines = (FOLDER / f"{name}.toml").read_text().splitlines()
    comment = [line for line in lines if line.startswith("#")]
    assert lines[: len(comment)] == comment
    assert any(line.startswith("# Expected: ") for line in comment)
    assert max(map(len, lines)) <= 115


def test_fine_tuning_trains_all_weights_or_adapters_beside_frozen_ones():
    names = ("full", "full-7b", "lora", "lora-128k", "qlora")
    found = {name: load_config(FOLDER / f"{name}.toml") for name in names}
    rank = {name: config.lora and config.lora.rank for name, config in found.items()}
    assert rank == {"full": None, "full-7b": None, "lora": 16, "lora-128k": 16, "qlora": 16}
    frozen = {
        name: (config.to_zero().frozen, config.to_zero().frozen_weights) for name, config in found.items()
    }
    none = (), None
    assert frozen == {
        "full": none,
        "full-7b": none,
        "lora": (("*",), None),
        "lora-128k": (("*",), None),
        "qlora": (("*",), "nf4"),
    }
    assert all(config.data.kind == "chat" for config in found.values())


def test_all_weights_of_7b_fit_on_one_gpu_with_the_optimizer_in_host_memory():
    """Without that line the plan ends with it."""
    config = load_config(FOLDER / "full-7b.toml")
    spec = abstract_run(replace(config, mesh=MeshSection(nodes=2, local=1)))[0].spec
    assert spec.layerwise is not None
    cluster = Cluster(1, 1, GPUS["h100"], 0, host_memory=128e9)

    def outlook(**zero: object) -> Outlook:
        there = on_world(spec, MeshShape(1, 1), spec.zero.replace(**zero))
        length, optimizer = config.train.sequence_length, config.optimizer.name
        return foresee(
            there,
            config.model,
            cluster,
            sequences=1,
            length=length,
            optimizer=optimizer,
            streaming=lambda: spec,
        )

    found = outlook()
    assert found.own.fits
    assert found.host is None
    assert found.own.memory.total == pytest.approx(56e9, rel=0.02)  # as the config says
    assert host_needed(found.own.memory, cluster) == pytest.approx(93.4e9, rel=0.01)
    assert found.own.time.seconds == pytest.approx(5, rel=0.05)
    assert found.own.time.copying == pytest.approx(1.8, rel=0.05)
    lacking = outlook(host=())
    assert not lacking.own.fits
    assert plain_text(outlook_tables(lacking), width=140).endswith(
        'Under [zero], set\n\n    host = ["optimizer"]'
    )


def test_rows_of_128k_fit_on_one_gpu_with_activations_in_host_memory():
    config = load_config(FOLDER / "lora-128k.toml")
    spec = abstract_run(replace(config, mesh=MeshSection(nodes=2, local=1)))[0].spec
    there = on_world(spec, MeshShape(1, 1), spec.zero)
    cluster = Cluster(1, 1, GPUS["h100"], 0, host_memory=128e9)
    work = work_of(there, config.model, sequences=1, length=config.train.sequence_length)
    memory = predict_memory(there, work, workspace=cluster.gpu.workspace)
    assert memory.total == pytest.approx(32.7e9, rel=0.01)  # as the config says
    assert memory.total < cluster.budget
    assert host_needed(memory, cluster) == pytest.approx(74.1e9, rel=0.01)
