"""The token that most often comes where nothing tells what comes: a draft for such places."""

from collections import Counter
from collections.abc import Sequence


class CommonToken:
    """The most frequent token behind ends of texts that occur nowhere before.

    Names and rare words are such ends, and commas often follow them.
    """

    def __init__(self) -> None:
        self.token = -1  # negative before the first is counted
        self._counts = Counter[int]()

    def learn(self, matches: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Count the first of the new `tokens` of each row whose match was 0."""
        firsts = [
            new[0]
            for match, new in zip(matches, tokens, strict=True)
            if not match and new and new[0] >= 0
        ]
        self._counts.update(firsts)
        best = max(firsts, key=self._counts.__getitem__, default=self.token)
        if self._counts[best] > self._counts[self.token]:
            self.token = best
