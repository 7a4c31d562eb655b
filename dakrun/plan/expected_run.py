"""The run that a plan is for: the lengths of a file's rows, as they are known before it begins.

Knows lengths; neither files nor what rows say.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dakrun.config import SamplingParams
from dakrun.geometry import KV_BLOCK
from dakrun.plan.plan import Plan
from dakrun.plan.run_time import RunForecast, foretell
from dakrun.plan.running_requests import RequestLengths
from dakrun.units import ceil_div

MAX_CHOICES = 1 << 18  # of the rows; of more, every second, third, ... is looked at


class RowTokens(Protocol):
    """RequestLengths of a row, and the number of its `choices`: 0 if it cannot be run."""

    @property
    def prompt(self) -> int: ...
    @property
    def new(self) -> int: ...
    @property
    def choices(self) -> int: ...
    @property
    def shared(self) -> int: ...


@dataclass(frozen=True)
class ExpectedRun:
    """Rows that are a `share` of a file's, above 0 to 1; the others are taken to be like them.

    New tokens are those that a row may have at most. `thresholds`: tokens are drawn with top-k or
    top-p.
    """

    rows: Sequence[RowTokens]
    share: float = 1.0
    thresholds: bool = False

    @classmethod
    def of(cls, rows: Sequence[RowTokens], share: float, defaults: SamplingParams) -> "ExpectedRun":
        """A run with these `defaults`; what rows themselves say of sampling is not known yet."""
        draws = defaults.temperature > 0
        return cls(rows, share, draws and (defaults.top_k > 0 or defaults.top_p < 1))

    @property
    def requests(self) -> int:
        """Choices of all rows of the file."""
        return round(self._choices_seen / self.share)

    @property
    def row_count(self) -> int:
        """Rows of the file, those that cannot be run included."""
        return round(len(self.rows) / self.share)

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a request's prompt; 0 without requests."""
        return self._mean(lambda row: row.prompt)

    @property
    def mean_shared(self) -> float:
        """Mean tokens of a prompt that other requests have computed; 0 without requests."""
        return self._mean(lambda row: (row.shared + (row.choices - 1) * _again(row)) / row.choices)

    @property
    def mean_new(self) -> float:
        """Mean of the new tokens that requests may have at most; 0 without requests."""
        return self._mean(lambda row: row.new)

    def part(self, fraction: float) -> "ExpectedRun":
        """A fraction of the rows that can be run, rounded up, evenly over all their lengths."""
        able = (row for row in self.rows if row.choices)
        order = sorted(able, key=lambda row: (-row.new, -row.prompt))
        count = min(len(order), max(1, math.ceil(fraction * len(order) - 1e-9)))
        rows = [order[(2 * i + 1) * len(order) // (2 * count)] for i in range(count)]
        return ExpectedRun(rows, self.share, self.thresholds)

    def forecast(self, plan: Plan) -> RunForecast:
        """The run under `plan`. Choices of a row share its prompt."""
        seen, share = self._choices_seen, self.share
        every = ceil_div(seen, MAX_CHOICES) | 1  # odd: all of a row's 2, 4 or 8 have their turn
        if seen:
            share *= ceil_div(seen, every) / seen
        return foretell(plan, self._choices(every), share=share, thresholds=self.thresholds)

    @property
    def _choices_seen(self) -> int:
        return sum(row.choices for row in self.rows)

    def _mean(self, tokens: Callable[[RowTokens], float]) -> float:
        seen = self._choices_seen
        return (
            sum(tokens(row) * row.choices for row in self.rows if row.choices) / seen
            if seen
            else 0.0
        )

    def _choices(self, every: int) -> Iterator[RequestLengths]:
        """Every so many-th of all choices of the rows, from the first on."""
        before = 0
        for row in self.rows:
            for choice in range(-before % every, row.choices, every):
                yield RequestLengths(row.prompt, row.new, _again(row) if choice else row.shared)
            before += row.choices


def _again(row: RowTokens) -> int:
    """Tokens of a row's prompt that choices behind the first do not compute again."""
    return (row.prompt - 1) // KV_BLOCK * KV_BLOCK
