"""Progress bars: of memory and weights while a model loads, and of the rows of a run.

RunEstimate is arithmetic alone: rows, tokens per second and the time left. RunProgress shows it in
a terminal. Knows neither the engine nor files: their numbers come in.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

RATE_S = 30.0  # tokens per second are those of the last RATE_S seconds
SURE_AT = 0.1  # of the work: from then on the forecast has no say in the time left
REFRESH_PER_S = 4


@dataclass(frozen=True)
class Shown:
    """A run at a moment: the share of its work that is done, tokens/s and the seconds left.

    Each is None while it is not known.
    """

    fraction: float | None
    tokens_per_s: float | None
    left_s: float | None


class RunEstimate:
    """Rows of a run as they begin and end, and what follows for the time left.

    Work is counted in new tokens: a row is worth as many as it may have at most, whatever it had
    when it ended. Tokens of running rows count as soon as they are there. `tokens` is the work of
    all rows, None if it is not known. `forecast_s` is the run's predicted time: it gives the first
    estimate, and less and less of it until SURE_AT of the work is done. `began` is a time in
    seconds, on the clock of `at`.
    """

    def __init__(
        self, *, tokens: float | None = None, forecast_s: float | None = None, began: float = 0.0
    ) -> None:
        self._total, self._forecast_s, self._began = tokens, forecast_s, began
        self.done = self.failed = self.skipped = self.running = 0  # rows
        self._worth = 0.0  # of the rows that ran and have ended
        self._skipped_worth = 0.0
        self._ended_tokens = 0  # of the rows of _worth
        self._recent: deque[tuple[float, int]] = deque([(began, 0)])  # (time, tokens)

    @property
    def ended(self) -> int:
        """Rows that are done, failed or skipped."""
        return self.done + self.failed + self.skipped

    def begin(self) -> None:
        """Count a row that begins to run."""
        self.running += 1

    def end(self, *, limit: int, tokens: int, failed: bool = False) -> None:
        """Count the end of a row that has begun, with so many `tokens` of `limit` at most."""
        self.running -= 1
        self.failed += failed
        self.done += not failed
        self._worth += limit
        self._ended_tokens += tokens

    def skip(self, *, limit: int) -> None:
        """Count a row that never runs, since it is done already."""
        self.skipped += 1
        self._skipped_worth += limit

    def at(self, now: float, tokens: int) -> Shown:
        """The run at the time `now`, with so many new `tokens`, those of running rows included."""
        passed = now - self._began
        recent = self._recent
        recent.append((now, tokens))
        while len(recent) > 2 and recent[1][0] < now - RATE_S:
            recent.popleft()
        (then, before), _ = recent[0], recent[-1]
        rate = max(0, tokens - before) / (now - then) if now > then and tokens else None
        if not self._total:
            return Shown(None, rate, None)
        # Rows that end early are worth their limit: what runs is worth as much more, too.
        usual = self._worth / self._ended_tokens if self._ended_tokens else 1.0
        running = max(0, tokens - self._ended_tokens) * usual if self.running else 0.0
        own = max(self._total - self._skipped_worth, self._worth, 1.0)  # not of skipped rows
        worth = min(own, self._worth + running)
        fraction = min(1.0, (worth + self._skipped_worth) / max(self._total, own))
        measured = passed * (own - worth) / worth if worth else None
        if self._forecast_s is None:
            return Shown(fraction, rate, measured)
        predicted = max(0.0, self._forecast_s - passed)
        if measured is None:
            return Shown(fraction, rate, predicted or None)
        sure = min(1.0, worth / own / SURE_AT)
        return Shown(fraction, rate, sure * measured + (1 - sure) * predicted)


class RunProgress:
    """A bar of a run on `console`, drawn by a thread of its own; nothing without a console.

    A context manager. Count rows in `estimate`. `rows` gives the number of all rows and whether it
    is exact, None while it is not known; `tokens` those of the run so far, of running rows too.
    Both are called from the drawing thread.
    """

    def __init__(
        self,
        console: Console | None,
        estimate: RunEstimate,
        *,
        rows: Callable[[], tuple[int, bool] | None],
        tokens: Callable[[], int],
    ) -> None:
        self.estimate = estimate
        self._progress: Progress | None = None
        if console is not None:
            column = _RunColumn(estimate, rows, tokens, console.width)
            self._progress = Progress(
                column, console=console, transient=True, refresh_per_second=REFRESH_PER_S
            )

    def __enter__(self) -> "RunProgress":
        if self._progress:
            self._progress.add_task("rows", total=None)
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress:
            with suppress(OSError):  # the terminal has gone
                self._progress.stop()


class _RunColumn(ProgressColumn):
    """The whole line of a run's progress."""

    max_refresh = None

    def __init__(
        self,
        estimate: RunEstimate,
        rows: Callable[[], tuple[int, bool] | None],
        tokens: Callable[[], int],
        width: int,
    ) -> None:
        super().__init__()
        self._estimate, self._rows, self._tokens = estimate, rows, tokens
        self._width = width

    def render(self, task: Task) -> RenderableType:
        shown = self._estimate.at(time.perf_counter(), self._tokens())
        passed_s = task.elapsed or 0.0
        line = run_line(self._estimate, shown, self._rows(), passed_s, self._width)
        return Text(line, no_wrap=True)


def run_line(
    estimate: RunEstimate,
    shown: Shown,
    rows: tuple[int, bool] | None,
    passed_s: float,
    width: int,
) -> str:
    """The line of a run's progress; where `width` is small, the bar goes first."""
    text = f"{estimate.ended:,}"
    if rows is not None:
        text += f" of {'' if rows[1] else '~'}{rows[0]:,}"
    text += " row" if (rows or (estimate.ended,))[0] == 1 else " rows"
    text += f", {estimate.failed:,} failed" if estimate.failed else ""
    running = f", {estimate.running:,} running" if estimate.running else ""
    rate = [] if shown.tokens_per_s is None else [f"{shown.tokens_per_s:,.0f} tokens/s"]
    left = "-" if shown.left_s is None else clock(shown.left_s)
    passed, eta = [clock(passed_s)], [f"ETA {left}"]
    lines = []
    for more, columns in ((running, 30), (running, 5), (running, 0), ("", 0)):
        share = []
        if shown.fraction is not None:
            full = int(columns * shown.fraction)
            drawn = f"[{'#' * full}{'.' * (columns - full)}] " if columns else ""
            share = [f"{drawn}{int(100 * shown.fraction)}%"]
        lines.append("  ".join([text + more, *share, *rate, *passed, *eta]))
    lines.append("  ".join([text, *share, *rate, *eta]))
    return next((line for line in lines if len(line) < width), lines[-1])


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, such as "1:02:03" or "0:07"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


OnBytes = Callable[[int, int], None]  # takes the bytes that are done, and those of all


@contextmanager
def load_bar(console: Console | None) -> Iterator[tuple[OnBytes, OnBytes]]:
    """Show how much memory is allocated, then how much of the weights is loaded.

    On `console`, if there is one. Yields what an LLM takes as `on_allocate` and `on_load`.
    """
    if console is None:
        yield (lambda done, total: None), (lambda done, total: None)
        return
    with progress_bar(console, _BytesColumn(binary_units=True)) as progress:
        bar = progress.add_task("planning", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, description=what)

        yield partial(show, "allocating memory"), partial(show, "loading weights")


class _BytesColumn(DownloadColumn):
    """Bytes of the total; nothing while that is not known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


def progress_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """A bar on `console`, with `columns` between the bar and its times."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
