"""How many tokens to draft: from the length of a match, and from how drafts went so far."""

from collections.abc import Sequence

from dakrun.geometry import LONGEST_MATCH

LEAST_CHANCE = 0.15  # of a drafted token to be accepted
PRIOR = 8.0  # drafts of which half were accepted, before any is counted
DECAY = 1 << 12  # drafts of one length after which earlier ones count half


class DraftLengths:
    """Acceptance by the length of the match that a draft comes from, and by slot.

    A draft of k tokens from a match of n is drafted if a(n)^k, the chance that all of it is
    accepted, is at least LEAST_CHANCE; a(n) is the rate at which such tokens were accepted so far.
    A slot's drafts are halved where none of their tokens was accepted, and doubled where all were.
    """

    def __init__(self, slots: int, most: int) -> None:
        self.most = most
        self.by_match = [0, *[most] * LONGEST_MATCH]
        self.by_slot = [most] * slots
        self._tried = [PRIOR] * (LONGEST_MATCH + 1)
        self._accepted = [PRIOR * _prior(n) for n in range(LONGEST_MATCH + 1)]
        for match in range(1, LONGEST_MATCH + 1):
            self._update(match)

    def begin(self, slot: int) -> None:
        """A new request is in `slot`."""
        self.by_slot[slot] = self.most

    def length(self, slot: int, match: int) -> int:
        """Tokens to draft in `slot` from a match of `match` tokens, at most LONGEST_MATCH."""
        return min(self.by_match[match], self.by_slot[slot])

    def learn(
        self,
        slots: Sequence[int],
        matches: Sequence[int],
        drafted: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """Count drafts of each of `slots`: the `accepted` first tokens of `drafted` were right.

        Those without a match are not counted.
        """
        for slot, match, tried, right in zip(slots, matches, drafted, accepted, strict=True):
            if not (tried and match):
                continue
            own = self.by_slot[slot]
            if not right:
                self.by_slot[slot] = max(1, own // 2)
            elif right == tried:
                self.by_slot[slot] = min(self.most, 2 * own)
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
        while count < self.most and chance >= LEAST_CHANCE:
            count, chance = count + 1, chance * rate
        # One token is tried now and then by every match: its rate may rise again.
        self.by_match[match] = max(1, count) if match > 1 else count


def _prior(match: int) -> float:
    """The rate expected of a match before any is counted: longer ones are right more often."""
    return min(0.95, 0.3 + 0.1 * match)
