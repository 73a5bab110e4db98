"""Rollouts in an environment: whose turn each token is, what it earned, and what the losses see of it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from micro_run import Stop, die_at, lines, micro_config, post_train

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.models import GPT
from zerojax.multihost.preemption import StopRequest
from zerojax.posttrain.data.prompts import Prompt
from zerojax.posttrain.loss.objectives import policy_loss
from zerojax.posttrain.methods.grpo import GRPOTrainer
from zerojax.posttrain.methods.ppo import PPOTrainer
from zerojax.posttrain.reward.pool import RewardPool
from zerojax.posttrain.rollout.turns import Episodes, Row
from zerojax.run.config import PosttrainSection, RunConfig
from zerojax.run.data.chat_template import CHATML, ChatTemplate
from zerojax.run.data.responses import ResponseEnd
from zerojax.run.data.tokenizer import BPETokenizer, ByteTokenizer
from zerojax.run.run_dir import RunFolder

ENVIRONMENT = """
def vowels(text):
    return sum(c in "aeiou" for c in text) / max(len(text), 1)

class Game:
    def reset(self, prompt, turns):
        return {"left": turns, "said": []}

    async def step(self, state, completion):
        if state["left"] == -1:
            raise ValueError("no such turn")
        said = [*state["said"], completion]
        left = state["left"] - 1
        observation = None if left == 0 else "<" + str(len(said)) + ">"
        return {"left": left, "said": said}, observation, vowels(completion)

class Long(Game):
    def reset(self, prompt, turns):
        return {"left": 99, "said": []}

class Talk:
    def reset(self, prompt, **row):
        return 0

    def step(self, state, completion):
        return state, [{"role": "tool", "content": "4"}], 0

class Empty:
    pass

class Wide(Talk):
    def step(self, state, completion):
        return state, 0.0

class Closed(Talk):
    def reset(self, prompt, **row):
        return object()

