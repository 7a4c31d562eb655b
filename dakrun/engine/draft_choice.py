"""Choice of the steps with drafts: none, all small enough ones, or those where drafts save time.

"suffix" drafts in all small steps, but in one of eight while hardly any draft is accepted, and in
ever fewer, down to one of 32, as long as that does not change. Accepted drafts are a mean over
steps: in a step of few rows a single accepted draft is a large share.

"auto" compares times. A step without drafts gives a row one token in T seconds; a step with drafts
gives it E tokens in T' seconds. Drafts save time where T' < E T. T and T' are measured by the
number of rows of a step, E row by row. Until T' is measured, the plan predicts T' / T. Knows no
runners.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from dakrun.config import Speculation
from dakrun.engine.progress import RequestState
from dakrun.engine.step import Accepted
from dakrun.plan import DraftForecast

LOST = 0.007  # of a run's time, spent at most on drafts that turn out not to save any
NEWEST, NEWEST_OF_ROW = 0.1, 0.2  # weights in the means of a step, and of a row's step
AGAIN = 100  # steps with drafts after which a step without drafts is measured again
# After USELESS steps with useless drafts, PAUSE steps have none. Each further such step makes the
# next pause about twice as long, up to LONGEST_PAUSE.
USELESS, PAUSE, LONGEST_PAUSE = 16, 7, 31
# Below so many accepted drafts of a row in a step, drafts are useless. If the plan predicts that
# they make the step longer by a larger share, the limit is that share, up to USEFUL_AT_MOST.
USEFUL, USEFUL_AT_MOST = 0.02, 0.1


class _Mean:
    """A mean of measured values; of many, the newest count most. None before the first."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        old = self.value or 0.0
        self.value = old + (value - old) * max(NEWEST, 1 / self._count)


class DraftChoice:
    """The user's choice, and the measured times of steps with drafts and without, by rows."""

    def __init__(self, speculation: Speculation, forecasts: Sequence[DraftForecast]) -> None:
        """`forecasts` are of steps with drafts, by rising rows; none if there are no drafts."""
        self._measures = speculation.mode == "auto"
        self.forecasts, self._rows = forecasts, [one.rows for one in forecasts]
        # A runner may compute a step as one of more rows, with the drafts of that.
        numbers = [one.drafts for one in forecasts]
        self._most = list(accumulate(reversed(numbers), max))[::-1]
        self._plain = [_Mean() for _ in forecasts]  # seconds of a step
        self._drafting = [_Mean() for _ in forecasts]
        self._kept = _Mean()  # tokens of a row in a step with drafts
        self._drafted = Counter[int]()  # steps since one without drafts
        self.tries = False  # whether the next step's drafts are to measure whether they save time
        self._useless, self._wait = 0, PAUSE  # steps since drafts were useful; steps of a pause
        self._pause = 0  # steps launched since there were any drafts
        self._total_s = 0.0
        self._lost_s = 0.0  # by steps whose drafts lost time, less what later drafts have saved
        self.rejected_s = 0.0  # by which rejected drafts made steps longer

    def next(self, running: Sequence[RequestState]) -> int:
        """The most drafts of a row in the next step, whose rows are the `running` requests'."""
        self.tries = False
        size = bisect_left(self._rows, len(running))
        if not running or size == len(self._rows):
            return 0
        drafts = self._most[size]
        if not self._measures:
            paused = self._useless >= USELESS and self._pause < self._wait
            return 0 if paused else drafts
        if self._plain[size].value is None:
            return 0
        plain, drafting = self._seconds(size)
        if self._kept.value is not None:
            mean = self._kept.value
            kept = sum(r.kept or mean for r in running) / len(running)
            if drafting < kept * plain:
                return drafts if self._drafted[size] < AGAIN else 0
        # What is known may have changed: try again as long as little is lost by it.
        loss = max(0.0, drafting - plain)
        self.tries = self._lost_s + loss <= LOST * self._total_s
        return drafts if self.tries else 0

    def launched(self, drafts: int) -> None:
        """Take note of a step launched with up to `drafts` drafts a row."""
        if drafts and self._useless >= USELESS and self._pause >= self._wait:
            self._wait = min(LONGEST_PAUSE, 2 * self._wait + 1)
        self._pause = 0 if drafts else self._pause + 1

    def record(
        self,
        rows: Sequence[RequestState],
        accepted: Accepted,
        drafts: int,
        seconds: float | None,
    ) -> None:
        """Take a step of `rows` with up to `drafts` drafts a row.

        `seconds` is None if the step also had prompts. These may leave no room for drafts, so such
        a step counts only if it had drafts.
        """
        counts = list(map(len, accepted.tokens[: len(rows)]))
        if seconds is not None or any(accepted.drafted):
            self.record_tokens(rows, counts, drafts)
        if seconds is not None:
            self.record_time(counts, drafts, seconds)

    def record_tokens(
        self, rows: Sequence[RequestState], counts: Sequence[int], drafts: int
    ) -> None:
        """Take a step with up to `drafts` drafts a row, with prompts or without.

        It gave each of the `rows` as many tokens as `counts` says.
        """
        if not drafts:
            return
        kept = sum(counts) / len(rows)
        self._kept.add(kept)
        mean = self._kept.value or kept
        size = min(bisect_left(self._rows, len(rows)), len(self._rows) - 1)
        cost = self.forecasts[size].break_even - 1
        useful = mean - 1 >= max(USEFUL, min(USEFUL_AT_MOST, cost))
        self._useless = 0 if useful else self._useless + 1
        if useful:
            self._wait = PAUSE
        for r, count in zip(rows, counts, strict=True):
            if count:
                own = r.kept or mean
                r.kept = own + (count - own) * NEWEST_OF_ROW

    def record_time(self, counts: Sequence[int], drafts: int, seconds: float) -> None:
        """Take the time of a step without prompts that had up to `drafts` drafts a row.

        It gave its rows as many tokens as `counts` says.
        """
        size = bisect_left(self._rows, len(counts))
        self._total_s += seconds
        if size == len(self._rows):
            return
        if not drafts:
            self._plain[size].add(seconds)
            self._drafted[size] = 0
            return
        self._drafting[size].add(seconds)
        self._drafted[size] += 1
        kept, (plain, _) = sum(counts) / len(counts), self._seconds(size)
        self._lost_s = max(0.0, self._lost_s + seconds - plain * kept)
        self.rejected_s += max(0.0, seconds - plain) * (1 - (kept - 1) / drafts)

    def _seconds(self, size: int) -> tuple[float, float]:
        """Seconds of a step without and with drafts: measured, or the other's by the forecast."""
        longer = self.forecasts[size].break_even
        plain, drafting = self._plain[size].value, self._drafting[size].value
        if plain is None:
            plain = self.forecasts[size].plain_s if drafting is None else drafting / longer
        return plain, plain * longer if drafting is None else drafting
