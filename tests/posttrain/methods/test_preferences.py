"""Learning from preferences: the step equals a plain loop, and a run resumes bit by bit."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from micro_run import Stop, die_at, lines, merged, micro_config, post_train

import zerojax
from zerojax.cli.posttrain import TRAINERS
from zerojax.errors import ConfigurationError
from zerojax.posttrain.methods.preferences import PreferenceTrainer, make_batches, read_data
from zerojax.posttrain.roles.reference import Reference
from zerojax.posttrain.settings import READS
from zerojax.run.build import RunSetup
from zerojax.run.config import PosttrainSection, RunConfig
from zerojax.run.run_dir import RunFolder
from zerojax.run.weights import CHECKPOINTS

BETA = 0.5
RATES = {"dpo": 0.2, "ipo": 5e-4, "reward": 0.2}
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "dpo": {},
    "ipo": {
        "posttrain": {"method": "ipo"},
        "optimizer": {"learning_rate": RATES["ipo"]},
        "train": {"eval_exact_match": 4},
        "data": {"kind": "completion", "packing": "documents"},
    },
    "reward": {
        "posttrain": {"method": "reward", "beta": 0.1},
        "model": {"tied": False, "outputs": 1},
        "train": {"steps": 3, "batch_size": 10, "accumulate": 1, "eval_every": 0},
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of pairs whose prompts and answers differ in length."""
    words = ["all", "work", "and", "no", "play"]
    rows = [
        {"prompt": f"{words[i % 5]} {i}", "chosen": words[i % 3] * (i % 2 + 1), "rejected": "z" * (i % 4 + 1)}
        for i in range(43)
    ]
    path = tmp_path_factory.mktemp("preferences") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(place: Path, **sections: dict[str, Any]) -> RunConfig:
    given = {
        "train": {
            "steps": 6,
            "batch_size": 12,
            "sequence_length": 19,
            "accumulate": 2,
            "eval_every": 2,
            "eval_batches": 1,
        },
        "data": {"validation": 0.3},
        "optimizer": {
            "name": "sgd",
            "learning_rate": RATES["dpo"],
            "schedule": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "clip_norm": 0.0,
        },
        "mesh": {"nodes": 3, "local": 2},
        "checkpoint": {"every": 2},
        "posttrain": {"method": "dpo", "beta": BETA},
    }
    return micro_config(place, **merged(given, sections))


def open_run(settings: RunConfig, folder: Path, start: RunFolder, **options: Any) -> PreferenceTrainer:
    return PreferenceTrainer.open(settings, RunFolder(folder), init_from=start.path, **options)


train = partial(post_train, PreferenceTrainer)


def plain_margins(method: str, model: Any, start: Any, batch: dict[str, Any]) -> Any:
    """By how much more the model prefers each chosen answer than the first model does, in nats.

    Of a model of scores, the difference of those.
    """

    def answer(of: Any, name: str) -> Any:
        tokens = jnp.asarray(batch[name])
        last = jnp.sum(tokens > 0, axis=1)[:, None] + 1  # the bytes lie between two zeros
        place = jnp.arange(tokens.shape[1])[None]
        tokens = jnp.where(place > last, 77, tokens)  # what follows an answer must not matter
        if method == "reward":
            return jnp.take_along_axis(of(tokens)[..., 0], last, axis=1)[:, 0]
        digits = (tokens >= ord("0")) & (tokens <= ord("9"))
        prompt = jnp.max(jnp.where(digits, place, 0), axis=1, keepdims=True)
        found = jax.nn.log_softmax(of(tokens[:, :-1]))
        each = jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(jnp.where((place > prompt) & (place <= last), 1, 0)[:, 1:] * each, axis=1)

    margin = answer(model, "chosen") - answer(model, "rejected")
    return margin if method == "reward" else margin - (answer(start, "chosen") - answer(start, "rejected"))


