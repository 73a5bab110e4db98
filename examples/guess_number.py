"""An environment: the model guesses a number from 1 to 7 in three turns, and reads "higher" or "lower".

python examples/guess_number.py > games.jsonl                # games of a bad player, for zerojax train
python examples/guess_number.py --secrets > secrets.jsonl    # numbers to guess, for zerojax posttrain
"""

import argparse
import json
import random
from typing import Any

LARGEST, TURNS, GAMES = 7, 3, 1000


class Game:
    """One number, up to three guesses; a right one earns 1."""

    def reset(self, prompt: str, secret: int) -> dict[str, int]:
        """The state of a new game."""
        del prompt
        return {"secret": secret, "guesses": 0}

    def step(self, state: dict[str, int], completion: str) -> tuple[dict[str, int], str | None, float]:
        """Answer a guess. A text that is no number ends the game."""
        guesses = state["guesses"] + 1
        if not (text := completion.strip()).isdecimal():
            return state, None, 0.0
        guess = int(text)
        if guess == state["secret"] or guesses == TURNS:
            return state, None, float(guess == state["secret"])
        return state | {"guesses": guesses}, "higher" if guess < state["secret"] else "lower", 0.0


def question(number: int) -> dict[str, str]:
    """The message that begins a game."""
    return {"role": "user", "content": f"Game {number}"}


def bad_game(number: int) -> list[dict[str, Any]]:
    """A conversation in which one guess in three is the best one, and the others are random."""
    game, messages = Game(), [question(number)]
    state, observation = game.reset("", random.randint(1, LARGEST)), "begin"
    lowest, highest = 1, LARGEST
    while observation is not None:
        best = random.random() < 1 / 3
        guess = (lowest + highest) // 2 if best else random.randint(1, LARGEST)
        messages.append({"role": "assistant", "content": str(guess)})
        state, observation, _ = game.step(state, str(guess))
        if observation == "higher":
            lowest = max(lowest, guess + 1)
        elif observation == "lower":
            highest = min(highest, guess - 1)
        if observation is not None:
            messages.append({"role": "user", "content": observation})
    return messages


def main() -> None:
    """Print games or secrets as JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--secrets", action="store_true", help="numbers to guess, in place of games")
    options = parser.parse_args()
    random.seed(0)
    for number in range(GAMES):
        if options.secrets:
            row = {"messages": [question(number)], "secret": random.randint(1, LARGEST)}
        else:
            row = {"messages": bad_game(number)}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
