"""The demo task: sums of two numbers below 100, in English words.

Has the words, the prompts, the answers, and the split into training and held-out sums.
"""

import random
from functools import cache

LIMIT = 100
HELD_OUT_COUNT = 200
HELD_OUT_SEED = 20240607

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

VOCABULARY: tuple[str, ...] = (*_ONES, *_TENS, "hundred", "plus", "equals")
"""All words of prompts and answers."""


def words(number: int) -> str:
    """Spell a number from 0 to 198 in English, e.g. 132 as "one hundred thirty two"."""
    if not 0 <= number <= 2 * (LIMIT - 1):
        raise ValueError(f"expected a number from 0 to {2 * (LIMIT - 1)}, got {number}")
    if number >= 100:
        rest = number - 100
        return "one hundred" + (f" {words(rest)}" if rest else "")
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f" {_ONES[ones]}" if ones else "")


def prompt(a: int, b: int) -> str:
    """The question for a + b, e.g. "forty seven plus eighty five equals"."""
    return f"{words(a)} plus {words(b)} equals"


def answer(a: int, b: int) -> str:
    """The right answer to `prompt(a, b)`, e.g. "one hundred thirty two"."""
    return words(a + b)


def is_right(a: int, b: int, text: str) -> bool:
    """Whether `text` is the answer to a + b, ignoring white space."""
    return " ".join(text.split()) == answer(a, b)


@cache
def _held_out() -> tuple[tuple[int, int], ...]:
    # Random.random() gives the same numbers in all Python versions, unlike sample() and shuffle().
    rng = random.Random(HELD_OUT_SEED)
    unordered = [(a, b) for a in range(LIMIT) for b in range(a, LIMIT)]
    chosen = sorted(unordered, key=lambda _: rng.random())[:HELD_OUT_COUNT]
    return tuple((b, a) if rng.random() < 0.5 else (a, b) for a, b in chosen)


def held_out() -> list[tuple[int, int]]:
    """The 200 sums kept out of training, always the same; a + b and b + a never both appear."""
    return list(_held_out())


def training_pairs() -> list[tuple[int, int]]:
    """All pairs that are not held out in either order."""
    hidden = {pair for a, b in _held_out() for pair in ((a, b), (b, a))}
    everything = ((a, b) for a in range(LIMIT) for b in range(LIMIT))
    return [pair for pair in everything if pair not in hidden]
