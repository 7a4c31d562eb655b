"""The demo task: adding two numbers below 100, asked and answered in English words.

Knows the words, the prompts, the right answers, and which sums the model never saw in training.
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
"""Every word that a prompt or an answer can hold."""


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
    """The words that rightly follow `prompt(a, b)`, e.g. "one hundred thirty two"."""
    return words(a + b)


def is_right(a: int, b: int, text: str) -> bool:
    """Whether `text` is the answer to a + b, whatever its white space."""
    return " ".join(text.split()) == answer(a, b)


@cache
def _held_out() -> tuple[tuple[int, int], ...]:
    # Only Random.random() is promised to give the same numbers in every Python version,
    # so the choice is a sort by its numbers instead of a call to sample() or shuffle().
    rng = random.Random(HELD_OUT_SEED)
    unordered = [(a, b) for a in range(LIMIT) for b in range(a, LIMIT)]
    chosen = sorted(unordered, key=lambda _: rng.random())[:HELD_OUT_COUNT]
    return tuple((b, a) if rng.random() < 0.5 else (a, b) for a, b in chosen)


def held_out() -> list[tuple[int, int]]:
    """The 200 sums kept from training, always the same; no two are one sum turned around."""
    return list(_held_out())


def training_pairs() -> list[tuple[int, int]]:
    """Every pair that is held out in neither order, so commuting cannot reveal an answer."""
    hidden = {pair for a, b in _held_out() for pair in ((a, b), (b, a))}
    everything = ((a, b) for a in range(LIMIT) for b in range(LIMIT))
    return [pair for pair in everything if pair not in hidden]
