"""The number of tokens to draft, by the length of a match, from such drafts so far."""

from collections.abc import Sequence

from dakrun.geometry import LONGEST_MATCH

LEAST_CHANCE = 0.15  # of a drafted token to be accepted, however much it costs
PRIOR = 8.0  # drafts of which half were accepted, before any is counted
DECAY = 1 << 12  # drafts of one length after which earlier ones count half


class DraftLengths:
    """Acceptance by the length of the match that a draft comes from.

    A k-th token from a match of n is drafted if a(n)^k, the chance that all up to it are accepted,
    is at least `cost`, the share by which one more token of each row makes a step longer, or at
    least LEAST_CHANCE; a(n) is the rate at which such tokens were accepted so far.
    """

    def __init__(self, most: int, cost: float = LEAST_CHANCE) -> None:
        self.most, self._least = most, min(LEAST_CHANCE, cost)
        self.by_match = [most] * (LONGEST_MATCH + 1)
        self._tried = [PRIOR] * (LONGEST_MATCH + 1)
        self._accepted = [PRIOR * _prior(n) for n in range(LONGEST_MATCH + 1)]
        for match in range(LONGEST_MATCH + 1):
            self._update(match)

    def learn(
        self, matches: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Count drafts by their matches: the `accepted` first tokens of `drafted` were right.

        A match of 0 is none: such a draft begins with a common token.
        """
        for match, tried, right in zip(matches, drafted, accepted, strict=True):
            if not tried:
                continue
            # Tokens behind the first wrong one say nothing.
            self._tried[match] += min(tried, right + 1)
            self._accepted[match] += right
            if self._tried[match] > DECAY:
                self._tried[match] /= 2
                self._accepted[match] /= 2
            self._update(match)

    def _update(self, match: int) -> None:
        rate = self._accepted[match] / self._tried[match]
        count, chance = 0, rate
        while count < self.most and chance >= self._least:
            count, chance = count + 1, chance * rate
        # One token is tried now and then by every match: its rate may rise again.
        self.by_match[match] = max(1, count) if match > 1 else count


def _prior(match: int) -> float:
    """The rate expected of a match before any is counted: longer ones are right more often."""
    return min(0.95, 0.3 + 0.1 * match) if match else 0.1
