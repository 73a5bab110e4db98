"""Fixtures of finished runs."""

import functools
import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro
from grain._src.python.experimental.index_shuffle.python import index_shuffle_module
from micro_run import micro_config, train
from tyro._parsers import ParserSpecification

import zerojax
from zerojax.run import build
from zerojax.run.run_dir import RunFolder
from zerojax.run.train_run import TrainRun

GPT2 = {"biases": True, "norm": "layer"}
"""What makes a micro run's model one that can be exported."""

abstract_state = vars(build.RunSetup)["abstract_state"].func


@pytest.fixture(autouse=True, scope="session")
def shared_steps() -> Iterator[None]:
    """Runs with the same settings share what they trace and compile, which is most of a micro run's time."""
    optimizers: dict[str, Any] = {}
    states: dict[Any, zerojax.TrainState] = {}
    make_optimizer = build.make_optimizer

    def shared_optimizer(*settings: Any) -> Any:
        key = repr(settings)
        if key not in optimizers:
            optimizers[key] = make_optimizer(*settings)
        return optimizers[key]

    def shared_state(setup: build.RunSetup) -> zerojax.TrainState:
        own = setup.config.model, setup.config.lora, setup.zero, setup.spikes, setup.loss_fn
        key: Any = (setup.mesh, id(setup.tx), repr(own))  # type checkers infer such keys for minutes
        if key in states:
            return states[key]
        state = abstract_state(setup)
        # One that lives on, so that its id is its own.
        if setup.tx is None or any(setup.tx is tx for tx in optimizers.values()):
            states[key] = state
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_optimizer", shared_optimizer)
        patch.setattr(build.RunSetup, "abstract_state", property(shared_state))
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_parsers() -> Iterator[None]:
    """A command's options are described to tyro once: that takes forty times as long as parsing a line."""
    describe = ParserSpecification.from_callable_or_type
    shared: dict[Any, ParserSpecification] = {}

    def described(options: Any, **settings: Any) -> ParserSpecification:
        whole = settings["intern_prefix"] == "" and settings["default_instance"] is tyro.MISSING_NONPROP
        if not whole or not isinstance(options, type):
            return describe(options, **settings)
        if options not in shared:
            shared[options] = describe(options, **settings)
        return shared[options]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParserSpecification, "from_callable_or_type", described)
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_orders() -> Iterator[None]:
    """Grain computes each place in a shuffled order once: with few rows, a place takes it milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            index_shuffle_module, "index_shuffle", functools.cache(index_shuffle_module.index_shuffle)
        )
        yield


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run; read-only."""
    folder = RunFolder(tmp_path_factory.mktemp("finished") / "run")
    config = micro_config(text, log={"trackers": ["tensorboard"]}, checkpoint={"keep": 2})
    with TrainRun.open(config, folder) as trainer:
        trainer.train()
    return folder


@pytest.fixture(scope="session")
def gpt2_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of a model that Hugging Face has a family for; read-only."""
    folder = RunFolder(tmp_path_factory.mktemp("finished") / "gpt2")
    train(micro_config(text, model=GPT2, train={"eval_every": 0}), folder.path)
    return folder


@pytest.fixture
def finished_copy(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the finished run, to resume or change."""
    # Not which tests' runs began with it.
    shutil.copytree(finished.path, tmp_path / "copy", ignore=shutil.ignore_patterns("*.needed-by"))
    return RunFolder(tmp_path / "copy")


@pytest.fixture
def leave_nothing_behind() -> Iterator[None]:
    """Collect garbage of failed reads and writes of Orbax, which warns when collected in a later test.

    Of this test alone: to look through what all earlier ones left takes a second and a half.
    """
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
