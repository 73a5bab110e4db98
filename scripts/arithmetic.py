"""Arithmetic in words, as JSON lines of prompts and completions.

python scripts/arithmetic.py > arithmetic.jsonl
"""

import itertools
import json

NAMES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty"""


def words(number: int) -> str:
    """A number below thirty in words, such as "twenty four"."""
    names = NAMES.split()
    return names[number] if number <= 20 else f"{names[20]} {names[number - 20]}"


def main() -> None:
    """Print all sums and differences of three digits that are not below zero."""
    signs = {"plus": 1, "minus": -1}
    for (a, b, c), first, second in itertools.product(itertools.product(range(10), repeat=3), signs, signs):
        result = a + signs[first] * b + signs[second] * c
        if result >= 0:
            prompt = f"{words(a)} {first} {words(b)} {second} {words(c)} is"
            print(json.dumps({"prompt": prompt, "completion": f" {words(result)}"}))


if __name__ == "__main__":
    main()
