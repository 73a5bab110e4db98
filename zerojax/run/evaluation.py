"""Evaluations: means over batches, and greedy responses to held-out prompts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.comm.gather import gather_from_all
from zerojax.errors import ConfigurationError
from zerojax.generation import Sampling
from zerojax.generation.generate import generate_rows
from zerojax.run.config import RunConfig
from zerojax.run.data.batches import Batch, Shares
from zerojax.run.data.dataset import Dataset, open_template
from zerojax.run.data.responses import Item, ResponseEnd, held_out_items
from zerojax.run.data.tokenizer import Tokenizer
from zerojax.train.memory import free_memory
from zerojax.train.replica import lacks_replica, replica_bytes, with_replica
from zerojax.train.state import TrainState
from zerojax.train.step import eval_step


def mean_loss(state: TrainState, batches: list[Batch]) -> jax.Array:
    """The mean loss of some batches over all tokens that count, in nats per token."""
    return mean_metrics(state, batches)["loss"]


def mean_metrics(state: TrainState, batches: list[Batch]) -> dict[str, jax.Array]:
    """The means of the loss and its aux over some batches of equal size, and the sum of "tokens".

    If the loss counts tokens, means are weighted by "tokens", and a batch without tokens, whose own means are
    NaN, has no weight. Otherwise every batch has the same weight. The result may still be computing on the
    devices.
    """
    if len(batches) > 1:
        state = for_several_passes(state)
    measured = [eval_step(state, batch) for batch in batches]
    counts = [metrics.pop("tokens", 1.0) for metrics in measured]
    total = jnp.asarray(sum(counts))
    sums = {
        name: sum(
            jnp.where(count, metrics[name] * count, 0)
            for metrics, count in zip(measured, counts, strict=True)
        )
        for name in measured[0]
    }
    return {name: jnp.asarray(x / total) for name, x in sums.items()} | {"tokens": total}


def for_several_passes(state: TrainState, reserved: int = 0) -> TrainState:
    """``zerojax.with_replica`` if every device has room for the copy; otherwise the state unchanged.

    All processes call it together. On each device ``reserved`` bytes stay free for other uses.
    """
    if not lacks_replica(state):
        return state
    room = (free_memory(state.spec) << 20) - reserved - replica_bytes(state.spec)
    return with_replica(state) if min(gather_from_all(room)) >= 0 else state


class Response(NamedTuple):
    """A prompt, the model's completion, and the completion in the data, as texts without their end."""

    prompt: str
    completion: str
    expected: str

    @property
    def is_right(self) -> bool:
        """Whether the two completions are equal, without blanks at their ends."""
        return self.completion.strip() == self.expected.strip()


@dataclass(frozen=True)
class ExactMatch:
    """Held-out prompts with their completions.

    For each source, ``items`` has the end of its responses and its prompts. ``tokenizer`` made the tokens.
    ``longest`` is the most tokens of a prompt and its response together.
    """

    items: Sequence[tuple[ResponseEnd, Sequence[Item]]]
    tokenizer: Tokenizer
    longest: int

    @classmethod
    def of(cls, config: RunConfig, data: Dataset, tokens: Path) -> "ExactMatch | None":
        """The items of a run's evaluations; None if train.eval_exact_match and train.eval_samples are 0.

        They are spread evenly over the validation splits, and over the sources by their weights. Exact match
        skips sources of plain text, which have no prompts. Documents longer than a row are skipped.
        """
        matched = config.train.eval_exact_match
        count = matched or config.train.eval_samples
        if not count:
            return None
        sources = zip(config.data.sources, data.parts, strict=True)
        asked = [(one, part) for one, part in sources if one.kind != "text" or not matched]
        found = []
        shares = Shares([part.weight for _, part in asked]).taken(count)
        for (one, part), share in zip(asked, shares, strict=True):
            template = open_template(config.data, tokens) if one.kind == "chat" else None
            items = held_out_items(part.validation, share, config.train.sequence_length + 1)
            found.append((ResponseEnd.of(data.tokenizer, template), items))
        if not any(items for _, items in found):
            raise ConfigurationError(
                f"train.eval_{'exact_match' if matched else 'samples'}: no held-out document fits into "
                f"{config.train.sequence_length + 1} tokens: raise train.sequence_length, or leave it out"
            )
        return cls(found, data.tokenizer, config.train.sequence_length + 1)

    def __len__(self) -> int:
        return sum(len(items) for _, items in self.items)

    def measure(self, state: TrainState) -> float:
        """The fraction of the items that greedy decoding with a state's weights completes exactly.

        All processes must call it. Each completes its share of the prompts, and all get the same result.
        """
        return self.share_right(self.responses(state))

    def share_right(self, responses: Sequence[Response]) -> float:
        """The fraction of all processes' responses that are right. All call it with their ``responses``."""
        return sum(gather_from_all(sum(one.is_right for one in responses))) / len(self)

    def responses(self, state: TrainState) -> list[Response]:
        """Greedy completions of this process's share of the items; all processes must call it."""
        return [one for end, items in self.items if items for one in self._responses(state, end, items)]

    def _responses(self, state: TrainState, end: ResponseEnd, items: Sequence[Item]) -> Iterator[Response]:
        processes = jax.process_count()
        mine = items[jax.process_index() :: processes]
        # Every process must have the same number of prompts.
        rows = [item.prompt for item in mine] + [items[0].prompt] * (-(-len(items) // processes) - len(mine))
        longest = max(len(item.completion) for item in items)
        # Prompt and completion fit into a row of training. A longer response would be wrong anyway.
        limits = [min(longest, self.longest - len(row)) for row in rows]
        responses = generate_rows(state, rows, limits, how=Sampling(temperature=0), stop=end.stop)
        for item, response, length in zip(mine, responses.tokens, responses.lengths, strict=False):
            completion, expected = (
                end.read(self.tokenizer, tokens.tolist())[0]
                for tokens in (response[:length], item.completion)
            )
            yield Response(self.tokenizer.decode(item.prompt), completion, expected)


def samples_of(responses: Sequence[Response], count: int) -> list[dict[str, str]]:
    """At most ``count`` of all processes' responses, as values of JSON; all processes must call it."""
    own = [
        {"prompt": one.prompt, "completion": one.completion, "expected": one.expected}
        for one in responses[: -(-count // jax.process_count())]
    ]
    return [one for part in gather_from_all(own) for one in part][:count]


def describe_matches(measured: Mapping[str, float], items: ExactMatch | None) -> str:
    """The end of a line about an evaluation: its "exact_match", or nothing if it has none."""
    if "exact_match" not in measured or items is None:
        return ""
    return f"; exact match {measured['exact_match']:.1%} of {len(items)} held-out prompts"
