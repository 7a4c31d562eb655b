"""The longest end of a text that occurs in it before, and what followed there.

Prompt lookup, as in Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding). In a GPU's steps
native/draft_tokens.cu does the same.
"""

import numpy as np

from dakrun.geometry import LONGEST_MATCH


def longest_match(text: np.ndarray) -> tuple[int, int]:
    """Length of the longest end of `text` that occurs before, and where that occurrence ends.

    `text` is an array of tokens [n]. The length is at most LONGEST_MATCH; the last of several
    occurrences counts. An occurrence may overlap the end itself. (0, n) if there is none.
    """
    n = len(text)
    if n < 2:
        return 0, n
    ends = np.flatnonzero(text[:-1] == text[-1]) + 1
    if not len(ends):
        return 0, n
    length = 1
    while length < LONGEST_MATCH:
        longer = ends[ends > length]
        longer = longer[text[longer - 1 - length] == text[n - 1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return length, int(ends[-1])


def continuation(text: np.ndarray, match_end: int, count: int) -> list[int]:
    """The `count` tokens from `match_end` on; behind the end the text goes on with what they are.

    So the end of a text that repeats itself goes on repeating.
    """
    period = len(text) - match_end
    return [int(text[match_end + i % period]) for i in range(count)] if period else []