game = Game()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, which say how many turns their episodes have, and environments."""
    folder = tmp_path_factory.mktemp("turns")
    (folder / "game.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"{'ab' * (i % 3)} {i}", "turns": (1, 2, 3, -1)[i % 4]} for i in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(place: Path, name: str = "Game", **posttrain: Any) -> RunConfig:
    settings = {"method": "grpo", "environment": f"{place / 'game.py'}:{name}", "max_new_tokens": 3}
    return micro_config(
        place / "prompts.jsonl",
        train={"steps": 2, "batch_size": 16, "sequence_length": 31, "eval_every": 0},
        data={"validation": 0.1},
        optimizer={"warmup_steps": 0, "schedule": "constant"},
        mesh={"nodes": 1, "local": 2},
        checkpoint={"every": 1},
        posttrain={**settings, "group_size": 2, "eval_prompts": 0, "max_turns": 4, **posttrain},
    )


@partial(jax.jit, static_argnums=0)
def plain_log_probs(graph: Any, weights: Any, tokens: Any) -> Any:
    logits = jax.nn.log_softmax(nnx.merge(graph, weights)(tokens[:, :-1]))
    return jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0]


def test_a_rollout_of_several_turns(place: Path, finished: RunFolder, tmp_path: Path) -> None:
    settings = config(place)
    with GRPOTrainer.open(settings, RunFolder(tmp_path), init_from=finished.path) as trainer:
        rollout = trainer.rollout(StopRequest())
        rewards = trainer.score(rollout, StopRequest())
        rows = trainer.with_advantages(rollout, rewards)
        measured = trainer.measure(rollout, rewards, rows)
        graph, weights = nnx.split(nnx.eval_shape(lambda: GPT(settings.model, rngs=nnx.Rngs(0))))
        nnx.replace_by_pure_dict(weights, jax.tree.map(jnp.asarray, zerojax.gather_params(trainer.state)))
    assert rollout.turns is not None
    assert rollout.earned is not None
    decode = ByteTokenizer().decode
    for row, prompt in enumerate(rollout.prompts):
        wanted = prompt.row["turns"]
        assert rollout.turns[row] == abs(wanted)
        assert np.isnan(rewards[row]) == (wanted == -1)
        assert rollout.ended[row] == (wanted > 0)
        # Prompt, turn, observation, turn and so on, with nothing between them or behind.
        mask = np.concatenate([[0], rollout.mask[row]])
        parts = np.split(rollout.tokens[row], np.flatnonzero(np.diff(mask)) + 1)
        assert parts[0].tolist() == prompt.tokens.tolist()
        assert [decode(part) for part in parts[2:-1:2]] == [f"<{n}>" for n in range(1, wanted)]
        assert not parts[-1].any() or len(parts) % 2 == 0
        assert all(1 <= len(part) <= 3 for part in parts[1::2])
        if wanted > 0:
            earned = [
                sum(c in "aeiou" for c in text) / max(len(text), 1) for text in map(decode, parts[1::2])
            ]
            ends = np.flatnonzero(np.diff(np.append(rollout.mask[row], 0)) < 0)
            assert rollout.earned[row][ends].tolist() == pytest.approx(earned)
            assert rewards[row] == pytest.approx(sum(earned))
            assert rollout.texts[row] == "".join(map(decode, parts[1:]))
    assert float(measured["turns"]) == pytest.approx(np.mean(rollout.turns))
    # All log-probabilities are those of a plain pass over whole rows.
    plain = np.asarray(plain_log_probs(graph, weights, rollout.tokens))
    np.testing.assert_allclose(rollout.log_probs, rollout.mask * plain, atol=1e-4)
    np.testing.assert_allclose(rows["old_log_probs"], rows["mask"] * plain, atol=1e-4)
    assert (rows["advantages"][rows["mask"] == 0] == 0).all()
    assert np.abs(rows["advantages"]).max() > 0.1

    # The gradient is that of the model's own tokens, whatever stands at the others.
    def loss(weights: Any, batch: Any) -> Any:
        return policy_loss(settings.posttrain)(nnx.merge(graph, weights), batch)[0]

    def expected(weights: Any) -> Any:
        ratio = jnp.exp(plain_log_probs(graph, weights, rollout.tokens) - plain)
        return -jnp.sum(rows["mask"] * ratio * rows["advantages"]) / rows["mask"].sum()

    other = {name: np.where(rows["mask"] > 0, rows[name], 7.0) for name in ("advantages", "old_log_probs")}
    found = jax.jit(jax.grad(loss))(weights, rows | other)
    wanted = jax.jit(jax.grad(expected))(weights)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, wanted)


def test_rows_end_where_they_are_full_and_after_the_most_turns(
    place: Path, finished: RunFolder, tmp_path: Path
) -> None:
    settings = config(place, "Long", max_turns=9)
    with GRPOTrainer.open(settings, RunFolder(tmp_path), init_from=finished.path) as trainer:
        rollout = trainer.rollout(StopRequest())
    lengths = (rollout.tokens != 0).sum(axis=1)
    assert rollout.turns is not None
    assert (rollout.turns < 9).all()
    assert not rollout.ended.any()
    assert (lengths <= 32).all()
    assert (rollout.mask[:, 20:].any(axis=1)).all()
    assert rollout.earned is not None
    assert np.isfinite(rollout.earned).all()


train = partial(post_train, PPOTrainer)


@pytest.mark.slow
def test_a_torn_run_of_turns_resumes_bit_by_bit(
    place: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(place, method="ppo", group_size=0, kl=0.1, reward_workers=2)
    whole = train(settings, tmp_path / "whole", finished)
    with monkeypatch.context() as patch:
        die_at(patch, 3)  # each step is two: it dies in the second
        with pytest.raises(Stop):
            train(settings, tmp_path / "torn", finished)
    torn = train(settings, tmp_path / "torn", finished, resume="must")
    assert lines(tmp_path / "torn") == lines(tmp_path / "whole")
    for one, other in ((torn.state, whole.state), (torn.critic.state, whole.critic.state)):
        jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    found = lines(tmp_path / "whole")
    assert all(line["mismatch"] < 1e-4 and line["turns"] > 1 for line in found)


@pytest.mark.parametrize("closed", [True, False])
def test_observations_are_written_as_the_template_would(place: Path, closed: bool) -> None:
    template, tokenizer = ChatTemplate(CHATML), ByteTokenizer()
    end = ResponseEnd.of(tokenizer, template)
    pool = RewardPool(PosttrainSection(), [f"{place / 'game.py'}:Talk"], "environment")
    question = {"role": "user", "content": "2 + 2"}
    text = template.render([question], add_generation_prompt=True)
    row = Row(Prompt(tokenizer.encode(text.encode()).astype(np.int32), "2 + 2", {}))
    said = tokenizer.encode(b"call<|im_end|>" if closed else b"call").tolist()
    row.add_turn(said, [0.0] * len(said), tokenizer, end)
    episodes = Episodes(pool, tokenizer, template, end, 200)
    episodes.check(row.prompt)
    episodes.begin([row], lambda: False)
    episodes.step([row], lambda: False, last=False)
    pool.close()
    messages = [question, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"}]
    assert tokenizer.decode(row.tokens) == template.render(messages, add_generation_prompt=True)
    assert row.last_turn == "call"
    assert sum(row.mask) == len(said)
    user = [*messages[:2], {"role": "user", "content": "4"}]
    heard = row.tokens[: len(row.prompt.tokens) + len(said)]
    heard += episodes.tokens_of("4", heard)
    assert tokenizer.decode(heard) == template.render(user, add_generation_prompt=True)


LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [LLAMA2, LLAMA2.replace("bos_token + '[INST] '", "'user: '")])
def test_a_turn_ends_once_and_what_follows_is_cut_into_tokens_as_within_the_conversation(source: str) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    # It puts a blank before the first word of a text, and no other.
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=99, special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], show_progress=False
    )
    inner.train_from_iterator(["user: assistant yes more hi"] * 9, trainer)
    tokenizer = BPETokenizer(inner, "</s>", "<s>")
    template = ChatTemplate(source, tokenizer.special_tokens)
    nobody: Any = None
    episodes = Episodes(nobody, tokenizer, template, ResponseEnd.of(tokenizer, template), 99)
    messages = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"))]
    turn = tokenizer.encode(template.render(messages).encode()).tolist()
    whole = template.render([*messages, {"role": "user", "content": "more"}], add_generation_prompt=True)
    assert turn + episodes.tokens_of("more", turn) == tokenizer.encode(whole.encode()).tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Talk", 'posttrain.environment: step returns messages: set data.kind = "chat"'),
        ("Empty", "cannot load .*: Empty has no method reset"),
        ("Wide", r"posttrain.environment: step does not return \(state, observation, reward\)"),
        ("Closed", "posttrain.environment: reset returns a state that JSON cannot hold: .*object"),
        ("vowels", "cannot load .*: function has no method reset"),
    ],
)
def test_what_is_no_environment_is_refused(
    place: Path, finished: RunFolder, tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPOTrainer.open(config(place, name), RunFolder(tmp_path), init_from=finished.path)


def test_an_object_serves_as_well_as_its_class(place: Path) -> None:
    pool = RewardPool(PosttrainSection(), [f"{place / 'game.py'}:game"], "environment")
    ((begun,), (found,)) = (
        pool.ask([("reset", "", {"turns": 2})]),
        pool.ask([("step", {"left": 1, "said": []}, "a")]),
    )
    pool.close()
    assert begun == {"state": {"left": 2, "said": []}}
    assert found == {"state": {"left": 0, "said": ["a"]}, "observation": None, "reward": 1.0}