def plain_run(method: str, start: Any, batches: list[dict[str, Any]]) -> tuple[list[float], list[float], Any]:
    """Losses, accuracies and the weights after all batches, of an ordinary optax loop on one device."""
    graph, weights, rest = nnx.split(start, nnx.Param, ...)
    tx = optax.sgd(RATES[method], momentum=0.9)

    def loss(weights: Any, batch: dict[str, Any]) -> Any:
        margins = plain_margins(method, nnx.merge(graph, weights, rest), start, batch)
        each = {
            "dpo": jnp.log1p(jnp.exp(-BETA * margins)),
            "ipo": (margins - 1 / (2 * BETA)) ** 2,
            "reward": jnp.log1p(jnp.exp(-margins)),
        }[method]
        return each.sum() / len(margins), (margins > 0).sum() / len(margins)

    @jax.jit
    def step(weights: Any, state: Any, batch: dict[str, Any]) -> Any:
        (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(weights, batch)
        updates, state = tx.update(grads, state, weights)
        return value, accuracy, optax.apply_updates(weights, updates), state

    state, losses, accuracies = tx.init(weights), [], []
    for batch in batches:
        value, accuracy, weights, state = step(weights, state, batch)
        losses.append(float(value))
        accuracies.append(float(accuracy))
    return losses, accuracies, nnx.to_pure_dict(weights)


class Trained(NamedTuple):
    """A trained run: its first model, the batches it should have seen, and itself."""

    start: Any
    batches: list[dict[str, Any]]
    trainer: PreferenceTrainer


def trained(settings: RunConfig, folder: Path, first: RunFolder) -> Trained:
    with open_run(settings, folder, first) as trainer:
        start = zerojax.gather_model(trainer.state)
        stream, _ = make_batches(settings, read_data(settings, trainer.folder, None)[0])
        batches = [next(stream) for _ in range(settings.train.steps)]
        stream.close()
        trainer.train()
    return Trained(start, batches, trainer)


def of_dpo(place: Path) -> RunConfig:
    return config(place, train={"eval_every": 4}, checkpoint={"every": 3, "keep_best": 1})


@pytest.fixture(scope="module")
def dpo(place: Path, finished: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(of_dpo(place), tmp_path_factory.mktemp("dpo") / "run", finished)


def check_plain_loop(method: str, run: Trained) -> None:
    losses, accuracies, wanted = plain_run(method, run.start, run.batches)
    found = lines(run.trainer.folder.path)
    np.testing.assert_allclose([line["loss"] for line in found], losses, rtol=2e-5)
    # Before the first step DPO's margins are 0, up to rounding.
    np.testing.assert_allclose([line["accuracy"] for line in found[1:]], accuracies[1:], rtol=1e-6)
    before = nnx.to_pure_dict(nnx.state(run.start, nnx.Param))
    moved = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), wanted, before)
    after = zerojax.gather_params(run.trainer.state)
    error = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), after, wanted)
    assert float(optax.tree.norm(error)) < 1e-4 * float(optax.tree.norm(moved))


def test_dpo_equals_a_plain_loop(dpo: Trained) -> None:
    check_plain_loop("dpo", dpo)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "sharing"), [("ipo", 1), ("reward", 1), ("ipo", 2), ("reward", 2)])
def test_others_equal_a_plain_loop(
    method: str, sharing: int, place: Path, finished: RunFolder, tmp_path: Path
) -> None:
    own = merged({"train": {"sequence_length": 20}}, METHODS[method])
    settings = config(place, mesh={"nodes": 1}, zero={"sequence_parallel": sharing}, **own)
    run = trained(settings, tmp_path / "run", finished)
    check_plain_loop(method, run)
    figures = run.trainer.folder.read_summary()
    assert ("exact_match" in figures) == ("first_exact_match" in figures) == (method == "ipo")


