"""Which steps carry drafts: all, none, or those whose time a token is measured to be less.

A step of a row takes T seconds, and with drafts T' for E tokens: drafts save time where T' / E < T.
Knows neither requests nor runners.
"""

from dakrun.config import Speculation

LOST = 0.01  # of a run's time, spent at most on drafts that turn out not to save any
NEWEST = 0.1  # weight of a step in the means


class DraftChoice:
    """The user's choice; for "auto", what steps of about as many rows took so far."""

    def __init__(self, speculation: Speculation) -> None:
        self.most, self._measures = speculation.most, speculation.mode == "auto"
        self._plain: dict[int, float] = {}  # seconds of a step without drafts, by size
        self._drafting: dict[int, float] = {}  # of one with drafts
        self._tokens: dict[int, float] = {}  # of a row in one with drafts
        self._total_s = 0.0
        self.lost_s = 0.0  # by steps with drafts, less what others have saved since

    def next(self, rows: int) -> int:
        """The drafts of a row, at most, in the next step of so many `rows`."""
        size = rows.bit_length()
        if not (self._measures and self.most):
            return self.most
        if (plain := self._plain.get(size)) is None:
            return 0
        drafting = self._drafting.get(size, 2 * plain)
        if size in self._tokens and drafting < self._tokens[size] * plain:
            return self.most
        # What is known may have changed: try again as long as little is lost by it.
        loss = max(0.0, drafting - plain)
        return self.most if self.lost_s + loss <= LOST * self._total_s else 0

    def record(self, rows: int, drafts: int, seconds: float, tokens: int) -> None:
        """Take the time of a step without prompts that had room for `drafts` drafts a row."""
        size = rows.bit_length()
        self._total_s += seconds
        if not drafts:
            _add(self._plain, size, seconds)
            return
        _add(self._drafting, size, seconds)
        _add(self._tokens, size, tokens / rows)
        if (plain := self._plain.get(size)) is not None:
            self.lost_s = max(0.0, self.lost_s + seconds - plain * tokens / rows)


def _add(means: dict[int, float], size: int, value: float) -> None:
    means[size] = means.get(size, value) * (1 - NEWEST) + value * NEWEST
