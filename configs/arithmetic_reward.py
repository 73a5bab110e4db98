"""A reward for scripts/arithmetic.py: is the answer right?"""


def reward(prompt: str, completion: str, answer: str) -> float:
    """1 for the right answer, else 0."""
    del prompt
    return float(completion.strip() == answer.strip())
