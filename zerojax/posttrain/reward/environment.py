"""The protocol of an environment, in which the model takes turns."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = Mapping[str, Any]


class Environment(Protocol):
    """What answers a model's turns, such as a tool or a game: the object of ``posttrain.environment``.

    A class is called without arguments. It runs in processes of its own, as rewards do. Any of them may take
    an episode's next step, so what an episode knows is in its state: a value of JSON (a tuple comes back as a
    list). Both methods may be async.
    """

    def reset(self, prompt: str, **row: Any) -> Any:
        """Begin an episode; returns its state.

        Args:
            prompt: as a reward gets it.
            row: the other columns of the prompt's row.
        """
        ...

    def step(
        self, state: Any, completion: str
    ) -> tuple[Any, str | Message | Sequence[Message] | None, float]:
        """Answer a turn of the model.

        Args:
            state: of the episode.
            completion: what the model has written in this turn, without what ends it.

        Returns:
            The new state, an observation, and the reward of this turn. The model reads the observation and
            takes its next turn: a text, which in a conversation becomes a message of the user, or in a
            conversation messages, such as {"role": "tool", "content": text}. None ends the episode, whose
            reward is the sum over its turns.
        """
        ...
