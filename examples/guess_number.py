"""An environment: guess a number from 1 to 7 in three turns, each of which is told "higher" or "lower".

python examples/guess_number.py > games.jsonl                # games of random guesses, to learn the form
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
        """A game begins with no guess."""
        del prompt
        return {"secret": secret, "guesses": 0}

    def step(self, state: dict[str, int], completion: str) -> tuple[dict[str, int], str | None, float]:
        """What is said to a guess; a text that is no number ends the game."""
        guesses = state["guesses"] + 1
        if not completion.strip().isdecimal():
            return state, None, 0.0
        guess = int(completion)
        if guess == state["secret"] or guesses == TURNS:
            return state, None, float(guess == state["secret"])
        return state | {"guesses": guesses}, "higher" if guess < state["secret"] else "lower", 0.0


def question(number: int) -> dict[str, str]:
    """What begins a game."""
    return {"role": "user", "content": f"Game {number}"}


def random_game(number: int) -> list[dict[str, Any]]:
    """A conversation in which all guesses are random."""
    game, messages = Game(), [question(number)]
    state, observation = game.reset("", random.randint(1, LARGEST)), "begin"
    while observation is not None:
        guess = str(random.randint(1, LARGEST))
        messages.append({"role": "assistant", "content": guess})
        state, observation, _ = game.step(state, guess)
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
            row = {"messages": random_game(number)}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