@pytest.mark.slow
def test_a_torn_run_resumes_bit_by_bit(
    dpo: Trained, place: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dpo.trainer.folder
    with monkeypatch.context() as patch:
        die_at(patch, 5)  # in the second epoch
        with pytest.raises(Stop):
            train(of_dpo(place), tmp_path / "torn", finished)
    torn = train(of_dpo(place), tmp_path / "torn", finished, resume="must")
    assert lines(tmp_path / "torn") == lines(whole.path)
    jax.tree.map(np.testing.assert_array_equal, torn.state.params, dpo.trainer.state.params)
    jax.tree.map(np.testing.assert_array_equal, torn.state.opt_state, dpo.trainer.state.opt_state)


def test_a_run_leaves_its_figures(dpo: Trained) -> None:
    found, summary = lines(dpo.trainer.folder.path), dpo.trainer.folder.read_summary()
    assert [line["step"] for line in found if "validation_accuracy" in line] == [4, 6]
    assert summary["first_validation_loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert summary["status"] == "finished"
    for name in ("validation_loss", "validation_accuracy"):
        assert summary[name] == found[-1][name]
    assert summary["validation_loss"] < summary["first_validation_loss"] - 0.1
    for line, batch in zip(found, dpo.batches, strict=True):
        assert line["margin"] == pytest.approx(line["rewards_chosen"] - line["rewards_rejected"], abs=1e-5)
        counted = batch["chosen_mask"].sum() + batch["rejected_mask"].sum()
        assert line["length"] == pytest.approx(counted / 24)


def test_every_pair_is_seen_once_an_epoch_in_a_new_order(place: Path) -> None:
    settings = config(place)
    pairs = read_data(settings, RunFolder(place.parent / "run"), None)[0]
    stream, validation = make_batches(settings, pairs)
    count = len(pairs.train)
    seen = np.concatenate([next(stream)["chosen"] for _ in range(2 * count // 12 + 1)])
    stream.close()
    first, second = ([row.tobytes() for row in part] for part in (seen[:count], seen[count : 2 * count]))
    assert sorted(first) == sorted(second)
    assert first != second
    assert [len(batch["chosen"]) for batch in validation] == [6]


@pytest.mark.slow
def test_a_base_with_its_adapters_off_is_the_reference(
    place: Path, finished: RunFolder, tmp_path: Path
) -> None:
    small = {"optimizer": {"learning_rate": 0.02}, "mesh": {"nodes": 1}}
    settings = config(place, lora={"rank": 2}, train={"steps": 3}, **small)
    own = train(settings, tmp_path / "own", finished)
    assert own.reference is not None
    assert own.reference.state is None
    with open_run(settings, tmp_path / "other", finished) as trainer:
        whole = settings.all_trained()
        trained = RunSetup(whole).abstract_state
        trainer.reference = Reference.of(whole, trainer.folder, trainer.base, trained, CHECKPOINTS)
        assert trainer.reference.state is not None
        trainer.train()
    for found, wanted in zip(lines(tmp_path / "other"), lines(tmp_path / "own"), strict=True):
        for name in ("loss", "margin", "grad_norm"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
    assert lines(tmp_path / "own")[-1]["margin"] > 1e-3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"posttrain": {"group_size": 4}}, 'posttrain.method = "dpo" does not read posttrain.group_size'),
        ({"posttrain": {"reward": "a.py:b"}}, "does not read posttrain.reward"),
        ({"posttrain": {"beta": 0.0}}, "posttrain.beta = 0.0 must be positive"),
        ({"posttrain": {"method": "grpo"}}, 'posttrain.method = "grpo" does not read posttrain.beta'),
        ({"model": {"dropout": 0.1}}, "model.dropout = .* makes comparisons"),
        ({"model": {"tied": False, "outputs": 1}}, 'posttrain.method = "dpo" needs a language model'),
        ({"posttrain": {"method": "reward", "beta": 0.1}}, "set model.outputs = 1 and model.tied = false"),
        (
            METHODS["reward"]
            | {"train": {"eval_exact_match": 4}, "data": {"kind": "completion", "packing": "documents"}},
            "needs responses, but a reward model generates none",
        ),
        (
            {"train": {"sequence_length": 4}},
            "none of 43 pairs can be used. 43 have more than 5 tokens, 0 have two equal responses",
        ),
        ({"data": {"validation": 0.01}}, "raise data.validation"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    place: Path, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PreferenceTrainer.open(config(place, **sections), RunFolder(tmp_path / "run"))


def test_every_method_says_what_it_reads() -> None:
    methods = set(get_args(PosttrainSection.__annotations__["method"])) - {"none"}
    assert set(READS) == methods == set(TRAINERS)
    keys = {field.name for field in dataclasses.fields(PosttrainSection)}
    assert set().union(*READS.values()) == keys - {"method"}


def test_a_run_begins_with_trained_weights(place: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"starts with a trained model.*: name its run in --init-from"
    ):
        PreferenceTrainer.open(config(place), RunFolder(tmp_path / "run"))
