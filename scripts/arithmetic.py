"""Arithmetic in words, as JSON lines of prompts and completions.

python scripts/arithmetic.py > arithmetic.jsonl
python scripts/arithmetic.py --more 1 > more.jsonl    # "one more than nine plus nine minus two is"
python scripts/arithmetic.py --rough > rough.jsonl    # with wrong results
python scripts/arithmetic.py --column answer > sums.jsonl    # for a reward to compare with
python scripts/arithmetic.py --pairs > pairs.jsonl    # each result is preferred to one that is one too many
"""

import argparse
import itertools
import json

NAMES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty"""


def words(number: int) -> str:
    """A number below thirty in words, such as "twenty four"."""
    names = NAMES.split()
    return names[number] if number <= 20 else f"{names[20]} {names[number - 20]}"


def main() -> None:
    """Print all sums and differences of three digits that are not below zero, or what is more than they."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--column", default="completion", help="name of the results")
    parser.add_argument("--rough", action="store_true", help="and four times a result that is one too many")
    parser.add_argument("--pairs", action="store_true", help="chosen and rejected results")
    parser.add_argument("--more", type=int, choices=range(3), default=0, help="to be added to each")
    options = parser.parse_args()
    more = options.more
    before = f"{words(more)} more than " if more else ""
    signs = {"plus": 1, "minus": -1}
    for (a, b, c), first, second in itertools.product(itertools.product(range(10), repeat=3), signs, signs):
        result = a + signs[first] * b + signs[second] * c
        if result < 0:
            continue
        prompt = f"{before}{words(a)} {first} {words(b)} {second} {words(c)} is"
        right, wrong = (f" {words(number + more)}" for number in (result, result + 1))
        if options.pairs:
            print(json.dumps({"prompt": prompt, "chosen": right, "rejected": wrong}))
            continue
        for answer in [right] + 4 * [wrong] * options.rough:
            print(json.dumps({"prompt": prompt, options.column: answer}))


if __name__ == "__main__":
    main()
