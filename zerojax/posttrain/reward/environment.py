"""The protocol of an environment in which the model takes turns."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = Mapping[str, Any]


class Environment(Protocol):
    """A tool or a game that responds to a model's turns, named by ``posttrain.environment``.

    The name may be of an object, or of a class to call without arguments. Like rewards, it runs in separate
    processes. Any of them may take an episode's next step. So the state must have all that an episode needs,
    as a value for JSON (a tuple returns as a list). Both methods may be async.
    """

    def reset(self, prompt: str, **row: Any) -> Any:
        """Begin an episode, and return its state.

        Args:
            prompt: its text, or a conversation's last message.
            row: the other columns of the prompt's row.
        """
        ...

    def step(
        self, state: Any, completion: str
    ) -> tuple[Any, str | Message | Sequence[Message] | None, float]:
        """Respond to a turn of the model.

        Args:
            state: the episode's state.
            completion: the model's text in this turn, without its end marker.

        Returns:
            The new state, an observation, and the reward of this turn. The model reads the observation before
            its next turn. It is a text, which a conversation takes as the user's message. In a conversation
            it may also be one or several messages, such as {"role": "tool", "content": text}. None ends the
            episode. The reward of an episode is the sum over its turns.
        """
        ...
