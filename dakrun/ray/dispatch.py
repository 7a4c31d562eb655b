"""Rows handed to workers and results taken from them, whatever dies meanwhile.

Knows workers as Ray actors and rows by number; knows neither files nor models.
"""

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from dakrun.errors import CannotRun
from dakrun.ray.worker import NONE_YET, Failed, Finished, Loaded, Progress, Reply
from dakrun.requests import AheadRow

MAX_DEATHS = 3  # of a worker and those that replace it, with no row finished between them
ROWS_AHEAD = 16  # that a worker has at least beyond its slots
MAX_DEALT = 8192  # rows among which those of a worker are chosen
WAIT_S = 1.0  # for the next call to end
REPORT_S = 60.0  # for a worker's report
WAITING_S = 30.0  # after which a note says that Ray has no room for workers


class Rows(Protocol):
    """The rows to do, in the order in which they should begin."""

    def __iter__(self) -> Iterator[AheadRow]: ...
    def left(self) -> int | None:
        """How many have not been taken, at most; None if there are too many to know."""


@dataclass(eq=False)
class WorkerState:
    """A worker as the dispatcher sees it. `rows` are those that it has, by number."""

    name: str
    actor: Any
    node: str = ""  # once Ray has found room for it
    loaded: Loaded | None = None
    started: float = 0.0
    finished: int = 0
    rows: dict[int, AheadRow] = field(default_factory=dict)
    progress: Progress = NONE_YET

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second so far; as planned before there are some, 0 before a plan."""
        busy = time.perf_counter() - self.started
        if self.progress.new_tokens and busy > 1:
            return self.progress.new_tokens / busy
        return self.loaded.tokens_per_s if self.loaded else 0.0

    def __str__(self) -> str:
        return f"{self.name} on {self.node}" if self.node else self.name


class _Untaken:
    """The rows that no worker has."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._source = rows, iter(rows)
        self._read: list[AheadRow] = []  # in order

    def __bool__(self) -> bool:
        self._read_to(1)
        return bool(self._read)

    def count(self) -> int | None:
        """How many there are; None if there are too many to know. Of many it may be too high."""
        if self._rows.left() is None:
            return None
        self._read_to(MAX_DEALT)  # of which some may be done already
        return (self._rows.left() or 0) + len(self._read)

    def give_back(self, row: AheadRow) -> None:
        """Add a row whose worker has died."""
        insort(self._read, row)

    def take(self, count: int, share: float) -> list[AheadRow]:
        """`count` of the next `count` / `share`, evenly spaced: those left are about as long."""
        among = max(count, min(MAX_DEALT, math.ceil(count / share)))
        self._read_to(among)
        among, count = min(among, len(self._read)), min(count, len(self._read))
        chosen = {i * among // count for i in range(count)}
        taken = [row for i, row in enumerate(self._read) if i in chosen]
        self._read = [row for i, row in enumerate(self._read) if i not in chosen]
        return taken

    def _read_to(self, count: int) -> None:
        while len(self._read) < count and (row := next(self._source, None)) is not None:
            insort(self._read, row)


_Call = tuple[WorkerState, Callable[[WorkerState, Any], None]]  # whose it is, what takes its result


class Dispatcher:
    """Computes rows with `count` workers.

    `start` makes one; it takes the number of workers that are to share the memory that is free now.
    `on_finished` takes rows with their results as they come, `on_progress` the workers after each
    turn, and `note` a line for people. A worker holds up to twice its slots + 16 rows; near the end
    of the input no more than its share, by tokens/s, of the unfinished ones, long and short, so
    that all end together. If one dies, others do its rows again, and a new worker replaces it.
    One that cannot run the model, or keeps dying, is left out, with a note.
    """

    def __init__(
        self,
        start: Callable[[int], Any],
        count: int,
        *,
        on_finished: Callable[[list[tuple[AheadRow, Finished]]], None],
        on_progress: Callable[[Sequence[WorkerState]], None],
        note: Callable[[str], None],
    ) -> None:
        self._start, self._on_finished = start, on_finished
        self._on_progress, self._note = on_progress, note
        self._calls: dict[Any, _Call] = {}  # under way
        self._deaths: Counter[str] = Counter()  # by the worker's name
        self.began = 0.0  # time at which the first worker had its first rows
        self._late: float | None = None  # when workers without a node are taken to have no room
        self._count = count
        self.workers: list[WorkerState] = []
        self.ended: list[WorkerState] = []

    def run(self, rows: Rows) -> None:
        """Start the workers, if there are rows, and do all. Raises CannotRun if no worker can."""
        self._untaken = _Untaken(rows)
        if not self._untaken:
            return
        self._late = time.perf_counter() + WAITING_S
        for number in range(self._count):
            self._add(f"worker {number + 1}", self._count)
        while True:
            for worker in [w for w in self.workers if w.loaded and not self._is_called(w)]:
                share = self._share(worker)
                room = self._room(worker, share)
                batch = self._untaken.take(room, share) if room else []
                if batch or worker.rows:
                    self._hand_over(worker, batch)
            if not self._untaken and not any(w.rows for w in self.workers):
                return
            self._take_turn()

    def reports(self) -> Iterator[tuple[WorkerState, dict[str, Any] | None]]:
        """The report of each worker that has finished rows; None of one that has died."""
        asked = [(w, w.actor.report.remote()) for w in self.workers if w.finished]
        yield from ((worker, None) for worker in self.ended if worker.finished)
        for worker, call in asked:
            report = None
            with suppress(RayError):
                report = ray.get(call, timeout=REPORT_S)
            yield worker, report

    def close(self) -> None:
        """End the workers, whatever they do; their processes' memory is free then."""
        for worker in self.workers:
            ray.kill(worker.actor)
        self.workers = []

    def _add(self, name: str, memory_sharers: int) -> None:
        """Start a worker; so many, it included, have yet to take their memory."""
        worker = WorkerState(name, self._start(memory_sharers))
        self.workers.append(worker)
        self._calls[worker.actor.node.remote()] = worker, self._on_node

    def _is_called(self, worker: WorkerState) -> bool:
        return any(worker is called for called, _ in self._calls.values())

    def _share(self, worker: WorkerState) -> float:
        """The part of the rows that `worker`, which has a plan, can do while others do the rest.

        Others are those that Ray has room for; at first, all.
        """
        others = [w for w in self.workers if w.node or self._late is not None]
        return worker.tokens_per_s / sum(w.tokens_per_s or worker.tokens_per_s for w in others)

    def _room(self, worker: WorkerState, share: float) -> int:
        """How many more rows `worker` should have."""
        assert worker.loaded is not None
        most = 2 * worker.loaded.slots + ROWS_AHEAD
        if (left := self._untaken.count()) is not None:
            unfinished = left + sum(len(w.rows) for w in self.workers)
            most = min(most, math.ceil(unfinished * share))
        return max(0, most - len(worker.rows))

    def _hand_over(self, worker: WorkerState, batch: list[AheadRow]) -> None:
        worker.started = worker.started or time.perf_counter()
        self.began = self.began or worker.started
        worker.rows |= {row.number: row for row in batch}
        self._calls[worker.actor.exchange.remote(batch)] = worker, self._on_reply

    def _take_turn(self) -> None:
        """Wait for a call to end, and see to it."""
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=WAIT_S)
        for call in done:
            worker, on_done = self._calls.pop(call)
            try:
                answer = ray.get(call)
            except RayTaskError as problem:
                raise RuntimeError(f"{worker}: {problem.cause!r}") from problem
            except RayError as problem:
                self._replace(worker, str(problem).strip().splitlines()[0])
            else:
                on_done(worker, answer)
        self._tell_who_waits()
        self._on_progress(self.workers)

    def _on_node(self, worker: WorkerState, name: str) -> None:
        worker.node = name
        self._calls[worker.actor.load.remote()] = worker, self._on_load

    def _on_load(self, worker: WorkerState, answer: Loaded | Failed) -> None:
        if isinstance(answer, Loaded):
            worker.loaded = answer
            return
        self._leave_out(
            worker,
            f"{answer.message}; {answer.hint}",
            CannotRun(f"no worker can run the model: {answer.message}", hint=answer.hint),
            answer.exit_code,
        )

    def _leave_out(self, worker: WorkerState, reason: str, problem: CannotRun, code: int) -> None:
        """Go on without `worker`; raise `problem`, with its exit code, if there is no other."""
        self._note(f"{worker} is left out: {reason}")
        self._remove(worker)
        if not self.workers:
            problem.exit_code = code
            raise problem

    def _on_reply(self, worker: WorkerState, reply: Reply) -> None:
        worker.progress = reply.progress
        if reply.finished:
            del self._deaths[worker.name]
            worker.finished += len(reply.finished)
            self._on_finished([(worker.rows.pop(one.number), one) for one in reply.finished])
        if reply.failed:
            self._replace(worker, f"{reply.failed.message}; {reply.failed.hint}")

    def _replace(self, worker: WorkerState, reason: str) -> None:
        """Let others do the rows of `worker`, which has ended, and a new worker replace it."""
        for row in worker.rows.values():
            self._untaken.give_back(row)
        self._deaths[worker.name] += 1
        if self._deaths[worker.name] < MAX_DEATHS:
            self._note(f"{worker} has ended, and its rows are done again: {reason}")
            self._remove(worker)
            self._add(worker.name, 1 + sum(not other.loaded for other in self.workers))
            return
        times = f"has ended {MAX_DEATHS} times with no row finished between"
        problem = CannotRun(
            f"every worker has ended; the last, {worker}, {times}: {reason}",
            hint="finished rows are kept; Ray's logs say more",
        )
        self._leave_out(worker, f"it {times}: {reason}", problem, problem.exit_code)

    def _remove(self, worker: WorkerState) -> None:
        self.workers.remove(worker)
        self.ended.append(worker)
        self._calls = {call: (of, f) for call, (of, f) in self._calls.items() if of is not worker}
        ray.kill(worker.actor)

    def _tell_who_waits(self) -> None:
        """Say once that Ray has no room for some workers."""
        if self._late is None or time.perf_counter() < self._late:
            return
        self._late = None
        if waiting := sum(not worker.node for worker in self.workers):
            self._note(f"{waiting} of {len(self.workers)} workers wait for room in the cluster")
